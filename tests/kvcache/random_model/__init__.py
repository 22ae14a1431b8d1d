"""One random model of the manager over every combination of its features.

`matrix` says which features there are and which pairs are refused, `seam` is all that is read of a manager's inside,
`plain` is the reference, made of dictionaries, `books` compares both after each call, `moves` makes the calls, with
`handover`, `wrong` and `interrupts` beside it. `python -m tests.kvcache.million_moves` runs as many as one likes.
"""

"""One random model of the manager over every combination of its features.

`matrix` lists the features and the pairs that are refused. `seam` has everything that is read of a manager's inside.
`plain` is the reference, made of dictionaries. `books` compares both after each call. `moves` makes the calls, with
`handover`, `wrong` and `interrupts`. `python -m tests.kvcache.million_moves` makes any number of moves.
"""

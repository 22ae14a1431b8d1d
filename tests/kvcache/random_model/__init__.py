"""One random model of the manager over every combination of its features.

`matrix` lists the features and the pairs that are refused. `seam` reads a manager's internals; no other file does.
`plain` is the reference, made of dictionaries. `books` compares the manager with it after each call. `moves` makes the
calls, with `handover`, `wrong` and `interrupts`. `python -m tests.kvcache.million_moves` makes any number of moves.
"""

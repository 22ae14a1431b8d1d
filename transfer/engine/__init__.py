"""`KVTransferEngine`, the documented transfer engine of MAX, and what is its alone.

Imports `transfer.plan`, `transfer.wire`, `transfer.nixl` and the values of `transfer`. Start reading at `engine.py`.
"""

"""`KVTransferEngine`, the documented transfer engine of MAX, and what is its alone.

Imports `transfer.nixl`. Start reading at `engine.py`.
"""

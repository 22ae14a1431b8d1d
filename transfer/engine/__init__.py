"""`KVTransferEngine`, the documented transfer engine of MAX, and the modules that only it uses.

Imports `transfer.plan`, `transfer.wire`, `transfer.nixl`, the values of `transfer` and the values of `kvcache`. Start
reading at `engine.py`.
"""

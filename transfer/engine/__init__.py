"""`KVTransferEngine`, the documented transfer engine of MAX, and the modules that only it uses.

Imports `transfer.plan`, `transfer.wire`, `transfer.nixl`, and the shared modules of `transfer` and `kvcache`. Start
reading at `engine.py`.
"""

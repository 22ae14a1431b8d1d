"""`pagewire doctor`: reports the installed software, and the features that would be refused on this host.

Imports `kvcache.replica`, `transfer.nixl`, and the shared modules of `kvcache`, `transfer` and `pagewire`. Start
reading at `findings.py`.
"""

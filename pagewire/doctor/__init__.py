"""`pagewire doctor`: reports the installed software, and the features that would be refused on this host.

Imports `kvcache.replica`, `transfer.nixl`, the values of `kvcache`, the values of `transfer` and the values of
`pagewire`. Start reading at `findings.py`.
"""

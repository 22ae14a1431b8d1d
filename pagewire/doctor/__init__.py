"""`pagewire doctor`: what is installed on this host, and what would be refused on it.

Imports `kvcache.replica`, `transfer.nixl`, the values of `kvcache`, the values of `transfer` and the values of
`pagewire`. Start reading at `findings.py`.
"""

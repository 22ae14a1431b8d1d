"""The command `pagewire`, and the tools that it starts.

Imports `kvcache`, `transfer` and `scheduler_adapters`. Start reading at `cli.py`.
"""

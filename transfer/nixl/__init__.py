"""NIXL agents, their common settings, vouchers for agents, and file and object I/O. Only this folder imports nixl.

Imports the shared modules of `kvcache` and `transfer`. Start reading at `agent.py`.
"""

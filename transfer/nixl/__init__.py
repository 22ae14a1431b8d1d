"""NIXL agents, their common settings, vouchers for agents, and file and object I/O. Only this folder imports nixl.

Imports the values of `kvcache` and the values of `transfer`. Start reading at `agent.py`.
"""

"""NIXL agents, their common settings, vouchers for agents, files and objects. This room alone imports nixl.

Imports the values of `kvcache` and the values of `transfer`. Start reading at `agent.py`.
"""

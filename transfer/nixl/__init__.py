"""NIXL agents, the settings under which two may meet, who vouches for one, files, and objects. It alone imports nixl.

Imports the values of `kvcache` and the values of `transfer`. Start reading at `agent.py`.
"""

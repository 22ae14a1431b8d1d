"""NIXL agents, the settings under which two of them may meet, and files. The only room that imports nixl.

Imports `transfer.errors`. Start reading at `agent.py`.
"""

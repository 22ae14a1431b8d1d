"""NIXL agents, the settings under which two of them may meet, trials, and files. The only room that imports nixl.

Imports `transfer.wire` and the values of `transfer`. Start reading at `agent.py`.
"""

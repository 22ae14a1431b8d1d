"""NIXL agents, the settings under which two of them may meet, who vouches for one, and files. It alone imports nixl.

Imports the values of `transfer`. Start reading at `agent.py`.
"""

"""Compares other KV cache managers with ours in the same run: `python -m benchmarks.peers`."""

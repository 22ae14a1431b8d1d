"""Other KV cache managers beside ours, in the same run: `python -m benchmarks.peers`."""

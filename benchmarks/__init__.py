"""The host cost of the manager, one question a file: `python -m benchmarks` runs them, `benchmarks.peers` others."""

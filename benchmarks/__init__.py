"""What the manager costs the host, one question a file: `python -m benchmarks` runs them, `benchmarks.peers` others."""

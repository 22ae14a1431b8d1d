"""One question a file; `python -m benchmarks` runs them all."""

"""Compares programs that fetch KV blocks from another process: ours, kvcr and Mooncake.

Run `python -m benchmarks.rivals`. `lender.py` is our source, and `fetcher.py` our reader. `ours.py` measures them.
`faults.py` kills our source during a fetch, or makes it evict the pages; `others.py` does the same to kvcr and
Mooncake. `hosts.py` puts our two sides on two hosts.
"""

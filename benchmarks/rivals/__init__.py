"""Compares programs that fetch KV blocks from another process, ours and others.

Run `python -m benchmarks.rivals`. `lender.py` is our source, and `fetcher.py` our reader. `ours.py` measures them.
`faults.py` kills or empties the source during a fetch, and `others.py` does the same to kvcr and Mooncake. `hosts.py`
puts our two sides on two hosts.
"""

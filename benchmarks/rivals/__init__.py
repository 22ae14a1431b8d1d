"""Programs that fetch KV blocks from another process beside ours, in the same run: `python -m benchmarks.rivals`.

`lender.py` is our source, `fetcher.py` our reader. `ours.py` measures them. `faults.py` kills or empties the source in
the middle of a fetch, and `others.py` does so to kvcr and Mooncake. `hosts.py` puts our two sides on two hosts.
"""

"""Benchmarks: each file answers one question.

`python -m benchmarks` runs all of them. `benchmarks.peers` compares with other managers.
"""

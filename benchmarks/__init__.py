"""Benchmarks: each file answers one question.

`python -m benchmarks` runs them, `benchmarks.peers` runs other managers.
"""

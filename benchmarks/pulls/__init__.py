"""The processes and programs that `benchmarks.pull` sets beside each other."""

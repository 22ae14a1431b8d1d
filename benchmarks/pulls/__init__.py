"""The processes and programs that `benchmarks.pull` compares."""

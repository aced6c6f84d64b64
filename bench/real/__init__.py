"""Real models on real benchmarks: what `make real` runs."""

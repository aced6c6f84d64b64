"""Measurements, and the demo. Each script is run from the repository's root: `python -m bench.gemm`."""

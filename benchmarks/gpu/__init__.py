"""Checks and measurements on a GPU; `python benchmarks/gpu.py` runs all of them."""

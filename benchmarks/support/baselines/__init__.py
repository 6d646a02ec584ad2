"""Baselines of the benchmarks, written as a careful user would write them."""

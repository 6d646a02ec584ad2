"""Helpers of several benchmarks: random weights, clocks, reports, baselines."""

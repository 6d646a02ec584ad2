"""What several benchmarks share: drawn weights, clocks, reports, baselines."""

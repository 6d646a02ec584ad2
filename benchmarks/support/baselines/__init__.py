"""What the benchmarks compare with, written as a fair user would."""

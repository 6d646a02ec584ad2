"""Load over HTTP, A/B comparison of latencies and quality, and reports."""

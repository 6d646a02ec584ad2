"""Statistics of latencies and quality: blocks, intervals, guardrails, verdicts."""

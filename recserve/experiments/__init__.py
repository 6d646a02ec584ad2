"""Experiments of a server: arms, counts, verdicts, the live page; statistics and charts."""

"""Benchmarks, one folder per question.

Run them from the root of the repository, for example `python -m benchmarks.recommend.beam`.
"""

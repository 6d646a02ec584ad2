"""Benchmarks, one folder per topic and one module per question.

Run them from the root of the repository, for example `python -m benchmarks.recommend.beam`. Each
module's docstring says what it measures and what it prints.
"""

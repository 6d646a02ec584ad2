"""Answers for many users at once: Parquet in, Parquet out."""

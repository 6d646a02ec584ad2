"""Batch jobs: memory and rows per second by the size of the input, and kills at random points."""

"""The scheduler of text requests."""

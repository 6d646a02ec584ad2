"""Formats of generative recommenders that were trained elsewhere, and their import as bundles."""

"""Drafting systems, one file each, and the trees that they draft."""

"""Drafting systems, one file each, and the tree structures that they share."""

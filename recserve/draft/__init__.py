"""One file per way of drafting a tree."""

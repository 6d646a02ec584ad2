"""One file for each way to answer an item request."""

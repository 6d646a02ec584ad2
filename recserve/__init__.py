"""recserve: a generative recommendation server."""

"""The scheduler of item requests, and item searches as CUDA graphs."""

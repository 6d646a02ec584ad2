"""The scheduler of text requests, draft proposal, and text steps as CUDA graphs."""

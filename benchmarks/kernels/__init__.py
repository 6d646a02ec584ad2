"""Times of single kernels against their alternatives, and the quality cost of 8-bit values."""

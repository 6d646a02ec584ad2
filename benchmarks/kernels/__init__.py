"""How fast single kernels are beside their alternatives, and what 8-bit values cost in quality."""

"""The scheduler of item requests."""

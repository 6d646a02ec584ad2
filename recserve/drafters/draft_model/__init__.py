"""A smaller language model, or several."""

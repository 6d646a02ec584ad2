"""Training of drafters for a language model: one file per kind."""

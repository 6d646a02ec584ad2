"""Training of the language model and of its Medusa draft heads."""

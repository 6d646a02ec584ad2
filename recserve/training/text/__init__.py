"""Training of the language model, and text that it writes for its drafters."""

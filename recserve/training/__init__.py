"""Training and evaluation of every model, on one shared training loop."""

"""What drafters, verifiers and the engine share."""

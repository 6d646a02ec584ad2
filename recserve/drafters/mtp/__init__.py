"""Multi-token prediction: modules of the target's own checkpoint."""

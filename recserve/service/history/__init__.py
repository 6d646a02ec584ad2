"""Stored histories, and the validation of incoming events."""

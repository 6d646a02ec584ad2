"""Medusa: a head for each of the next tokens."""

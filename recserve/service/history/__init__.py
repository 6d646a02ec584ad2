"""Stored histories, and events on their way in."""

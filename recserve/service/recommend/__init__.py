"""Recommending and ranking."""

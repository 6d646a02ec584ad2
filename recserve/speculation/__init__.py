"""Drafting and verification of text."""

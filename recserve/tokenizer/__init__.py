"""Converts text to tokens and back: tokeniser, chat template, streaming and stop strings."""

"""Text to token numbers and back: tokeniser, chat template, incremental text, stop strings."""

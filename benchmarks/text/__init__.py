"""How fast text is written, with and without drafts, and that drafts change no token."""

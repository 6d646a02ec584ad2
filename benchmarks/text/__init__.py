"""Speed of text generation with and without drafts, and checks that drafts change no token."""

"""Completions, chats and text scores."""

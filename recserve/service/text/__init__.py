"""The text service: completions, chats and text scores."""

"""How items are found: beam search down the trie, drafts of it, filters and bounds."""

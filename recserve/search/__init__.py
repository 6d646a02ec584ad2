"""Item search: beam search down the trie, drafts for it, filters and bounds."""

"""What families share: networks over the target's states, readers of files, trees of drafts."""

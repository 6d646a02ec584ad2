"""Drafters of texts. A family is a file, or a folder with network, files, questions, drafter."""

"""The artifact on disk: build, open, export."""

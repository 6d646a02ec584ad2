"""The live catalogue: versions, changes, filters."""

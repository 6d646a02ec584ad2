"""Bundles on disk: build, open and export the artifact that a server loads."""

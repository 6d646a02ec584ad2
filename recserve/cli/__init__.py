"""The commands."""

from recserve.cli.app import app, main

__all__ = ["app", "main"]

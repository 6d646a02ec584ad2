"""The command line `recserve`."""

from recserve.cli.app import app, main

__all__ = ["app", "main"]

"""Logs and traces of the server."""

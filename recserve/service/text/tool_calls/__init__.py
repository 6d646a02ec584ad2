"""Calls of tools in texts: one file per format, which parses calls and writes their grammar."""

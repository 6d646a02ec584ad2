"""Runs the requests of experiments through their arms."""

"""Experiments inside the server: settings, assignment, tallies of the arms, guards."""

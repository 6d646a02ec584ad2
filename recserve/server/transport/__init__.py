"""Connections and their limits, and the gate in front of the routes."""

"""Client connections with their limits, and the gate in front of the routes."""

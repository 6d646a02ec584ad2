"""How many replicas a load needs: a simulated day, and its check against one real server."""

"""Client connections with their limits, quotas, and the check of the page that sends a request."""

"""Cost of HTTP, and of other processes on the machine."""

"""The HTTP server: routes, errors, the lifecycle of the service, and the playground page."""

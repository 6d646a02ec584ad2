"""Waiting for the background work of an engine."""


def settled(service):
    """Waits until the background work of the service's engine is done."""
    engine = service.engine
    while True:
        with engine.held():
            if not engine.stats().background:
                return

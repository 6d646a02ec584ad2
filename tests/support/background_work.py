"""Waiting for what an engine does when nobody waits for it."""


def settled(service):
    """Wait until nothing is left to do that nobody waits for."""
    engine = service.runtime.engine
    while True:
        with engine.held():
            if not engine.stats().background:
                return

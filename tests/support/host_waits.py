"""Bounds on the number of host synchronisations per request."""

# Three levels. `beam` takes two rounds. Each round reads from the device:
# - to size its tree, twice, and a third time if part of the tree is cached
# - to place its nodes, and to find how far the scores reach
# - twice more in the round that reaches the leaves
# `speculative` reads its draft, and what the draft left out. A repeated request also reads which
# nodes of the cached draft were needed. In a batch with a request that is drafted for, it reads
# both; requests with a filter are always drafted for. Every slate is read twice: its rows and its
# scores. `read` and `shape` are defined in pretend_cuda.py.
WAITS = {
    "beam": {"read": 8, "shape": 7},
    "speculative": {"read": 8, "shape": 5},
    "nezha": {"read": 2},
    "rpg": {"read": 2},
    "dense": {"read": 1},
    "likelihood": {"read": 2, "shape": 4},
    "warm": {},
}


RANK = {"read": 2}


def assert_waits(device, engine, requests, bounds):
    """Asserts the bounds for cold requests, then for requests with a cached prefix."""
    engine.run_many(requests)
    for cached in (False, True):
        if not cached:
            engine.forget_all()
        device.syncs.clear()
        engine.run_many(requests)
        counts = device.counts()
        for kind in ("read", "shape", "upload"):
            assert counts[kind] <= bounds.get(kind, 0), (
                f"{kind}, cached: {cached}\n" + device.table()
            )

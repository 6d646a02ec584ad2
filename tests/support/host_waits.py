"""Bounds on how often the host waits for the device in a request."""

# Three levels. `beam` takes two rounds; each looks at the device to size its tree (twice, and once
# more where some of it was scored before), to place its nodes and to learn how far the scores go,
# and the round that goes on to the leaves twice more. `speculative` looks at what it drafts, and at
# what its draft has left out; when the same is asked the second time, also at what of the kept
# draft was needed, and beside one that is drafted for, as those with a filter always are, at both.
# All read a slate twice: its rows and its scores. `read` and `shape` as in pretend_cuda.py.
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
    """Cold, then with the root in the prefix cache."""
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

"""History stores of tests that call some of the methods only."""

import threading

import numpy as np

from recserve.features.history.history import HistoryStore, merge, read_stored


class PartialStore(HistoryStore):
    """A store without methods; a subclass has those that its test calls."""

    @classmethod
    def open(cls, url, options):
        raise NotImplementedError

    def get_many(self, user_ids):
        raise NotImplementedError

    def append_many(self, changes):
        raise NotImplementedError

    def delete(self, user_id):
        raise NotImplementedError

    def close(self):
        pass


class MemoryStore(PartialStore):
    """Histories in the memory of one process, as in the guide; it cannot list its users."""

    blocks = False
    cap = 8

    def __init__(self) -> None:
        self.histories: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    def get_many(self, user_ids):
        return [self.histories.get(user_id, read_stored(None)) for user_id in user_ids]

    def append_many(self, changes):
        applied = {}
        with self._lock:
            for user_id, made in changes.items():
                merged = merge(self.get(user_id), made, self.cap)
                self.histories[user_id], applied[user_id] = merged.history, merged.applied
        return applied

    def delete(self, user_id):
        return self.histories.pop(user_id, None) is not None

    def close(self):
        pass

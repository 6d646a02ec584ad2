"""Writes slates and outcomes on a thread of its own; a request never waits for the disk."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from recserve.metrics import SlateLogCounts
from recserve.schemas.items import RecommendResponse
from recserve.service.attribution import Signer
from recserve.service.slate_log.files import LogFiles
from recserve.service.slate_log.records import (
    OutcomeRecord,
    Record,
    SlateRecord,
    Users,
    logged_user,
)

log = logging.getLogger(__name__)

# In items. A file is written when so many are buffered; a record beyond the second is dropped.
ROTATE_ITEMS, MAX_ITEMS = 200_000, 400_000


@dataclass(frozen=True)
class SlateLogSettings:
    """How slates are logged.

    Attributes:
        folder: Where the files are.
        users: How users are named: by a keyed hash, by the id, or not at all.
        rotate_s: Time after which buffered rows are written.
        max_bytes: Bound on the size of all files.
    """

    folder: Path
    users: Users = "hash"
    rotate_s: float = 60.0
    max_bytes: int = 10 << 30


@dataclass
class _Deletion:
    """A user whose rows are to be removed.

    Attributes:
        users: Values of the column `user`.
        done: Set once no file has such a row, or after an error.
        error: Why rows may be left.
    """

    users: frozenset[str]
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class SlateLog:
    """Buffers records, and writes them every `rotate_s` seconds or ROTATE_ITEMS items.

    A crash loses the buffered records only.

    Attributes:
        settings: How slates are logged.
        counts: Running figures for the metrics.
    """

    def __init__(self, settings: SlateLogSettings) -> None:
        """Opens the folder and starts the thread.

        Raises:
            OSError: If the folder cannot be written.
        """
        self.settings, self.counts = settings, SlateLogCounts()
        self._files = LogFiles(settings.folder, settings.max_bytes)
        self.counts.bytes = self._files.limit()
        self._changed = threading.Condition()
        self._records: list[Record] = []
        self._deletions: list[_Deletion] = []
        self._num_items = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="slate-log", daemon=True)
        self._thread.start()

    def slate(self, user_id: str | None, answer: RecommendResponse, signer: Signer) -> None:
        """Takes a response; it returns at once.

        Args:
            user_id: The user; None for an anonymous history.
            answer: The response.
            signer: Makes the hash of the user.
        """
        user = logged_user(self.settings.users, user_id, signer)
        self._offer(SlateRecord(time.time_ns() // 1000, user, answer))

    def outcome(self, record: OutcomeRecord) -> None:
        """Takes an event that a slate led to; it returns at once."""
        self._offer(record)

    def forget(self, user_id: str, signer: Signer) -> None:
        """Removes the rows of a user, and returns once no file holds one.

        Raises:
            OSError: If a file could not be rewritten.
        """
        deletion = _Deletion(frozenset({user_id, signer.user(user_id)}))
        with self._changed:
            if self._closing:
                raise OSError("the slate log is closed")
            self._deletions.append(deletion)
            self._changed.notify()
        deletion.done.wait()
        if deletion.error is not None:
            raise deletion.error

    def close(self) -> None:
        """Writes what is buffered and stops the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _offer(self, record: Record) -> None:
        with self._changed:
            if self._closing or self._num_items + record.size > MAX_ITEMS:
                self.counts.dropped["queue_full"] += 1
                return
            self._records.append(record)
            self._num_items += record.size
            if self._num_items >= ROTATE_ITEMS:
                self._changed.notify()

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                self._changed.wait_for(self._has_work, self.settings.rotate_s)
                records, self._records, self._num_items = self._records, [], 0
                deletions, self._deletions = self._deletions, []
                closing = self._closing
            gone = frozenset[str]().union(*(deletion.users for deletion in deletions))
            self._write([record for record in records if record.user not in gone])
            self._delete(deletions, gone)

    def _has_work(self) -> bool:
        return self._closing or bool(self._deletions) or self._num_items >= ROTATE_ITEMS

    def _write(self, records: list[Record]) -> None:
        for kind, own in (
            ("slates", [one for one in records if isinstance(one, SlateRecord)]),
            ("outcomes", [one for one in records if isinstance(one, OutcomeRecord)]),
        ):
            if not own:
                continue
            try:
                self._files.write(kind, [record.row() for record in own])
                self.counts.rows[kind] += len(own)
                self.counts.bytes = self._files.limit()
            except Exception as error:
                self.counts.dropped["write_failed"] += len(own)
                log.error("%d rows of the slate log could not be written: %s", len(own), error)

    def _delete(self, deletions: list[_Deletion], gone: frozenset[str]) -> None:
        if not deletions:
            return
        error = None
        try:
            self._files.forget(gone)
        except Exception as failed:
            error = failed
            log.error("a user's rows of the slate log could not be removed: %s", failed)
        for deletion in deletions:
            deletion.error = error
            deletion.done.set()

"""The log of slates and of the events that they led to."""

from __future__ import annotations

import time
from dataclasses import dataclass

from recserve.schemas.items import RecommendResponse
from recserve.service.attribution import Signer
from recserve.service.parquet_log import LogOptions, ParquetLog
from recserve.service.slate_log.records import (
    SCHEMAS,
    OutcomeRecord,
    SlateRecord,
    Users,
    logged_user,
)


@dataclass(frozen=True)
class SlateLogSettings(LogOptions):
    """How slates are logged.

    Attributes:
        users: How users are named: by a keyed hash, by the id, or not at all.
    """

    users: Users = "hash"


class SlateLog(ParquetLog):
    """Logs slates and outcomes.

    Attributes:
        settings: How slates are logged.
    """

    def __init__(self, settings: SlateLogSettings) -> None:
        """Opens the folder. Raises OSError if it cannot be written."""
        super().__init__("slate log", settings, SCHEMAS)
        self.settings = settings

    def slate(self, user_id: str | None, answer: RecommendResponse, signer: Signer) -> None:
        """Takes a response; it returns at once.

        Args:
            user_id: The user; None for an anonymous history.
            answer: The response.
            signer: Makes the hash of the user.
        """
        user = logged_user(self.settings.users, user_id, signer)
        self.offer(SlateRecord(time.time_ns() // 1000, user, answer))

    def outcome(self, record: OutcomeRecord) -> None:
        """Takes an event that a slate led to; it returns at once."""
        self.offer(record)

    def forget(self, user_id: str, signer: Signer) -> None:
        """Removes the rows of a user, and returns once no file holds one.

        Raises:
            OSError: If a file could not be rewritten.
        """
        self.remove({user_id, signer.user(user_id)})

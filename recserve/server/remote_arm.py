"""The arm of an experiment whose requests another recserve server answers."""

from __future__ import annotations

import logging
import ssl
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from recserve.client import AnswerTooLarge, ApiError, AsyncClient, ClientOptions, DeadlinePassed
from recserve.config import MIN_KEY_LENGTH, ConfigError
from recserve.experiments.experiment import ForwardingError, ServingArm
from recserve.schemas.experiments import UNTRACKED_HEADER
from recserve.schemas.items import RankRequest, RecommendRequest

log = logging.getLogger(__name__)
MAX_ANSWER_BYTES = 16 << 20
MAX_KEY_BYTES = 4096
# A recserve server closes an idle connection after 5 s; this side has to be the first one.
IDLE_S = 2.0
# The request is the reason, unless the control answers it.
REFUSED = (400, 413, 415, 422)


class RemoteArm:
    """A client of an arm's own server. Its methods run on the event loop."""

    def __init__(self, arm: ServingArm) -> None:
        """Opens no connection yet.

        Args:
            arm: An arm with the address of its server.

        Raises:
            ConfigError: If the address is invalid or the key cannot be read.
        """
        settings = arm.settings
        assert settings.url is not None
        key = None
        if settings.api_key_file is not None:
            key = _read_key(arm.label, Path(settings.api_key_file))
        # No attempt is repeated: the control answers instead.
        options = ClientOptions(api_key=key, retries=0, max_answer_bytes=MAX_ANSWER_BYTES)
        self._label, self._most, self._in_flight = arm.label, settings.max_in_flight, 0
        try:
            transport = _Transport(arm.label, self._most)
            self._client = AsyncClient(settings.url, options, transport)
        except httpx.InvalidURL as error:
            raise ConfigError(f"experiments: arm {arm.label}: url: {error}") from None

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()

    async def ask(self, body: RecommendRequest | RankRequest, deadline_s: float) -> Any:
        """Sends a request once and returns the answer.

        Args:
            body: The request.
            deadline_s: time.monotonic() value of the deadline. The other server gets a little less.

        Raises:
            ForwardingError: If the server is busy, late, refuses, fails or cannot be reached.
        """
        if self._in_flight >= self._most:
            raise ForwardingError("busy", f"{self._in_flight} requests are in progress")
        left_s = deadline_s - time.monotonic()
        self._in_flight += 1
        try:
            if isinstance(body, RecommendRequest):
                return await self._client.recommend(body, left_s)
            return await self._client.rank(body, left_s)
        except DeadlinePassed:
            raise ForwardingError("late", "no answer in time") from None
        except ApiError as error:
            message = f"status {error.status}"
            if error.status in REFUSED:
                raise ForwardingError("refused", message) from error
            raise ForwardingError("failed", message) from error
        except Exception as error:
            log.warning("arm %s: %s: %s", self._label, type(error).__name__, error)
            if isinstance(error, AnswerTooLarge):
                reason = f"the answer has more than {MAX_ANSWER_BYTES} bytes"
            elif isinstance(error, msgspec.DecodeError | UnicodeDecodeError | RecursionError):
                reason = "the answer has another format"
            else:
                reason = "the connection failed"
            raise ForwardingError("failed", reason) from error
        finally:
            self._in_flight -= 1


class _Transport(httpx.AsyncHTTPTransport):
    """Connections that name the arm in each request and know no proxy of the environment."""

    def __init__(self, label: str, most: int) -> None:
        limits = httpx.Limits(
            max_connections=most, max_keepalive_connections=most, keepalive_expiry=IDLE_S
        )
        super().__init__(ssl.create_default_context(), trust_env=False, limits=limits)
        self._label = label

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.headers[UNTRACKED_HEADER] = self._label
        return await super().handle_async_request(request)


def _read_key(label: str, file: Path) -> str:
    """Reads an API key. Raises ConfigError; the message does not repeat the content."""
    try:
        with file.open("rb") as opened:
            key = opened.read(MAX_KEY_BYTES + 1).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise ConfigError(f"experiments: arm {label}: api_key_file {file}: {cause}") from None
    if not MIN_KEY_LENGTH <= len(key) <= MAX_KEY_BYTES or not key.isprintable():
        raise ConfigError(
            f"experiments: arm {label}: api_key_file {file}: expected one key of "
            f"{MIN_KEY_LENGTH} to {MAX_KEY_BYTES} characters, got {len(key)}"
        )
    return key

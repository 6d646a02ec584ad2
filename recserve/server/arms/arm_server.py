"""The other recserve server of an arm: sends requests to it and reads its answers.

`recserve.client` does not fit here. It follows the environment's proxies and sends requests again.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from recserve.config import MIN_KEY_LENGTH, ConfigError
from recserve.core.errors import DeadlineExceeded
from recserve.experiments.serving.experiment import Forwarding, ServingArm
from recserve.schemas.numbers import ENCODER

log = logging.getLogger(__name__)
A = TypeVar("A")
# Names the arm in a forwarded request. A server leaves such a request out of its own experiments,
# so that two servers that name each other cannot send a request in circles.
ARM_HEADER = "x-recserve-arm"
MAX_ANSWER_BYTES = 16 << 20
MAX_KEY_BYTES = 4096
# A recserve server closes an idle connection after 5 s; this side has to be the first one.
IDLE_S = 2.0
# The request is the reason, unless the control answers it.
REFUSED = (400, 413, 422)


class ArmServerError(RuntimeError):
    """The server of an arm has not answered a request. The message has no address."""


class ArmRefusal(ArmServerError):
    """The server of an arm finds a request invalid. It is an error if the control answers it."""


class RemoteArm:
    """A pool of connections to the server of an arm. Its methods run on the event loop.

    Attributes:
        arm: The arm; it counts what becomes of the requests.
    """

    def __init__(self, arm: ServingArm) -> None:
        """Opens no connection yet.

        Args:
            arm: An arm with the address of its server.

        Raises:
            ConfigError: If the extra `client` is missing or the key cannot be read.
        """
        try:
            import httpx
        except ImportError:
            message = f"experiments: arm {arm.label} has a url; pip install 'recserve[client]'"
            raise ConfigError(message) from None
        settings = arm.settings
        assert settings.url is not None
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            ARM_HEADER: arm.label,
        }
        if settings.api_key_file is not None:
            headers["authorization"] = f"Bearer {_key(arm.label, Path(settings.api_key_file))}"
        self.arm = arm
        self._in_flight = 0
        most = settings.max_in_flight
        try:
            self._http = httpx.AsyncClient(
                base_url=settings.url,
                headers=headers,
                verify=ssl.create_default_context(),
                timeout=None,  # `send` limits the whole exchange
                follow_redirects=False,
                trust_env=False,
                limits=httpx.Limits(
                    max_connections=most,
                    max_keepalive_connections=most,
                    keepalive_expiry=IDLE_S,
                ),
            )
        except httpx.InvalidURL as error:
            raise ConfigError(f"experiments: arm {arm.label}: url: {error}") from None

    @staticmethod
    def open_all(arms: Iterable[ServingArm]) -> dict[str, RemoteArm]:
        """Returns the servers of the arms that have one, by label. Raises ConfigError."""
        return {arm.label: RemoteArm(arm) for arm in arms if arm.remote}

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def send(self, path: str, body: msgspec.Struct, answer: type[A], deadline_s: float) -> A:
        """Sends a request once and returns the answer.

        Args:
            path: Path of the route.
            body: The request.
            answer: Class of the answer.
            deadline_s: time.monotonic() value of the deadline; the other server gets it too.

        Raises:
            DeadlineExceeded: If there is no answer in time.
            ArmRefusal: If the server finds the request invalid.
            ArmServerError: If the server is busy, fails, or cannot be reached.
        """
        if self._in_flight >= self.arm.settings.max_in_flight:
            self._count("busy")
            raise ArmServerError(f"{self._in_flight} requests are in progress")
        self._in_flight += 1
        try:
            left_s = deadline_s - time.monotonic()
            content = await asyncio.wait_for(self._content(path, body, left_s), left_s)
            found = msgspec.json.decode(content, type=answer)
        except TimeoutError:
            self._count("late")
            raise DeadlineExceeded("the server of the arm did not answer in time") from None
        except ArmRefusal:
            self._count("refused")
            raise
        except ArmServerError:
            self._count("failed")
            raise
        except Exception as error:
            self._count("failed")
            log.warning("arm %s: %s: %s", self.arm.label, type(error).__name__, error)
            unread = isinstance(error, msgspec.DecodeError | UnicodeDecodeError)
            reason = "the answer has another format" if unread else "the connection failed"
            raise ArmServerError(reason) from error
        finally:
            self._in_flight -= 1
        self._count("answered")
        return found

    async def _content(self, path: str, body: msgspec.Struct, left_s: float) -> bytes:
        """Returns the body of a successful answer."""
        headers = {"x-deadline-ms": str(max(1, round(left_s * 1e3)))}
        encoded = ENCODER.encode(body)
        async with self._http.stream("POST", path, content=encoded, headers=headers) as response:
            if response.status_code in REFUSED:
                raise ArmRefusal(f"status {response.status_code}")
            if response.status_code != 200:
                raise ArmServerError(f"status {response.status_code}")
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > MAX_ANSWER_BYTES:
                    raise ArmServerError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
            return bytes(content)

    def _count(self, result: Forwarding) -> None:
        self.arm.forwarded[result] += 1


def _key(label: str, file: Path) -> str:
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

"""What every answer says of itself: versions, times, and a signed attribution token.

The token links a later click to the answer that caused it, without any memory of answers. It names
the items that the answer shows by marks of three bytes: 23 bits of the checksum of the id, and the
item's team in an interleaved slate. So of a million items that a slate of 10 does not show, about
one has a mark of the slate. A token grows by 4 characters per item, up to MAX_SHOWN items. The
signature of the token protects the marks.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import operator
import time
import uuid
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from recserve.core.request import Timing
from recserve.service.pending import ItemCall

MAC_BYTES = 16
USER_BYTES = 12
MARK_BYTES = 3
TEAMLESS = np.uint32(0xFFFFFE)  # the bits of a mark, but for that of the team
MAX_SHOWN = 1000  # the most items of a slate; a ranking may have more, and its token the best ones
MAX_TOKEN = 8192  # characters


ITEM_ID = operator.attrgetter("item_id")
_BYTES = operator.methodcaller("encode", "utf-8", "surrogatepass")


class Attribution(msgspec.Struct, frozen=True, array_like=True):
    """The content of a token.

    Attributes:
        request_id: The request that was answered.
        user: Keyed hash of the user id; empty for an anonymous history.
        model_version: Version of the models.
        catalog_version: Version of the catalogue.
        issued_s: Time of the answer in seconds since 1970.
        experiment: Name of the experiment; empty outside experiments.
        arm: Name of the arm; empty if no single arm answered.
        shown: Marks of the items that the answer shows, the first MAX_SHOWN of them.
        interleaved: True if the marks hold the teams of an interleaved slate.
    """

    request_id: str
    user: str
    model_version: str
    catalog_version: str
    issued_s: int
    experiment: str = ""
    arm: str = ""
    shown: bytes = b""
    interleaved: bool = False


class BadToken(ValueError):
    """The token has a wrong format or a wrong signature."""


class Signer:
    """Creates and verifies tokens with one key.

    Attributes:
        key: The key.

    Raises:
        ValueError: If the key has less than 16 bytes.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) < MAC_BYTES:
            raise ValueError(f"a signing key needs {MAC_BYTES} bytes or more, got {len(key)}")
        self.key = key
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Attribution)

    def token(
        self,
        request_id: str,
        user_id: str | None,
        model_version: str,
        catalog_version: str,
        item_ids: Iterable[str],
    ) -> str:
        """Returns the token of one answer. It contains keyed hashes instead of ids.

        Args:
            request_id: The request.
            user_id: The user; None for an anonymous history.
            model_version: Version of the models.
            catalog_version: Version of the catalogue.
            item_ids: The items that the answer shows, best first.
        """
        user = "" if user_id is None else self.user(user_id)
        shown = _marks(islice(item_ids, MAX_SHOWN))
        return self._sign(
            Attribution(
                request_id, user, model_version, catalog_version, int(time.time()), shown=shown
            )
        )

    def label(
        self, token: str, experiment: str, arm: str, teams: Sequence[tuple[str, int]] = ()
    ) -> str:
        """Returns the token with the experiment of its answer, and the arm or the teams.

        Args:
            token: The token of the answer.
            experiment: Name of the experiment.
            arm: Name of the arm; empty if no single arm answered.
            teams: Item and number of its team, 0 or 1, for each item of an interleaved slate.

        Raises:
            BadToken: If the token is not of this key.
        """
        said = msgspec.structs.replace(self.read(token), experiment=experiment, arm=arm)
        if teams:
            items, numbers = zip(*teams[:MAX_SHOWN], strict=True)
            shown = _marks(items, numbers)
            said = msgspec.structs.replace(said, shown=shown, interleaved=True)
        return self._sign(said)

    def team(self, said: Attribution, item_id: str) -> int:
        """Returns the team of an item that an answer showed; 0 unless the slate is interleaved.

        Raises:
            BadToken: If the answer did not show the item.
        """
        for team in (0, 1) if said.interleaved else (0,):
            mark = _marks((item_id,), (team,))
            place = said.shown.find(mark)
            while place % MARK_BYTES and place >= 0:  # it lies across two marks
                place = said.shown.find(mark, place + 1)
            if place >= 0:
                return team
        full = len(said.shown) == MAX_SHOWN * MARK_BYTES
        more = f" among its first {MAX_SHOWN} items" if full else ""
        raise BadToken(f"its answer did not show item {item_id[:80]!r}{more}")

    def read(self, token: str) -> Attribution:
        """Verifies a token and returns its content. Raises BadToken."""
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True)
        except (ValueError, binascii.Error) as error:
            raise BadToken("not an attribution token") from error
        if _pack(raw) != token:  # the last character has bits that no byte needs
            raise BadToken("not an attribution token")
        payload, mac = raw[:-MAC_BYTES], raw[-MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(payload)):
            raise BadToken("the attribution token is not signed by this server")
        return self._decoder.decode(payload)

    def user(self, user_id: str) -> str:
        """Returns the keyed hash that identifies a user in the tokens of this key."""
        key = self.key[: hashlib.blake2s.MAX_KEY_SIZE]
        digest = hashlib.blake2s(user_id.encode(), key=key, digest_size=USER_BYTES, person=b"user")
        return base64.urlsafe_b64encode(digest.digest()).decode()

    def _sign(self, said: Attribution) -> str:
        payload = self._encoder.encode(said)
        return _pack(payload + self._mac(payload))

    def _mac(self, payload: bytes) -> bytes:
        # Unlike hmac.digest, this keeps Python's lock, for which the event loop would have to wait.
        return hmac.new(self.key, payload, "sha256").digest()[:MAC_BYTES]


@dataclass(frozen=True)
class Envelope:
    """Makes the fields that recommend and rank responses share.

    Attributes:
        signer: Signs attribution tokens.
        model_version: Version of the bundle's models.
    """

    signer: Signer
    model_version: str

    def fields(
        self,
        call: ItemCall[Any],
        degraded: Sequence[str],
        timing: Timing | None,
        item_ids: Iterable[str],
    ) -> dict[str, Any]:
        """Returns keyword arguments of the response, without `strategy`, `exact` and `rounds`.

        Args:
            call: The request.
            degraded: Reasons why the answer is less than requested; duplicates are removed.
            timing: Times of the engine's stages; None if the engine did not take part.
            item_ids: The items that the answer shows, best first.
        """
        request_id = call.request_id or str(uuid.uuid4())
        version, user = call.snapshot.items.name, call.body.user
        user_id = None if user is None else user.id
        return {
            "request_id": request_id,
            "model_version": self.model_version,
            "catalog_version": version,
            "degraded": list(dict.fromkeys(degraded)),
            "attribution_token": self.signer.token(
                request_id, user_id, self.model_version, version, item_ids
            ),
            "timing_ms": call.watch.read(timing),
        }


def _marks(item_ids: Iterable[str], teams: Sequence[int] | None = None) -> bytes:
    """Returns the marks of items one after another. It calls no Python function per item."""
    codes = np.fromiter(map(zlib.crc32, map(_BYTES, item_ids)), "<u4") & TEAMLESS
    if teams is not None:
        codes |= np.array(teams, "<u4")
    return codes.view(np.uint8).reshape(-1, 4)[:, :MARK_BYTES].tobytes()


def _pack(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

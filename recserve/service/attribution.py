"""What every answer says of itself: versions, times, and a signed attribution token.

The token links a later click to the answer that caused it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from recserve.core.request import Timing
from recserve.service.pending import ItemCall

MAC_BYTES = 16
USER_BYTES = 12


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
        teams: Marks of the items of an interleaved slate, see experiments/team_draft.py.
    """

    request_id: str
    user: str
    model_version: str
    catalog_version: str
    issued_s: int
    experiment: str = ""
    arm: str = ""
    teams: bytes = b""


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
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(Attribution)

    def token(
        self, request_id: str, user_id: str | None, model_version: str, catalog_version: str
    ) -> str:
        """Returns the token of one answer. It contains a keyed hash instead of the user id."""
        user = "" if user_id is None else self.user(user_id)
        said = Attribution(request_id, user, model_version, catalog_version, int(time.time()))
        return self._sign(said)

    def label(self, token: str, experiment: str, arm: str, teams: bytes = b"") -> str:
        """Returns the token with the experiment of its answer, and the arm or the teams.

        Raises:
            BadToken: If the token is not of this key.
        """
        said = self.read(token)
        return self._sign(
            msgspec.structs.replace(said, experiment=experiment, arm=arm, teams=teams)
        )

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
        self, call: ItemCall[Any], degraded: Sequence[str], timing: Timing | None
    ) -> dict[str, Any]:
        """Returns keyword arguments of the response, without `strategy`, `exact` and `rounds`.

        Args:
            call: The request.
            degraded: Reasons why the answer is less than requested; duplicates are removed.
            timing: Times of the engine's stages; None if the engine did not take part.
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
                request_id, user_id, self.model_version, version
            ),
            "timing_ms": call.watch.read(timing),
        }


def _pack(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

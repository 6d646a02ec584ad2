"""Attribution tokens: what joins a later click to the answer that caused it, signed."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time

import msgspec

MAC_BYTES = 16
USER_BYTES = 12


class Attribution(msgspec.Struct, frozen=True, array_like=True):
    """What a token says. user: keyed hash of the user id, empty for an anonymous history."""

    request_id: str
    user: str
    model_version: str
    catalog_version: str
    issued_s: int


class BadToken(ValueError):
    """The token is not one of ours, or was changed."""


class Signer:
    """Makes and reads tokens with one key. Raises ValueError for a key under 16 bytes."""

    def __init__(self, key: bytes) -> None:
        if len(key) < MAC_BYTES:
            raise ValueError(f"a signing key needs {MAC_BYTES} bytes or more, got {len(key)}")
        self._key = key
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(Attribution)

    def token(
        self, request_id: str, user_id: str | None, model_version: str, catalog_version: str
    ) -> str:
        """A token for one answer; it holds no user id."""
        user = "" if user_id is None else self.user(user_id)
        said = Attribution(request_id, user, model_version, catalog_version, int(time.time()))
        payload = self._encoder.encode(said)
        packed = base64.urlsafe_b64encode(payload + self._mac(payload))
        return packed.rstrip(b"=").decode()

    def read(self, token: str) -> Attribution:
        """What the token says. Raises BadToken."""
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True)
        except (ValueError, binascii.Error) as error:
            raise BadToken("not an attribution token") from error
        payload, mac = raw[:-MAC_BYTES], raw[-MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(payload)):
            raise BadToken("the attribution token is not signed by this server")
        return self._decoder.decode(payload)

    def user(self, user_id: str) -> str:
        """How tokens of this key name a user."""
        key = self._key[: hashlib.blake2s.MAX_KEY_SIZE]
        digest = hashlib.blake2s(user_id.encode(), key=key, digest_size=USER_BYTES, person=b"user")
        return base64.urlsafe_b64encode(digest.digest()).decode()

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, "sha256")[:MAC_BYTES]

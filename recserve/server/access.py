"""Who may call an operation: keys, quotas, and the part of the prefix cache of each key.

No other file reads keys. Access is closed by default: a path without a route needs a key like one
with a route, and below `/admin` it needs an admin key.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import os
from dataclasses import dataclass
from hashlib import blake2b
from ipaddress import IPv6Address, IPv6Network

from starlette.types import Scope

from recserve.core.client import Client
from recserve.server.context import RequestContext
from recserve.server.errors import AdminDisabled, Unauthorized
from recserve.server.transport.quotas import Quotas
from recserve.server.transport.site_check import OriginCheck

IPV6_SUBNET = 64  # of one client, who may use all of its addresses


@dataclass(frozen=True)
class AccessKeys:
    """Keys that clients send.

    Attributes:
        api: Valid API keys; empty means that no key is required.
        admin: Valid keys of the admin routes; empty closes these routes.
        quotas: Counts the requests of each API key; None does not.
    """

    api: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()
    quotas: Quotas | None = None

    def salts(self) -> dict[bytes, bytes]:
        """Returns a salt of the prefix cache for each API key, new in each process.

        A single key needs none: its clients share everything.
        """
        keys = {key.encode() for key in self.api}
        secret = os.urandom(32)
        return {
            key: blake2b(key, digest_size=16, key=secret).digest() for key in keys if len(keys) > 1
        }


class Access:
    """Admits a request to an operation, or raises the error that refuses it.

    Attributes:
        keys: Valid API keys; empty means that no key is required.
        admin_keys: Valid keys of the admin routes; empty closes these routes.
        sites: Refuses requests that a page of another site sends.
        quotas: Counts the requests of each API key; None does not.
    """

    def __init__(self, keys: AccessKeys, sites: OriginCheck) -> None:
        self.keys = tuple(key.encode() for key in keys.api)
        self.admin_keys = tuple(key.encode() for key in keys.admin)
        self.quotas = keys.quotas
        self.sites = sites
        self._salts = keys.salts()

    def admit(self, context: RequestContext) -> Client:
        """Returns the client of a request.

        Raises:
            Unauthorized, AdminDisabled, QuotaExceeded, CrossSite: If the request is refused.
        """
        scope, headers = context.request.scope, context.request.headers
        given = _key(headers.get("authorization", ""))
        if context.admin:
            if not self.admin_keys:
                raise AdminDisabled("admin routes are disabled; set admin_keys to enable them")
            if not _among(given, self.admin_keys):
                raise Unauthorized("an admin key is needed: Authorization: Bearer KEY")
        elif self.keys and not context.open and not _among(given, self.keys):
            raise Unauthorized("a valid key is needed: Authorization: Bearer KEY")
        elif self.keys and self.quotas is not None and context.counted:
            self.quotas.take(given)
        if not context.open:
            self.sites.check(scope["method"], headers)
        key = given if self.keys else client_address(scope)
        return Client(key, self._salts.get(given, b""))


def client_address(scope: Scope) -> bytes:
    """Returns the client's address: of IPv6 the subnet, and a name for connections without one."""
    host: str = (scope.get("client") or ("",))[0]
    if ":" in host:
        with contextlib.suppress(ValueError):
            address = IPv6Address(host.partition("%")[0])
            plain = address.ipv4_mapped
            host = str(plain or IPv6Network((address, IPV6_SUBNET), strict=False))
    return host.encode() or b"unknown"


def _among(given: bytes, keys: tuple[bytes, ...]) -> bool:
    """Compares every key, so that the duration reveals nothing about a partial match."""
    return bool(sum([hmac.compare_digest(given, key) for key in keys]))


def _key(authorization: str) -> bytes:
    """Returns the key of a `Bearer` header, or the password of a `Basic` one (from browsers)."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except (ValueError, binascii.Error):
            return b""
    return b""

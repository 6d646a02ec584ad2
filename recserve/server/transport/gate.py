"""Middleware of every route: request id, API key, cross-site check, HEAD, errors, metrics."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from ipaddress import IPv6Address, IPv6Network
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recserve.core.client import client_scope
from recserve.metrics import Metrics
from recserve.server.errors import (
    AdminDisabled,
    ClientGone,
    NotReady,
    Unauthorized,
    error_response,
    row_of,
)
from recserve.server.lifecycle import Lifecycle
from recserve.server.threads import RANK_MODELS, RECOMMEND_MODELS, TEXT_MODELS
from recserve.server.transport.quotas import Quotas
from recserve.server.transport.site_check import OriginCheck
from recserve.server.transport.trace import HEADER, SCOPE_KEY, Recorder, Trace, upload_of

log = logging.getLogger(__name__)
# Orchestrators probe without a key. These paths reveal only whether the server is up.
OPEN_PATHS = frozenset(
    {"/health", "/health/live", "/health/ready", "/ping", "/v2/health/live", "/v2/health/ready"}
)
UNCOUNTED_PATHS = OPEN_PATHS | {"/metrics"}
ADMIN = "/admin/"
CLOSE = (b"connection", b"close")
TEXT_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/generative_scoring"),
    *("/v1/rerank", "/v2/rerank", "/rerank"),
)
# Paths of requests that wait in the queue of one of these models.
QUEUED_PATHS = {
    "/v1/recommend": RECOMMEND_MODELS,
    "/v1/rank": RANK_MODELS,
    "/v1/rank:batch": RANK_MODELS,
    **dict.fromkeys(TEXT_PATHS, TEXT_MODELS),
}
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


class Gate:
    """ASGI middleware in front of all routes; no other class reads API keys.

    Attributes:
        app: The application behind the gate.
        lifecycle: Counts requests in progress.
        metrics: Counts requests and failures.
        keys: Valid API keys; empty means that no key is required.
        admin_keys: Valid keys of the admin routes; empty closes these routes.
        recorders: Take each ended request.
        sites: Refuses requests that a page of another site sends.
        quotas: Counts the requests of each API key; None does not.
    """

    def __init__(
        self,
        app: ASGIApp,
        lifecycle: Lifecycle,
        metrics: Metrics,
        keys: AccessKeys,
        sites: OriginCheck,
        recorders: Sequence[Recorder] = (),
    ) -> None:
        self.app = app
        self.lifecycle = lifecycle
        self.metrics = metrics
        self.keys = tuple(key.encode() for key in keys.api)
        self.admin_keys = tuple(key.encode() for key in keys.admin)
        self.quotas = keys.quotas
        self._salts = keys.salts()
        self.recorders = recorders
        self.sites = sites

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to the application, or answers it with an error."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        trace, upload = Trace(), upload_of(scope)
        trace.began_s = upload.arrived_s or trace.began_s
        scope[SCOPE_KEY], started = trace, False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                trace.status = message["status"]
                message["headers"] = [*message["headers"], *trace.headers()]
                if self.lifecycle.draining and upload.last:
                    message["headers"].append(CLOSE)
            await send(message)

        # Routes answer HEAD like GET. The connection, which has the other scope, omits the body.
        routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        generation = self.lifecycle.enter()
        try:
            try:
                headers = Headers(scope=scope)
                trace.rename(headers.get(HEADER))
                key = self._check(scope, headers)
                client = key if self.keys else client_address(scope)
                with client_scope(client, self._salts.get(key, b"")):
                    if upload.num_ahead and scope["path"] in QUEUED_PATHS:
                        self._check_queue(scope["path"], upload.num_ahead)
                    await self.app(routed, receive, answer)
            except Exception as error:
                row = row_of(error)
                trace.failure, trace.error_code = row.reason, row.code
                trace.status = trace.status or row.status
                if row.status == 500:
                    log.error("request %s failed", trace.request_id, exc_info=error)
                elif row.status == 503 and row.message is not None:
                    # The response hides the cause; the operator needs it to repair disk or store.
                    log.warning("request %s failed: %s", trace.request_id, error)
                if not started and not isinstance(error, ClientGone):
                    await error_response(error, scope["path"])(scope, receive, answer)
        finally:
            self.lifecycle.leave(generation)
            scope["route"] = routed.get("route")
            self._count(scope, trace)

    def _check(self, scope: Scope, headers: Headers) -> bytes:
        """Returns the key that was sent, empty without one.

        Raises:
            Unauthorized, AdminDisabled, QuotaExceeded, CrossSite: If the request is refused.
        """
        given = _key(headers.get("authorization", ""))
        if scope["path"].startswith(ADMIN):
            if not self.admin_keys:
                raise AdminDisabled("admin routes are disabled; set admin_keys to enable them")
            if not _among(given, self.admin_keys):
                raise Unauthorized("an admin key is needed: Authorization: Bearer KEY")
        elif self.keys and scope["path"] not in OPEN_PATHS and not _among(given, self.keys):
            raise Unauthorized("a valid key is needed: Authorization: Bearer KEY")
        elif self.keys and self.quotas is not None and scope["path"] not in UNCOUNTED_PATHS:
            self.quotas.take(given)
        if scope["path"] not in OPEN_PATHS:
            self.sites.check(scope["method"], headers)
        return given

    def _check_queue(self, path: str, num_ahead: int) -> None:
        """Raises QueueFull if the engine's queue would be full with requests that came earlier."""
        with contextlib.suppress(NotReady):  # the route says so
            self.lifecycle.service.engine.check_queue(QUEUED_PATHS[path], num_ahead)

    def _count(self, scope: Scope, trace: Trace) -> None:
        route: Any = scope.get("route")
        seconds = time.monotonic() - trace.began_s
        self.metrics.request(getattr(route, "path", None), trace.strategy, seconds, trace.arm)
        if trace.failure is not None and scope["path"] not in OPEN_PATHS:
            self.metrics.failure(trace.failure, trace.error_code)
        if trace.timing_ms is not None:
            stages = {n: getattr(trace.timing_ms, n) for n in trace.timing_ms.__struct_fields__}
            self.metrics.stages(stages)
        self.metrics.count_degraded(trace.degraded)
        for record in self.recorders:
            record(scope, trace)


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

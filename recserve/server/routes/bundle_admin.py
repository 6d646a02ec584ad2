"""Handlers of POST /admin/bundle:load and /admin/bundle:rollback, and GET /admin/bundle."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from recserve.schemas.admin import BundleLoadRequest, BundleStatus
from recserve.schemas.api import Api
from recserve.schemas.items import InvalidRequest
from recserve.server.context import RequestContext
from recserve.server.routing import handles


@handles(Api.load_bundle)
async def load_bundle(context: RequestContext, body: BundleLoadRequest) -> BundleStatus:
    """Starts a load on a thread of its own, or stores one for all servers."""
    if not body.fleet:
        return await asyncio.to_thread(context.state.lifecycle.load, body.path, body.force)
    fleet = context.state.heartbeat
    if fleet is None:
        raise InvalidRequest(
            "fleet", "this server shares no log of item changes; set catalog_log to redis"
        )
    await asyncio.to_thread(fleet.load_all, body.path, body.force)
    return _status(context)


@handles(Api.rollback_bundle)
async def rollback_bundle(context: RequestContext) -> BundleStatus:
    """Starts the way back on a thread of its own."""
    return await asyncio.to_thread(context.state.lifecycle.rollback)


@handles(Api.bundle_status)
async def bundle_status(context: RequestContext) -> BundleStatus:
    """Answers with the bundles and the latest load."""
    return _status(context)


def _status(context: RequestContext) -> BundleStatus:
    found, heartbeat = context.state.lifecycle.status(), context.state.heartbeat
    fleet = None if heartbeat is None else heartbeat.member.status
    return found if fleet is None else replace(found, fleet=fleet)

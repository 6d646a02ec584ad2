"""Handlers of POST /admin/bundle:load and /admin/bundle:rollback, and GET /admin/bundle."""

from __future__ import annotations

import asyncio

from recserve.schemas.admin import BundleLoadRequest, BundleStatus
from recserve.schemas.api import Api
from recserve.server.context import RequestContext
from recserve.server.routing import handles


@handles(Api.load_bundle)
async def load_bundle(context: RequestContext, body: BundleLoadRequest) -> BundleStatus:
    """Starts a load on a thread of its own."""
    return await asyncio.to_thread(context.state.lifecycle.load, body.path, body.force)


@handles(Api.rollback_bundle)
async def rollback_bundle(context: RequestContext) -> BundleStatus:
    """Starts the way back on a thread of its own."""
    return await asyncio.to_thread(context.state.lifecycle.rollback)


@handles(Api.bundle_status)
async def bundle_status(context: RequestContext) -> BundleStatus:
    """Answers with the bundles and the latest load."""
    return context.state.lifecycle.status()

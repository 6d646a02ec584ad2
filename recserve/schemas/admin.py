"""Requests and responses of the admin routes that replace the served bundle."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from recserve.schemas.items import RequestId, StrictStruct

BUNDLE_NAME = Meta(
    pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z",
    description="the name of a folder: 1 to 128 of A-Z a-z 0-9 . _ -, not starting with . or -",
)


class BundleLoadRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /admin/bundle:load.

    Attributes:
        path: Name of a bundle in the configured `bundles_dir`.
        force: Load the bundle even if it lacks a model of the current one or most of its items.
    """

    path: Annotated[str, BUNDLE_NAME]
    force: bool = False
    request_id: RequestId | None = None


class ServedBundle(Struct, frozen=True, kw_only=True):
    """A bundle that is or was served. `path` is the name of its folder."""

    path: str
    model_version: str
    catalog_version: str


class BundleStatus(Struct, frozen=True, kw_only=True):
    """The served bundle, and the latest replacement.

    Attributes:
        current: The bundle that answers; None while the server starts.
        previous: The bundle that a rollback restores; None before the first replacement.
        state: `loading` during a replacement, `failed` if the latest one was refused, else `ready`.
        message: What happens now, or why the latest replacement was refused.
        progress: Completed share of the replacement, 0 to 1.
    """

    current: ServedBundle | None
    previous: ServedBundle | None
    state: Literal["loading", "ready", "failed"]
    message: str
    progress: float

"""Requests and responses of the admin routes that replace the served bundle."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

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
        fleet: Load it on all servers that share the log of item changes, one after another.
    """

    path: Annotated[str, BUNDLE_NAME]
    force: bool = False
    fleet: bool = False
    request_id: RequestId | None = None


class ServedBundle(Struct, frozen=True, kw_only=True):
    """A bundle that is or was served. `path` is the name of its folder."""

    path: str
    model_version: str
    catalog_version: str


class FleetLoad(Struct, frozen=True, kw_only=True):
    """The latest load of a bundle by all servers of a fleet.

    Attributes:
        path: Name of the bundle's folder.
        state: `loading`; `returning` to the previous bundle after a server has refused it; `ready`
            or `failed` at the end.
        message: Why it was refused, and by which server; else empty.
    """

    path: str
    state: Literal["loading", "returning", "ready", "failed"]
    message: str


class BundleStatus(Struct, frozen=True, kw_only=True):
    """The served bundle, and the latest replacement.

    Attributes:
        current: The bundle that answers; None while the server starts.
        previous: The bundle that a rollback restores; None before the first replacement.
        state: `loading` during a replacement, `failed` if the latest one was refused, else `ready`.
        message: What happens now, or why the latest replacement was refused.
        progress: Completed share of the replacement, 0 to 1.
        fleet: The latest load of the whole fleet, as this server read it some seconds ago. Only a
            server whose log of item changes is in Redis has it.
    """

    current: ServedBundle | None
    previous: ServedBundle | None
    state: Literal["loading", "ready", "failed"]
    message: str
    progress: float
    fleet: FleetLoad | UnsetType = UNSET

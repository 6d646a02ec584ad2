"""The body of a request while it arrives: how the connection tells the route that it never will."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

SCOPE_KEY = "recserve.upload"


@dataclass
class Upload:
    """error: why the rest of the body will not come; None while it may."""

    error: Exception | None = None


def upload_error(scope: Scope) -> Exception | None:
    """Returns why the body of a request will never be complete, None while it may be."""
    upload: Upload | None = scope.get(SCOPE_KEY)
    return None if upload is None else upload.error

"""State of a request body that is still arriving, shared by the connection and the route."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

SCOPE_KEY = "recserve.upload"


@dataclass
class Upload:
    """error: why the connection has given up the rest of the body; None while it waits for it."""

    error: Exception | None = None


def upload_error(scope: Scope) -> Exception | None:
    """Returns why the body of a request will not be completed; None if it still may be."""
    upload: Upload | None = scope.get(SCOPE_KEY)
    return None if upload is None else upload.error

"""Bodies of the Python API: objects or plain values, with the same checks as over HTTP.

The classes of messages do not check their fields when Python code makes them; decoding JSON does.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from recserve.schemas.validation import converted

T = TypeVar("T", bound=msgspec.Struct)


def checked(body: T | Mapping[str, Any], kind: type[T]) -> T:
    """Returns a body whose fields have been checked.

    A user may be given as an id, and a candidate as an item id.

    Args:
        body: An object of the class, or its fields.
        kind: The class.

    Raises:
        InvalidRequest: If a field is invalid; the message is that of HTTP.
    """
    given = msgspec.to_builtins(body, builtin_types=(Decimal,), enc_hook=_refused)
    if isinstance(given, dict):
        if isinstance(given.get("user"), str):
            given["user"] = {"id": given["user"]}
        candidates = given.get("candidates")
        if isinstance(candidates, list):
            given["candidates"] = [
                {"item_id": one} if isinstance(one, str) else one for one in candidates
            ]
    return converted(given, kind)


def _refused(value: Any) -> Any:
    """Converts a value of another kind: arrays of numpy become lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a field is of type {type(value).__name__}; expected plain Python values")

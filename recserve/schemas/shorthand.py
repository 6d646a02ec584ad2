"""Bodies of the Python API: objects or plain values, with the same checks as over HTTP.

The classes of messages do not check their fields when Python code makes them; decoding JSON does.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from recserve.bounds import MAX_ID_LENGTH, id_of_number
from recserve.schemas.items import InvalidRequest
from recserve.schemas.validation import to_message

T = TypeVar("T", bound=msgspec.Struct)
AnyId = str | int | float | Decimal  # a number stands for its digits if it is whole


def check_body(body: T | Mapping[str, Any], kind: type[T]) -> T:
    """Returns a body whose fields have been checked.

    A user may be given as an id, and a candidate as an item id.

    Args:
        body: An object of the class, or its fields.
        kind: The class.

    Raises:
        InvalidRequest: If a field is invalid; the message is that of HTTP.
    """
    given = msgspec.to_builtins(body, builtin_types=(Decimal,), enc_hook=_convert_array)
    if isinstance(given, dict):
        user = given.get("user")
        if isinstance(user, AnyId):
            given["user"] = {"id": user}
        candidates = given.get("candidates")
        if isinstance(candidates, list):
            given["candidates"] = [
                {"item_id": one} if isinstance(one, AnyId) else one for one in candidates
            ]
    return to_message(given, kind)


def check_id(param: str, value: AnyId) -> str:
    """Returns an id as text; an integer stands for its digits. The store checks its length.

    Raises:
        InvalidRequest: If the value is neither a text nor an integer.
    """
    text = value if isinstance(value, str) else id_of_number(_plain(value))
    if text is None:
        bound = f" of at most {MAX_ID_LENGTH} digits" if type(value) is int else ""
        raise InvalidRequest(param, f"expected string or integer{bound}, got {str(value)[:60]}")
    return text


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _convert_array(value: Any) -> Any:
    """Converts a value of another kind: arrays of numpy become lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a field is of type {type(value).__name__}; expected plain Python values")

"""Text jobs on JSON lines, in the format of OpenAI's batch files.

An input line has `custom_id`, `method`, `url` and `body`. An output line has `id`, `custom_id`,
`response` and `error`. Lines of rejected requests go to `_errors`, with their line number in
`line`.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
from msgspec import UNSET, Meta, Struct, UnsetType

from recserve.batch.part import Generated
from recserve.batch.source import LINE, LINES, MAX_LINE_BYTES
from recserve.batch.texts import (
    TextAnswer,
    TextCall,
    TextTask,
    answer_together,
    call_name,
    text_call,
)
from recserve.batch.together import NoAnswer
from recserve.schemas.items import (
    ErrorDetail,
    ErrorResponse,
    InvalidRequest,
)
from recserve.schemas.validation import to_message
from recserve.service.errors import INVALID, INVALID_STATUS, REFUSALS, Refusal, nearest


class BatchLine(Struct, frozen=True, kw_only=True):
    """One line of the input."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: str
    body: dict[str, Any]


class BatchResponse(Struct, frozen=True, kw_only=True):
    """The HTTP response of one line."""

    status_code: int
    request_id: str
    body: TextAnswer | ErrorResponse


class BatchAnswer(Struct, frozen=True, kw_only=True):
    """One line of the output. `line` counts from 1 in the input file, blank lines included."""

    id: str
    custom_id: str | None
    response: BatchResponse
    error: None = None
    line: int | UnsetType = UNSET


@dataclass(frozen=True)
class LineTask(TextTask):
    """Answers lines of requests."""

    columns = (LINE,)
    suffix = ".jsonl"

    def __call__(self, users: pa.Table, first_row: int) -> Generated:
        """Returns output lines and lines of rejected requests; blank lines are left out."""
        # Some programs write a byte order mark before the first line of each file.
        lines = [line.removeprefix(BOM_UTF8) for line in users.column(LINE).to_pylist()]
        rows = [row for row, line in enumerate(lines) if line.strip()]
        ids: list[str | None] = []
        calls: list[TextCall | Exception] = []
        for row in rows:
            custom_id, call = self._call(lines[row], first_row + row)
            ids.append(custom_id)
            calls.append(call)
        answers = iter(answer_together(self.service, [c for c in calls if isinstance(c, TextCall)]))
        good: list[bytes] = []
        bad: list[bytes] = []
        example = ""
        for row, custom_id, call in zip(rows, ids, calls, strict=True):
            answer = call if isinstance(call, Exception) else next(answers)
            number = first_row + row
            if isinstance(answer, Exception):
                example = example or f"line {number + 1}: {answer}"
            rejected = isinstance(answer, Exception)
            (bad if rejected else good).append(self._line(number, custom_id, answer))
        return Generated(_table(good), _table(bad), example)

    def _call(self, line: bytes, row: int) -> tuple[str | None, TextCall | Exception]:
        """Returns the id and the request of a line, or the reason to reject it."""
        custom_id: str | None = None
        try:
            if len(line) > MAX_LINE_BYTES:
                raise InvalidRequest(None, f"expected a line of at most {MAX_LINE_BYTES} bytes")
            given = msgspec.json.decode(line)
            if isinstance(given, dict) and isinstance(given.get("custom_id"), str):
                custom_id = given["custom_id"][:512]
            asked = to_message(given, BatchLine)
            return custom_id, text_call(asked.url, asked.body, call_name(self.seed, row, custom_id))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return custom_id, MalformedLine(f"the line is not valid JSON: {error}")
        except ValueError as error:
            return custom_id, error

    def _line(self, row: int, custom_id: str | None, answer: TextAnswer | Exception) -> bytes:
        name = call_name(self.seed, row, custom_id)
        failed = isinstance(answer, Exception)
        status, body = error_body(answer) if isinstance(answer, Exception) else (200, answer)
        return msgspec.json.encode(
            BatchAnswer(
                id=f"batch_req_{name}",
                custom_id=custom_id,
                response=BatchResponse(status_code=status, request_id=name, body=body),
                line=row + 1 if failed else UNSET,
            )
        )


class MalformedLine(ValueError):
    """A line is not JSON."""


TEXT_STATUS = 400  # of an invalid field, as on the routes for texts
LINE_REFUSALS = {
    **REFUSALS,
    MalformedLine: Refusal(400, INVALID, "malformed_body"),
    NoAnswer: Refusal(500, "server_error", "internal"),
    ValueError: REFUSALS[InvalidRequest],
}


def error_body(error: Exception) -> tuple[int, ErrorResponse]:
    """Returns the HTTP status and body of a rejected request. Raises any other error."""
    said = nearest(error, LINE_REFUSALS)
    if said is None:
        raise error
    status = TEXT_STATUS if said.status == INVALID_STATUS else said.status
    param = error.param if isinstance(error, InvalidRequest) else None
    detail = ErrorDetail(message=str(error), type=said.type, param=param, code=said.code)
    return status, ErrorResponse(error=detail)


def _table(lines: Sequence[bytes]) -> pa.Table:
    return pa.Table.from_arrays([pa.array(lines, pa.large_binary())], schema=LINES)

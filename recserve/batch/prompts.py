"""Text jobs on Parquet: prompts or conversations in, completions out."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
from msgspec import UNSET

from recserve.batch.part import Generated
from recserve.batch.prompt_columns import (
    COMPLETIONS,
    OPTIONS,
    PROMPT_COLUMNS,
    PROMPT_ERRORS,
    SOURCES,
)
from recserve.batch.rows import id_text, read_rows
from recserve.batch.texts import TextCall, TextTask, answer_together, call_name, text_call
from recserve.schemas.text import (
    AssistantMessage,
    ChatResponse,
    CompletionChoice,
    CompletionResponse,
    Usage,
)


@dataclass(frozen=True)
class PromptTask(TextTask):
    """Completes the prompts of a table."""

    columns = tuple(PROMPT_COLUMNS)
    suffix = ".parquet"

    def __call__(self, users: pa.Table, first_row: int) -> Generated:
        """Returns completions with schema COMPLETIONS, and errors with schema PROMPT_ERRORS."""
        rows, wrong = read_rows(users, PROMPT_COLUMNS)
        for row in rows:
            given = row.get("custom_id")
            row["custom_id"] = None if given is None else str(id_text(given))
        calls = [
            ValueError(wrong[place]) if place in wrong else self._call(row, first_row + place)
            for place, row in enumerate(rows)
        ]
        results = iter(answer_together(self.service, [c for c in calls if isinstance(c, TextCall)]))
        texts: list[dict[str, Any]] = []
        errors: list[dict[str, Any]] = []
        for place, (row, call) in enumerate(zip(rows, calls, strict=True)):
            answer = call if isinstance(call, ValueError) else next(results)
            head = {"row": first_row + place, "custom_id": row.get("custom_id")}
            if isinstance(answer, CompletionResponse | ChatResponse):
                texts += [{**head, **choice} for choice in _choices(answer)]
            elif isinstance(answer, ValueError):
                errors.append({**head, "reason": str(answer)})
            else:
                assert isinstance(answer, Exception)
                raise answer
        return Generated(
            answers=pa.Table.from_pylist(texts, schema=COMPLETIONS),
            errors=pa.Table.from_pylist(errors, schema=PROMPT_ERRORS),
            example=f"row {errors[0]['row']}: {errors[0]['reason']}" if errors else "",
        )

    def _call(self, row: dict[str, Any], number: int) -> TextCall | ValueError:
        body = {n: _number(row[n]) for n in (*SOURCES, *OPTIONS) if row.get(n) is not None}
        if "messages" in body:
            body["messages"] = [_turn(turn) for turn in body["messages"]]
        url = "/v1/chat/completions" if "messages" in row else "/v1/completions"
        try:
            return text_call(url, body, call_name(self.seed, number, row.get("custom_id")))
        except ValueError as error:
            return error


def _number(value: Any) -> Any:
    """Returns a fraction in decimals as a float; other values as they are."""
    return float(value) if isinstance(value, Decimal) else value


def _turn(turn: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the fields of a message that are not null."""
    return turn and {name: value for name, value in turn.items() if value is not None}


def _choices(answer: CompletionResponse | ChatResponse) -> list[dict[str, Any]]:
    assert isinstance(answer.usage, Usage)
    shared = {
        "prompt_tokens": answer.usage.prompt_tokens,
        "completion_tokens": answer.usage.completion_tokens,
        "model": answer.model,
    }
    return [
        {
            "index": choice.index,
            "text": choice.text if isinstance(choice, CompletionChoice) else _text(choice.message),
            "finish_reason": choice.finish_reason,
            **shared,
        }
        for choice in answer.choices
    ]


def _text(message: AssistantMessage) -> str:
    """Returns the text of an answer; thoughts stand before it as the model wrote them."""
    content = message.content or ""
    if message.reasoning_content is UNSET:
        return content
    return f"<think>\n{message.reasoning_content}\n</think>\n\n{content}"

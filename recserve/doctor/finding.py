"""Findings of `recserve doctor`: what one check found, and whether it works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail", "ask"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What was checked.
        state: Outcome of the check; `ask` is a question that no file answers.
        detail: What the check found, and advice unless the state is `ok`.
    """

    name: str
    state: State
    detail: str

"""What a response says about drafting."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class SpeculationMetrics(Struct, frozen=True, kw_only=True):
    """Draft statistics over all texts of the response.

    Attributes:
        mean_acceptance_length: Tokens per step with a draft, the bonus token included, as in vLLM;
            1 without drafts.
        draft_acceptance_rate: Accepted share of the draft tokens; 0 without drafts.
        num_accepted_tokens: Accepted tokens that are part of the texts.
        per_position: `per_position[d]` counts tokens accepted at position d of their draft.
        num_paused_steps: Steps without a draft because drafts did not pay under the load.
    """

    drafter: str
    verifier: str
    exact: bool
    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    per_position: list[int]
    num_paused_steps: int


class TokenSource(Struct, frozen=True):
    """The characters of one output token, and where the token came from.

    Attributes:
        text: New characters; empty while a character or a stop string is incomplete.
        source: `draft` if a drafter proposed the token and the target accepted it.
    """

    text: str
    source: Literal["draft", "target"]

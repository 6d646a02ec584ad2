"""Log-probabilities of a prompt's own tokens, for `echo` with `logprobs` and `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from recserve.core.request import GROUP_TOKENS, Prefix, PromptQuery, PromptScores
from recserve.models.inputs import NodeInputs
from recserve.schemas.items import InvalidRequest
from recserve.schemas.logprobs import PromptLogprob, PromptLogprobs
from recserve.schemas.text import CompletionRequest
from recserve.service.text.model import TextModel
from recserve.service.text.prompts import Prompt
from recserve.service.text.stream import TextStream, WrittenToken
from recserve.speculation.completion import TokenLogprobs
from recserve.tokenizer.detokenizer import Detokenizer
from recserve.tokenizer.token_bytes import shown, spelled
from recserve.tokenizer.tokenizer import TextTokenizer


@dataclass(frozen=True)
class ScoredPrompts:
    """Prompts of a completion request whose own tokens are scored.

    Attributes:
        prompts: The prompts.
        queries: Their requests.
        futures: Engine results, in the same order. Empty until they are submitted.
        model: The served model.
        num_echoed: Number of likeliest tokens that `logprobs` reports, for the prompt's tokens too;
            None leaves them out.
        num_top: Value of `prompt_logprobs`; None omits the field.
    """

    prompts: Sequence[Prompt]
    queries: Sequence[PromptQuery]
    model: TextModel
    num_echoed: int | None
    num_top: int | None
    futures: tuple[Future[PromptScores], ...] = ()

    def fill(self, streams: Sequence[TextStream], copies: int) -> None:
        """Adds what is known about the prompts to their texts, of which each has `copies`."""
        tokenizer = self.model.tokenizer
        for number, (prompt, future) in enumerate(zip(self.prompts, self.futures, strict=True)):
            scores = future.result()
            for stream in streams[number * copies : (number + 1) * copies]:
                if self.num_echoed is not None:
                    stream.prompt = written_prompt(prompt, scores, self.num_echoed, tokenizer)
                if self.num_top is not None:
                    stream.prompt_logprobs = prompt_logprobs(
                        prompt, scores, self.num_top, tokenizer.all_bytes
                    )


def scored_prompts(
    body: CompletionRequest,
    prompts: Sequence[Prompt],
    model: TextModel,
    deadline_s: float | None,
) -> ScoredPrompts | None:
    """Returns the prompts if the request wants their log-probabilities; None if it does not.

    Raises:
        InvalidRequest: If the request is a stream, whose chunks have no place for them.
    """
    num_echoed = body.logprobs if body.echo else None
    if num_echoed is None and body.prompt_logprobs is None:
        return None
    if body.stream:
        name = "prompt_logprobs" if body.prompt_logprobs is not None else "echo"
        raise InvalidRequest(name, "log-probabilities of a prompt are not streamed")
    num_top = max(num_echoed or 0, body.prompt_logprobs or 0)
    queries: list[PromptQuery] = []
    before = 0
    for prompt in prompts:
        query = prompt_query(
            prompt.tokens, model.device, num_top, deadline_s=deadline_s, before=before
        )
        queries.append(query)
        before += len(prompt.tokens)
    return ScoredPrompts(prompts, queries, model, num_echoed, body.prompt_logprobs)


def prompt_query(
    tokens: Sequence[int],
    device: torch.device,
    num_top: int | None = None,
    mean: bool = False,
    deadline_s: float | None = None,
    before: int = 0,
) -> PromptQuery:
    """Returns the engine's request about a prompt.

    Args:
        tokens: The prompt.
        device: Device of the model.
        num_top: Number of likeliest tokens to report at each place; None reports nothing.
        mean: Whether to report the mean of the final hidden states.
        deadline_s: time.monotonic() value after which the result is useless; None means never.
        before: Number of tokens of the prompts before it in the same body.
    """
    empty = np.zeros(0, np.int64)
    root = Prefix(NodeInputs(torch.from_numpy(empty).to(device)), empty)
    group = before // GROUP_TOKENS
    return PromptQuery(root, np.array(tokens, np.int64), num_top, mean, deadline_s, group)


def written_prompt(
    prompt: Prompt, scores: PromptScores, num_top: int, tokenizer: TextTokenizer
) -> list[WrittenToken]:
    """Returns the tokens of a prompt as if they had been generated. The first has no logprobs.

    Args:
        prompt: The prompt.
        scores: Result of its PromptQuery.
        num_top: Number of likeliest tokens to report.
        tokenizer: Tokeniser of the model.
    """
    text, table = prompt.text, tokenizer.all_bytes
    if prompt.encoded:
        starts = tokenizer.starts(text, prompt.tokens)
    else:
        starts = decoded_starts(prompt.tokens, tokenizer.text_bytes)
    written = []
    for place, (token, start) in enumerate(zip(prompt.tokens, starts, strict=True)):
        logprobs = None
        if place:
            logprobs = TokenLogprobs(
                float(scores.chosen[place - 1]),
                tuple(scores.top_tokens[place - 1][:num_top].tolist()),
                tuple(scores.top_values[place - 1][:num_top].tolist()),
            )
        piece = spelled(table, token).decode("utf-8", "ignore")
        spaced = prompt.encoded and piece.startswith(" ")
        without_space = spaced and not text.startswith(piece, start)
        written.append(WrittenToken(token, start, logprobs, without_space))
    return written


def decoded_starts(tokens: Sequence[int], table: Sequence[bytes]) -> list[int]:
    """Returns the place at which each token starts in the text that the tokens decode to.

    Args:
        tokens: The tokens.
        table: Bytes of each token.
    """
    detokenizer, starts = Detokenizer(table), []
    for token in tokens:
        starts.append(detokenizer.start_of(token))
        detokenizer.push(token)
    return starts


def prompt_logprobs(
    prompt: Prompt, scores: PromptScores, num_top: int, table: Sequence[bytes]
) -> PromptLogprobs:
    """Returns vLLM's field `prompt_logprobs`: by token id, the token itself and the likeliest."""
    entries: PromptLogprobs = [None]
    for place, token in enumerate(prompt.tokens[1:]):
        values = {
            str(top): PromptLogprob(
                logprob=float(value), rank=rank, decoded_token=shown(spelled(table, top))
            )
            for rank, (top, value) in enumerate(
                zip(
                    scores.top_tokens[place][:num_top].tolist(),
                    scores.top_values[place][:num_top].tolist(),
                    strict=True,
                ),
                start=1,
            )
        }
        own = PromptLogprob(
            logprob=float(scores.chosen[place]),
            rank=int(scores.ranks[place]),
            decoded_token=shown(spelled(table, token)),
        )
        entries.append({str(token): own, **values})
    return entries

"""Log-probabilities of a prompt's own tokens, for `echo` with `logprobs` and `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recserve.core.request import GROUP_TOKENS, Prefix, PromptQuery, PromptScores
from recserve.models.inputs import NodeInputs
from recserve.schemas.logprobs import PromptLogprob, PromptLogprobs
from recserve.schemas.text import CompletionRequest
from recserve.service.text.prompts import Prompt
from recserve.service.text.stream import TextStream, WrittenToken
from recserve.speculation.completion import TokenLogprobs
from recserve.tokenizer.detokenizer import Detokenizer
from recserve.tokenizer.token_bytes import Spelling, bytes_of_token, format_token
from recserve.tokenizer.tokenizer import TextTokenizer


def prompt_queries(
    body: CompletionRequest,
    prompts: Sequence[Prompt],
    device: torch.device,
    deadline_s: float | None,
) -> list[PromptQuery]:
    """Returns the requests about the prompts of a body that wants their log-probabilities."""
    num_top = max((body.logprobs or 0) if body.echo else 0, body.prompt_logprobs or 0)
    queries: list[PromptQuery] = []
    before = 0
    for prompt in prompts:
        query = prompt_query(prompt.tokens, device, num_top, deadline_s=deadline_s, before=before)
        queries.append(query)
        before += len(prompt.tokens)
    return queries


def add_prompt_scores(
    body: CompletionRequest,
    prompts: Sequence[Prompt],
    results: Sequence[PromptScores],
    streams: Sequence[TextStream],
    tokenizer: TextTokenizer,
) -> None:
    """Adds what is known about the prompts to their texts.

    Args:
        body: The request.
        prompts: Its prompts.
        results: Results of `prompt_queries`.
        streams: The texts; the copies of a prompt follow each other.
        tokenizer: Tokeniser of the model.
    """
    copies = len(streams) // len(prompts)
    num_echoed = body.logprobs if body.echo else None
    for number, (prompt, scores) in enumerate(zip(prompts, results, strict=True)):
        for stream in streams[number * copies : (number + 1) * copies]:
            if num_echoed is not None:
                stream.prompt = written_prompt(prompt, scores, num_echoed, tokenizer)
            if body.prompt_logprobs is not None:
                stream.prompt_logprobs = prompt_logprobs(
                    prompt, scores, body.prompt_logprobs, tokenizer.all_bytes
                )


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
    prefix = Prefix(NodeInputs(torch.from_numpy(empty).to(device)), empty)
    group = before // GROUP_TOKENS
    return PromptQuery(prefix, np.array(tokens, np.int64), num_top, mean, deadline_s, group)


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
        places = []
        starts = tokenizer.starts(text, prompt.tokens)
        for token, start in zip(prompt.tokens, starts, strict=True):
            piece = bytes_of_token(table, token).decode("utf-8", "ignore")
            added = piece.startswith(" ") and not text.startswith(piece, start)
            places.append((start, int(added)))
    else:
        places = decoded_places(prompt.tokens, tokenizer.spelling)
    written = []
    for place, (token, (start, left_out)) in enumerate(zip(prompt.tokens, places, strict=True)):
        logprobs = None
        if place:
            logprobs = TokenLogprobs(
                float(scores.chosen[place - 1]),
                tuple(scores.top_tokens[place - 1][:num_top].tolist()),
                tuple(scores.top_values[place - 1][:num_top].tolist()),
            )
        written.append(WrittenToken(token, start, logprobs, left_out))
    return written


def decoded_places(tokens: Sequence[int], spelling: Spelling) -> list[tuple[int, int]]:
    """Returns where each token stands in the text of the tokens, as `Detokenizer.place`."""
    detokenizer, places = Detokenizer(spelling), []
    for token in tokens:
        places.append(detokenizer.place(token))
        detokenizer.push(token)
    return places


def prompt_logprobs(
    prompt: Prompt, scores: PromptScores, num_top: int, table: Sequence[bytes]
) -> PromptLogprobs:
    """Returns vLLM's field `prompt_logprobs`: by token id, the token itself and the likeliest."""
    entries: PromptLogprobs = [None]
    for place, token in enumerate(prompt.tokens[1:]):
        values = {
            str(top): PromptLogprob(
                logprob=float(value),
                rank=rank,
                decoded_token=format_token(bytes_of_token(table, top)),
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
            decoded_token=format_token(bytes_of_token(table, token)),
        )
        entries.append({str(token): own, **values})
    return entries

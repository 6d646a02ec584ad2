"""Fields of OpenAI, vLLM, Jina and Cohere that this server does not support.

Clients write many of them with a value that asks for nothing. Such a value is accepted. Every other
value is refused with the reason. A message declares such a field with the type Any.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from msgspec import Struct

from recserve.schemas.items import UnsupportedField

ONE_TEXT = "not supported; a document is one text"
# Field -> (neutral values, reason to refuse any other value).
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": (("",), "not supported; a completion only continues its prompt"),
    "functions": (([], {}), "not supported; see tools"),
    "function_call": (("none", "auto", ""), "not supported; see tool_choice"),
    "modalities": (([], ["text"]), "not supported; the output is text only"),
    "audio": ((), "not supported; the output is text only"),
    "web_search_options": ((), "not supported"),
    "prediction": ((), "not supported; the server drafts by itself, see speculation"),
    "store": ((False,), "not supported; the server does not store texts"),
    "reasoning_effort": (("none", ""), "not supported; see chat_template_kwargs"),
    "verbosity": (("medium", ""), "not supported"),
    "skip_special_tokens": ((True,), "not supported; special tokens have no text"),
    "spaces_between_special_tokens": ((True, False), "not supported"),
    "include_stop_str_in_output": ((False,), "not supported; a stop string is never in the text"),
    "return_token_ids": ((False,), "not supported; see stream_options.include_token_sources"),
    "use_beam_search": ((False,), "not supported for texts"),
    "length_penalty": ((1,), "not supported"),
    "truncate_prompt_tokens": ((-1,), "not supported; shorten the prompt"),
    "truncation_side": ((), "not supported; shorten the prompt"),
    "logprob_token_ids": (([],), "not supported; see logprobs"),
    "return_tokens_as_token_ids": ((False,), "not supported; see logprobs"),
    "return_token_offsets": ((False,), "not supported; see logprobs"),
    "return_weight_versions": ((False,), "not supported; see GET /version"),
    "detokenize": ((True,), "not supported; the output is text"),
    "prompt_embeds": (([],), "not supported; a prompt is text or token ids"),
    "documents": (([],), "not supported; write them into the messages"),
    "chat_template": ((), "not supported; start the server with --chat-template"),
    "thinking_token_budget": ((), "not supported"),
    "watermarking": ((False,), "not supported"),
    "repetition_detection": ((), "not supported; see frequency_penalty"),
    "stream_interval": ((1,), "not supported; each step is a chunk"),
    "cache_salt": ((), "not supported; keys share no cached prefixes"),
    "kv_transfer_params": (({},), "not supported"),
    "ec_transfer_params": (({},), "not supported"),
    "mm_processor_kwargs": (({},), "not supported; the input is text only"),
    "media_io_kwargs": (({},), "not supported; the input is text only"),
    "vllm_xargs": (({},), "not supported"),
    "echo": ((False,), "not supported in chats; see /v1/completions"),
    "add_special_tokens": ((False,), "not supported; the chat template writes them"),
    "prompt_logprobs": ((), "not supported in chats; see /v1/completions"),
    "rank_fields": ((), ONE_TEXT),
    "max_chunks_per_doc": ((), ONE_TEXT),
    "dimensions": ((), "not supported; a vector has the model's size"),
    "use_activation": ((True,), "not supported; a vector has length 1"),
    "padding": ((), "not supported"),
}


@functools.cache
def refused_fields(kind: type[Struct]) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Returns the fields of a message that are refused, with neutral values and reasons."""
    fields = msgspec.structs.fields(kind)
    return {field.name: REFUSED[field.name] for field in fields if field.type is Any}


def check_neutral(message: Struct) -> None:
    """Raises UnsupportedField for a field that asks for what this server does not have."""
    for name, (neutral, reason) in refused_fields(type(message)).items():
        value = getattr(message, name)
        if value is not None and not any(_is_same(value, one) for one in neutral):
            raise UnsupportedField(name, reason)


def _is_same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal. In JSON, 0 is not false, and 1 is not true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)

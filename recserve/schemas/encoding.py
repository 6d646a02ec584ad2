"""Requests and responses of the routes that encode text: embeddings, tokens and back.

`/v1/embeddings` has the fields of OpenAI, `/tokenize` and `/detokenize` those of vLLM.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from recserve.schemas.chat_messages import ChatMessage
from recserve.schemas.constraints import Tools
from recserve.schemas.items import InvalidRequest, StrictStruct
from recserve.schemas.neutral import check_neutral
from recserve.schemas.scoring import ModelName, PoolingRequest
from recserve.schemas.text import TokenId, TokenIds, Usage

MAX_INPUTS = 256


class EmbeddingsRequest(PoolingRequest, frozen=True, kw_only=True):
    """POST /v1/embeddings.

    Attributes:
        input: A text, a list of token ids, or a list of either.
        encoding_format: `float`, or `base64` for little-endian float32.
        dimensions: Field of OpenAI; refused.
    """

    input: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Any = None


class Embedding(Struct, frozen=True, kw_only=True):
    """The vector of one input, of length 1. As `base64` it is little-endian float32."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(Struct, frozen=True, kw_only=True):
    """One vector per input, in request order."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class TokenizeRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /tokenize: the tokens of a text, or of a chat's prompt.

    Attributes:
        prompt: The text; or give `messages`.
        messages: A conversation, which the chat template turns into a prompt.
        add_special_tokens: Add the tokeniser's special tokens; None adds them to a text only.
        add_generation_prompt: End a chat's prompt with the start of the assistant's turn; None does
            so unless the last message is continued.
        continue_final_message: End a chat's prompt with the last message.
        chat_template_kwargs: Further variables for the chat template.
        tools: Functions that the chat template shows to the model.
        return_token_strs: Add the tokens as the vocabulary spells them, as in vLLM.
    """

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)] | None = None
    model: ModelName | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
    return_token_strs: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    documents: Any = None
    chat_template: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None

    def check(self) -> None:
        """Raises InvalidRequest unless exactly one of text and conversation is given.

        It is raised for a field without support too.
        """
        check_neutral(self)
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "expected either prompt or messages")


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    """The tokens of a prompt. `max_model_len` is the model's context."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """Response of GET /tokenizer_info, in vLLM's format: what a client needs beside /tokenize.

    Attributes:
        model_max_length: Size of the model's context in tokens.
        tokenizer_class: The class of transformers that the folder names.
        chat_template: Jinja source; None without a template.
    """

    model_max_length: int
    tokenizer_class: str
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    chat_template: str | None = None


class DetokenizeRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /detokenize: the text of tokens."""

    tokens: Annotated[list[TokenId], Meta(max_length=1 << 20)]
    model: ModelName | None = None


class DetokenizeResponse(Struct, frozen=True, kw_only=True):
    """The text of the tokens."""

    prompt: str

"""Bodies and answers of the routes that write text, in OpenAI's shapes.

Bounds are OpenAI's where it has one. Fields that OpenAI has and this server does not do are listed
in REFUSED with the reason; fields that say nothing about the text are taken and not read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from recserve.schemas.items import Id, InvalidRequest, Name, RequestId, StrictStruct

MAX_N = 16
MAX_CHOICES = 128
MAX_TEXT_TIMEOUT_MS = 3_600_000
TOP_LOGPROBS = 20

Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, le=2**31)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
TextTimeoutMs = Annotated[int, Meta(ge=1, le=MAX_TEXT_TIMEOUT_MS)]
Bias = dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]]
Whole = Annotated[int, Meta(ge=1, le=2**31)]

# Field -> values that ask for nothing, and why any other is refused.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((), "not done here; ask for n texts and choose"),
    "suffix": (("",), "not done here; only the end of a text is written"),
    "tools": (([],), "not done here; put them into the messages"),
    "tool_choice": (("none", "auto"), "not done here"),
    "functions": (([],), "not done here; put them into the messages"),
    "function_call": (("none", "auto"), "not done here"),
    "response_format": (({"type": "text"},), "not done here; the text is free"),
    "modalities": ((["text"],), "not done here; there is text only"),
    "audio": ((), "not done here; there is text only"),
    "web_search_options": ((), "not done here"),
    "prediction": ((), "not done here; drafts are the server's own, see speculation"),
    "store": ((False,), "not done here; nothing is kept"),
}


class SpeculationOptions(StrictStruct, frozen=True, kw_only=True):
    """How the text is drafted; it changes the time only, unless the verifier is `typical`.

    num_tokens: most draft nodes a step. tree: a static tree as rank paths, `[[0], [1], [0, 0]]`.
    """

    drafter: Name | None = None
    verifier: Name | None = None
    num_tokens: Annotated[int, Meta(ge=1, le=256)] | None = None
    tree: (
        Annotated[
            list[Annotated[list[Annotated[int, Meta(ge=0, le=255)]], Meta(min_length=1)]],
            Meta(min_length=1, max_length=256),
        ]
        | None
    ) = None


class StreamOptions(StrictStruct, frozen=True, kw_only=True):
    """What a stream says besides its text.

    include_usage: one more chunk at the end, with the token counts of the whole answer.
    continuous_usage_stats: every chunk has the token counts so far of the text it belongs to.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class TextRequest(StrictStruct, frozen=True, kw_only=True):
    """What both routes take; None: the default of docs/reference/http.md."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    max_tokens: Whole | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[Bias, Meta(max_length=1024)] | None = None
    bad_words: Annotated[list[Stop], Meta(max_length=64)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationOptions | None = None
    priority: Annotated[int, Meta(ge=0, le=100)] = 0
    timeout_ms: TextTimeoutMs | None = None
    request_id: RequestId | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: Any = None

    def check(self) -> None:
        """Raises InvalidRequest for what OpenAI's interface has and this server does not."""
        for name, (neutral, reason) in REFUSED.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise InvalidRequest(name, reason)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "is for streams; set stream too")


class CompletionRequest(TextRequest, frozen=True, kw_only=True):
    """POST /v1/completions. prompt: a text, token numbers, or a list of either."""

    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS)] | None = None
    add_special_tokens: bool = True
    best_of: Any = None
    suffix: Any = None


class TextPart(StrictStruct, frozen=True, kw_only=True):
    """A part of a message; there is text only."""

    type: Literal["text"]
    text: str


class ChatMessage(StrictStruct, frozen=True, kw_only=True):
    """One turn. `developer` is given to the template as `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None


TemplateSetting = bool | int | float | str | None


class ChatRequest(TextRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions. chat_template_kwargs: further names for the template."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS)] | None = None
    chat_template_kwargs: Annotated[dict[Name, TemplateSetting], Meta(max_length=16)] | None = None
    parallel_tool_calls: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    prediction: Any = None


class PromptDetails(Struct, frozen=True):
    """cached_tokens: prompt tokens whose keys and values were there already."""

    cached_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts; a prompt counts once however many texts follow it.

    prompt_tokens_details: left out of the counts so far in a stream.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET


class SpeculationMetrics(Struct, frozen=True, kw_only=True):
    """What drafting did, over all texts of the answer.

    mean_acceptance_length counts the bonus token, as vLLM's does; per_position[d]: tokens accepted
    at place d of their draft.
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


class TextMetrics(Struct, frozen=True):
    """speculative_decoding: None where nothing was drafted."""

    speculative_decoding: SpeculationMetrics | None


class CompletionLogprobs(Struct, frozen=True):
    """One entry per token; text_offset: characters before it, the prompt's where it is echoed."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(Struct, frozen=True):
    """bytes: what the token writes, which by itself may be half a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True):
    """A written token and the likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """One entry per written token."""

    content: list[TokenLogprob]
    refusal: None = None


FinishReason = Literal["stop", "length"]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One text, or a piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class AssistantMessage(Struct, frozen=True, kw_only=True):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatDelta(Struct, frozen=True, kw_only=True):
    """A piece of an answer; the role comes with the first."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextResponse(Struct, frozen=True, kw_only=True):
    """What every answer and chunk has. usage, metrics: in a stream with its last chunk.

    With `continuous_usage_stats` every chunk has `usage`.
    """

    id: Id
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None | UnsetType = UNSET
    metrics: TextMetrics | UnsetType = UNSET


class CompletionResponse(TextResponse, frozen=True, kw_only=True):
    """Answer of /v1/completions, and each of its chunks."""

    choices: list[CompletionChoice]


class ChatResponse(TextResponse, frozen=True, kw_only=True):
    """Answer of /v1/chat/completions."""

    choices: list[ChatChoice]


class ChatChunk(TextResponse, frozen=True, kw_only=True):
    """A chunk of /v1/chat/completions."""

    choices: list[ChatChunkChoice]

"""Requests and responses of the routes that write text, in OpenAI's format.

Bounds equal OpenAI's where it has one. A field of the type Any is one that this server does not
support, see `neutral.py`. Fields that do not affect the text are accepted and ignored.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from recserve.bounds import MAX_ID_LENGTH
from recserve.schemas.chat_messages import ChatMessage
from recserve.schemas.constraints import (
    ChoiceTexts,
    GrammarText,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    StructuredOutputs,
    ToolChoice,
    Tools,
)
from recserve.schemas.experiments import ExperimentLabel
from recserve.schemas.items import (
    TOKEN_ID,
    InvalidRequest,
    Name,
    RequestId,
    StrictStruct,
    UnsupportedField,
)
from recserve.schemas.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from recserve.schemas.neutral import check_neutral
from recserve.schemas.speculation import SpeculationMetrics, TokenSource

MAX_N = 16
MAX_CHOICES = 128
MAX_TEXT_TIMEOUT_MS = 3_600_000
TOP_LOGPROBS = 20

Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, le=2**31, extra_json_schema={TOKEN_ID: True})]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
TextTimeoutMs = Annotated[int, Meta(ge=1, le=MAX_TEXT_TIMEOUT_MS)]
Bias = dict[str | int, Annotated[float, Meta(ge=-100, le=100)]]
MAX_ALLOWED = 2**20
MAX_NAMED = 16  # wrong keys that an error names
Whole = Annotated[int, Meta(ge=1, le=2**31)]
WholeOrZero = Annotated[int, Meta(ge=0, le=2**31)]

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


# Fields that say what a text must be.
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
JSON_FIELDS = (
    *("response_format", "guided_json", "structured_outputs.json"),
    "structured_outputs.json_object",
)


class SpeculationOptions(StrictStruct, frozen=True, kw_only=True):
    """Drafting options. With the verifiers `sample` and `greedy` they change the speed only.

    Attributes:
        drafter: Name of a drafter of the server; None means the server's default.
        verifier: Name of an acceptance rule; None means the server's default.
        num_tokens: Most draft nodes per step.
        tree: Static tree as rank paths, such as `[[0], [1], [0, 0]]`.
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
    """Extra content of a stream.

    Attributes:
        include_usage: Add a last chunk with the token counts of the whole response.
        continuous_usage_stats: Beside `include_usage`: add to every chunk the token counts of its
            text so far.
        include_token_sources: Add to every choice its text by token, and whether a draft proposed
            the token.
        include_obfuscation: Ignored.
    """

    include_usage: bool | None = None
    include_token_sources: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class TextRequest(StrictStruct, frozen=True, kw_only=True):
    """Fields of both text routes. None means the default in docs/reference/http-text.md.

    Attributes:
        response_format: What the text is, as in OpenAI's API.
        structured_outputs: The same as in vLLM; so are `guided_json` and its like.
        allowed_token_ids: Tokens that the text may have; None or an empty list means all.
    """

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
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | GrammarText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: GrammarText | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED)] | None = None
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
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    return_token_ids: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    logprob_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    return_token_offsets: Any = None
    return_weight_versions: Any = None
    detokenize: Any = None
    thinking_token_budget: Any = None
    watermarking: Any = None
    repetition_detection: Any = None
    stream_interval: Any = None
    cache_salt: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    mm_processor_kwargs: Any = None
    vllm_xargs: Any = None
    session_id: str | None = None

    @property
    def most_tokens(self) -> int | None:
        """Most output tokens; None if the request does not say."""
        most: int | None = getattr(self, "max_completion_tokens", None)
        return self.max_tokens if most is None else most

    def biases(self) -> dict[int, float]:
        """Returns `logit_bias` by token id. Raises InvalidRequest, which names all wrong keys."""
        given = self.logit_bias or {}
        wrong = [str(key) for key in given if not _TOKEN_ID.fullmatch(str(key))]
        if wrong:
            names = ", ".join(repr(key[:64]) for key in wrong[:MAX_NAMED])
            raise InvalidRequest("logit_bias", f"expected token ids as keys, got {names}")
        return {int(key): value for key, value in given.items()}

    def check(self) -> bool:
        """Checks the fields, and returns whether one of them may constrain the text.

        Raises:
            InvalidRequest: If fields do not fit each other, or one has no support here.
        """
        check_neutral(self)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "needs stream: true")
        constrained = bool(
            self.response_format
            or self.structured_outputs
            or self.guided_json is not None
            or self.guided_regex
            or self.guided_choice
            or self.guided_grammar
            or self.allowed_token_ids
        )
        if constrained:
            self._check_constraint()
        return constrained

    @property
    def constrained_by(self) -> list[str]:
        """Names of the fields that say what the text must be."""
        names = [name for name in GUIDED if _is_given(getattr(self, name))]
        outputs = self.structured_outputs
        if outputs is not None:
            given = [name for name in STRUCTURED if _is_given(getattr(outputs, name))]
            names += [f"structured_outputs.{name}" for name in given]
        if self.response_format is not None and self.response_format.type != "text":
            names.append("response_format")
        return names

    def _check_constraint(self) -> None:
        """Raises InvalidRequest if several fields say what the text must be, or one is wrong."""
        if self.response_format is not None:
            self.response_format.check()
        names = self.constrained_by
        if len(names) > 1:
            raise InvalidRequest(names[1], f"cannot be combined with {names[0]}; leave one out")
        if self.ignore_eos and names:
            raise InvalidRequest("ignore_eos", f"cannot be combined with {names[0]}; leave it out")
        blanks = self.structured_outputs and self.structured_outputs.blanks
        if blanks and (not names or names[0] not in JSON_FIELDS):
            fields = ", ".join(JSON_FIELDS)
            raise InvalidRequest("structured_outputs.blanks", f"needs JSON: one of {fields}")


def _is_given(value: Any) -> bool:
    """Returns whether the value of a field is a constraint. An empty schema is one."""
    return value is not None and value is not False and value != []


class CompletionRequest(TextRequest, frozen=True, kw_only=True):
    """POST /v1/completions.

    Attributes:
        prompt: A text, a list of token ids, or a list of either.
        echo: Put the prompt before each text.
        logprobs: Number of likeliest tokens to report per output token.
        add_special_tokens: Add the tokeniser's special tokens to a prompt given as text.
        prompt_logprobs: Number of likeliest tokens to report per prompt token, as in vLLM.
        max_tokens: Most output tokens; 0 writes nothing, so that only the prompt is scored.
        max_completion_tokens: The same under the name of chats; overrides `max_tokens`.
    """

    max_tokens: WholeOrZero | None = None
    max_completion_tokens: WholeOrZero | None = None
    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS)] | None = None
    add_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    suffix: Any = None
    prompt_embeds: Any = None

    def check(self) -> bool:
        """Checks the fields as `TextRequest.check`; a stream cannot score its prompt."""
        constrained = super().check()
        if self.best_of not in (None, self.n or 1):
            why = "not supported; request n texts and choose among them"
            raise UnsupportedField("best_of", why)
        if self.stream and self.scores_prompt:
            name = "prompt_logprobs" if self.prompt_logprobs is not None else "echo"
            raise InvalidRequest(name, "log-probabilities of a prompt are not streamed")
        return constrained

    @property
    def scores_prompt(self) -> bool:
        """Whether the response has log-probabilities of the prompt's own tokens."""
        return self.prompt_logprobs is not None or bool(self.echo and self.logprobs is not None)


TemplateSetting = bool | int | float | str | None


class ChatRequest(TextRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions.

    Attributes:
        messages: The conversation.
        max_completion_tokens: Most output tokens; overrides `max_tokens`.
        tools: Functions that the model may call.
        tool_choice: Whether it calls one: `auto` decides by itself, `required` calls at least one,
            `none` none, and a named one calls that.
        parallel_tool_calls: Whether a turn may have several calls; None means yes.
        include_reasoning: False leaves the model's thoughts out of the answer.
        chat_template_kwargs: Further variables for the chat template.
        continue_final_message: The text continues the last message.
        add_generation_prompt: End the prompt with the start of the assistant's turn; None does so
            unless the last message is continued.
    """

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS)] | None = None
    chat_template_kwargs: Annotated[dict[Name, TemplateSetting], Meta(max_length=16)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    documents: Any = None
    chat_template: Any = None
    media_io_kwargs: Any = None
    add_special_tokens: Any = None
    echo: Any = None
    prompt_logprobs: Any = None

    def check(self) -> bool:
        """Checks the fields as `TextRequest.check`, tools included."""
        constrained = super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs: true")
        if self.tools or self.tool_choice:
            self._check_tools()
        return constrained

    @property
    def calls_tools(self) -> bool:
        """Whether the model may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def _check_tools(self) -> None:
        """Raises InvalidRequest if tools and their choice do not fit each other or other fields."""
        names = [tool.function.name for tool in self.tools or ()]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise InvalidRequest(f"tools[{number}].function.name", f"{name!r} occurs twice")
        for number, tool in enumerate(self.tools or ()):
            kind = (tool.function.parameters or {}).get("type", "object")
            if kind != "object":
                param = f"tools[{number}].function.parameters.type"
                raise InvalidRequest(param, f'expected "object", got {str(kind)[:60]!r}')
        chosen = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if not names and (chosen or self.tool_choice == "required"):
            raise InvalidRequest("tool_choice", "needs tools")
        if chosen is not None and chosen not in names:
            expected = f"expected one of {', '.join(names)}, got {chosen!r}"
            raise InvalidRequest("tool_choice.function.name", expected)
        if not self.calls_tools:
            return
        for name in self.constrained_by:
            if name != "response_format":
                raise InvalidRequest(name, "cannot be combined with tools; leave one out")
        if self.ignore_eos:
            raise InvalidRequest("ignore_eos", "cannot be combined with tools; leave it out")


class PromptDetails(Struct, frozen=True):
    """Prompt statistics. `cached_tokens` counts tokens whose keys and values were in the cache."""

    cached_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts. A prompt counts once, regardless of the number of its texts.

    `prompt_tokens_details` is absent in the running counts of a stream.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET


class TextMetrics(Struct, frozen=True):
    """Metrics of a response. `speculative_decoding` is None for the drafter `none`."""

    speculative_decoding: SpeculationMetrics | None


FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One text, or a piece of it in a stream, where `token_sources` may be requested."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None | UnsetType = UNSET
    token_sources: list[TokenSource] | UnsetType = UNSET


class AssistantFunction(Struct, frozen=True, kw_only=True):
    """The name of a function, and the text of its arguments, a JSON object."""

    name: str
    arguments: str


class AssistantToolCall(Struct, frozen=True, kw_only=True):
    """A call of a function that the model wants."""

    id: str
    type: Literal["function"] = "function"
    function: AssistantFunction


class AssistantMessage(Struct, frozen=True, kw_only=True):
    """The assistant's turn.

    Attributes:
        content: The text; None beside calls or thoughts if there is none.
        reasoning_content: The model's thoughts before its text; absent if there are none.
        tool_calls: The calls; absent if there are none.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AssistantToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One chat response."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason


class FunctionDelta(Struct, frozen=True, kw_only=True):
    """A piece of a call: the name at first, and then characters of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """A piece of a call. The first one has `id`, `type` and the name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(Struct, frozen=True, kw_only=True):
    """A piece of a chat response. The first piece has the role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    """A piece of one chat response. `token_sources` as in CompletionChoice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    token_sources: list[TokenSource] | UnsetType = UNSET


class TextResponse(Struct, frozen=True, kw_only=True):
    """Fields of every text response and chunk.

    Attributes:
        usage: Token counts; in a stream last, or in every chunk (`continuous_usage_stats`).
        metrics: Draft statistics; in a stream in the last chunk.
        experiment: Experiment and arm, where the request is in one; in the place of `metrics`.
    """

    id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_LENGTH)]
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None | UnsetType = UNSET
    metrics: TextMetrics | UnsetType = UNSET
    experiment: ExperimentLabel | UnsetType = UNSET


class CompletionResponse(TextResponse, frozen=True, kw_only=True):
    """Response of /v1/completions, and each of its chunks."""

    choices: list[CompletionChoice]


class ChatResponse(TextResponse, frozen=True, kw_only=True):
    """Response of /v1/chat/completions."""

    choices: list[ChatChoice]


class ChatChunk(TextResponse, frozen=True, kw_only=True):
    """A chunk of /v1/chat/completions."""

    choices: list[ChatChunkChoice]

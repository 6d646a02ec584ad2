"""Translates text requests into engine terms: tokens, sampling parameters, drafting options.

`plan_completion` and `plan_chat` translate a whole body in one call.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from recserve.core.constraint import Constraint
from recserve.core.errors import DeadlineExceeded
from recserve.drafters.registry import (
    check_speculation,
    drafter_classes,
    weightless_drafters,
)
from recserve.schemas.chat_messages import ChatMessage, ToolCall
from recserve.schemas.encoding import TokenizeRequest
from recserve.schemas.items import InvalidRequest, UnsupportedField, not_offered_error
from recserve.schemas.text import (
    MAX_CHOICES,
    MAX_NAMED,
    ChatRequest,
    CompletionRequest,
    SpeculationOptions,
    TextRequest,
)
from recserve.service.errors import UnfitRule
from recserve.service.text.chat_constraint import (
    chat_constraint,
    template_tools,
    text_constraint,
    turn_form,
)
from recserve.service.text.model import TextModel
from recserve.service.text.tool_calls.turn import TurnForm
from recserve.speculation.sampling_params import MIN_TEMPERATURE, SamplingParams, Speculation
from recserve.speculation.verifier import UnfitDraft
from recserve.speculation.verifiers.registry import GREEDY, verifiers
from recserve.tokenizer.chat_template import ChatTemplate, TemplateTimeout
from recserve.tokenizer.template_sandbox import TemplateError

COMPLETION_TOKENS = 16
RANDOM_SEED = -1  # draws a seed, as in vLLM and llama.cpp


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        param: Field of the request that gave it, for errors.
        tokens: At least one token id.
        text: Text of the prompt, as `echo` returns it. Empty for tokens without `echo`.
        encoded: True if the request gave the text, False if it gave the tokens.
        open_tokens: Last tokens, which leave a character open that is not in `text`.
    """

    param: str
    tokens: list[int]
    text: str
    encoded: bool
    open_tokens: Sequence[int] = ()


@dataclass(frozen=True)
class TextPlan:
    """What a request body asks the model to write.

    Attributes:
        prompts: The prompts.
        copies: Number of texts per prompt.
        params: Sampling parameters of all texts; the copies of a prompt follow each other.
        speculation: Drafting options.
        stops: Strings that end a text.
        constraint: What every text may be; None leaves it free.
        form: What a chat's turn may have beside content; None for content only.
    """

    prompts: list[Prompt]
    copies: int
    params: list[SamplingParams]
    speculation: Speculation
    stops: list[str]
    constraint: Constraint | None = None
    form: TurnForm | None = None


def plan_completion(
    body: CompletionRequest, model: TextModel, deadline_s: float | None = None
) -> TextPlan:
    """Translates the body of a completion.

    Args:
        body: The request.
        model: The served model.
        deadline_s: time.monotonic() value after which the texts are useless; None means never.

    Raises:
        InvalidRequest: If a prompt is empty or invalid, or another field is out of range.
        ContextExceeded: If prompt and text do not fit the context.
        DeadlineExceeded: If the deadline passes meanwhile.
        UnknownModel: If the body names another model.
        Uncompiled: If the constraint has to be compiled first.
    """
    model.check_name(body.model)
    constrained = body.check()
    prompts = _completion_prompts(body, model, deadline_s)
    most: list[int | None] = [body.most_tokens] * len(prompts)
    if body.most_tokens is None:
        rooms = [model.context - len(prompt.tokens) for prompt in prompts]
        most = [max(1, min(COMPLETION_TOKENS, room)) for room in rooms]
    constraint = text_constraint(body, model) if constrained else None
    return _plan(body, model, prompts, most, body.logprobs, constraint)


def plan_chat(body: ChatRequest, model: TextModel, deadline_s: float | None = None) -> TextPlan:
    """Translates the body of a chat: renders its messages with the model's chat template.

    Raises:
        InvalidRequest: If the model has no template, the template rejects the messages, or another
            field is out of range.
        Exception: As `plan_completion`.
    """
    model.check_name(body.model)
    constrained = body.check()
    text = chat_text(body, body.messages, model, deadline_s)
    prompts = [_prompt("messages", text, False, model, deadline_s)]
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    continued = _text(body.messages[-1]) if body.continue_final_message else None
    form = turn_form(body, model, text, continued)
    constraint = text_constraint(body, model) if constrained else None  # its errors name the path
    if form is not None:
        constraint = chat_constraint(body, form, constraint, model)
    return _plan(body, model, prompts, [body.most_tokens], logprobs, constraint, form)


def chat_text(
    body: ChatRequest | TokenizeRequest,
    messages: Sequence[ChatMessage],
    model: TextModel,
    deadline_s: float | None = None,
) -> str:
    """Returns the text of a conversation.

    Args:
        body: The request; it says how the text ends.
        messages: The conversation.
        model: The served model.
        deadline_s: time.monotonic() value after which the text is useless; None means never.

    Raises:
        InvalidRequest: If the model has no template, the template rejects the messages, or it does
            not write the message to continue as it is.
    """
    template = model.tokenizer.template
    if template is None:
        raise UnsupportedField(
            "messages",
            "this model has no chat template; use /v1/completions, or start the server with one",
        )
    continued, follows = bool(body.continue_final_message), body.add_generation_prompt
    if continued and follows:
        raise InvalidRequest("continue_final_message", "needs add_generation_prompt: false")
    turns = [_turn(n, m) for n, m in enumerate(messages)]
    _name_results(turns)
    settings = body.chat_template_kwargs
    follows = not continued if follows is None else follows
    tools = template_tools(body)
    text = apply_template(template, "messages", turns, settings, follows, deadline_s, tools)
    if not continued:
        return text
    last = turns[-1]["content"].lstrip()
    place = text.rfind(last.rstrip())
    if not last or place < 0:
        why = "the chat template does not write the text of the last message as it is"
        raise InvalidRequest("continue_final_message", why)
    end = last if text.startswith(last, place) else last.rstrip()
    return text[: place + len(end)]


def apply_template(
    template: ChatTemplate,
    param: str,
    turns: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any] | None,
    answer_follows: bool = True,
    deadline_s: float | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Returns the text of turns; `param` names the field that they come from, for errors.

    Raises:
        InvalidRequest: If the template refuses the turns, or computes for too long.
        DeadlineExceeded: If the text is not ready in time.
    """
    check_deadline(deadline_s)
    try:
        return template.render(turns, settings, answer_follows, deadline_s, tools)
    except TemplateTimeout as error:
        raise DeadlineExceeded(str(error)) from None
    except TemplateError as error:
        raise InvalidRequest(param, str(error)) from None


def speculation(
    body: SpeculationOptions | None, temperature: float | None, model: TextModel
) -> Speculation:
    """Returns the drafting options of a request.

    Raises:
        InvalidRequest: If an option is unknown here, or the options do not fit each other.
    """
    options = body or SpeculationOptions()
    drafter = options.drafter or model.default_drafter
    verifier = options.verifier or model.default_verifier
    names: dict[str, tuple[str, Collection[str]]] = {
        "drafter": (drafter, model.drafters),
        "verifier": (verifier, verifiers()),
    }
    for field, (value, there) in names.items():
        if value not in there:
            trained = [name for name in drafter_classes() if name not in weightless_drafters()]
            lacking = {name: f"start the server with `--drafter {name}=FOLDER`" for name in trained}
            raise not_offered_error(f"speculation.{field}", value, there, lacking)
    if verifier == GREEDY and temperature != 0:
        raise InvalidRequest("speculation.verifier", "greedy needs temperature 0; use sample")
    tree = None if options.tree is None else tuple(tuple(path) for path in options.tree)
    drafting = Speculation(drafter, verifier, options.num_tokens, tree)
    try:
        check_speculation(drafting, model.drafters[drafter], temperature == 0)
    except UnfitDraft as error:
        raise UnfitRule("speculation.verifier", str(error)) from None
    except ValueError as error:
        raise InvalidRequest("speculation", str(error)) from None
    return drafting


def derived_seed(seed: int, index: int) -> int:
    """Returns the seed of a prompt's text number `index`; the first text uses `seed` itself."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def check_tokens(param: str, tokens: Sequence[int], model: TextModel) -> None:
    """Raises InvalidRequest for the first token id outside the model's vocabulary."""
    if tokens and max(tokens) >= model.vocab_size:
        place = next(n for n, token in enumerate(tokens) if token >= model.vocab_size)
        raise InvalidRequest(
            f"{param}[{place}]",
            f"expected a token id below {model.vocab_size}, got {tokens[place]}, "
            "which is out of vocabulary",
        )


def check_length(param: str, text: str, model: TextModel) -> None:
    """Raises ContextExceeded for a text that cannot fit the context, before it is encoded."""
    fewest = model.tokenizer.min_tokens(text)
    if fewest > model.context:
        raise model.too_long(param, f"at least {fewest}")


def check_deadline(deadline_s: float | None) -> None:
    """Raises DeadlineExceeded if a deadline has passed. It is called before each text is encoded,
    because the texts of one body can take seconds.
    """
    if deadline_s is not None and time.monotonic() > deadline_s:
        raise DeadlineExceeded("the deadline passed while the request was prepared")


def encode_text(
    param: str,
    given: str | list[int],
    model: TextModel,
    special: bool = True,
    deadline_s: float | None = None,
) -> list[int]:
    """Returns the tokens of a text, or checked token ids, if they fit the context.

    The texts of a body are encoded one by one, so that the first one that does not fit refuses the
    others before they cost anything.

    Args:
        param: Field of the request, for errors.
        given: The text, or its token ids.
        model: The served model.
        special: Whether to add special tokens to a text.
        deadline_s: time.monotonic() value after which the tokens are useless; None means never.

    Raises:
        ContextExceeded: If they do not fit the context.
        InvalidRequest: If a token id is unknown.
        DeadlineExceeded: If the deadline has passed.
    """
    check_deadline(deadline_s)
    if isinstance(given, str):
        check_length(param, given, model)
        given = model.tokenizer.encode(given, special)
    else:
        check_tokens(param, given, model)
    if len(given) > model.context:
        raise model.too_long(param, f"{len(given)}")
    return given


def _plan(
    body: TextRequest,
    model: TextModel,
    prompts: list[Prompt],
    most_tokens: Sequence[int | None],
    logprobs: int | None,
    constraint: Constraint | None = None,
    form: TurnForm | None = None,
) -> TextPlan:
    if constraint is not None and constraint.end_tokens and body.ignore_eos:
        raise InvalidRequest("ignore_eos", "a constrained text ends at its end token; leave it out")
    drafting = speculation(body.speculation, body.temperature, model)
    copies, params = body.n or 1, list[SamplingParams]()
    for prompt, most in zip(prompts, most_tokens, strict=True):
        first = _sampling(body, model, prompt, most, logprobs)
        params += [replace(first, seed=derived_seed(first.seed, copy)) for copy in range(copies)]
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or [])
    return TextPlan(prompts, copies, params, drafting, stops, constraint, form)


def _completion_prompts(
    body: CompletionRequest, model: TextModel, deadline_s: float | None
) -> list[Prompt]:
    """Returns the prompts of a body, in order. Raises InvalidRequest or ContextExceeded."""
    parts = name_texts("prompt", body.prompt, MAX_CHOICES)
    if len(parts) * (body.n or 1) > MAX_CHOICES:
        given_texts = f"{len(parts)} prompts with n = {body.n or 1}"
        raise InvalidRequest("prompt", f"expected at most {MAX_CHOICES} texts, got {given_texts}")
    special, echo = body.add_special_tokens, bool(body.echo)
    return [_prompt(param, part, special, model, deadline_s, echo) for param, part in parts.items()]


def name_texts(
    param: str, given: str | Sequence[str | int | list[int]], most: int
) -> dict[str, str | list[int]]:
    """Returns each text of a field by its name in errors, such as `prompt[3]` in a list.

    Args:
        param: Name of the field.
        given: A text, a list of token ids, or a list of either.
        most: Most texts of a list.

    Raises:
        InvalidRequest: If a list mixes token ids with texts, or has too many texts.
    """
    if isinstance(given, str):
        return {param: given}
    tokens = [one for one in given if isinstance(one, int)]
    if len(tokens) == len(given):
        return {param: tokens}
    if tokens:
        raise InvalidRequest(param, "expected texts or lists of token ids, got both kinds")
    if len(given) > most:
        raise InvalidRequest(param, f"expected at most {most} texts, got {len(given)}")
    return {f"{param}[{n}]": one for n, one in enumerate(given) if not isinstance(one, int)}


def _sampling(
    body: TextRequest,
    model: TextModel,
    prompt: Prompt,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Returns the sampling parameters of a prompt's first text.

    Args:
        body: The request.
        model: The served model.
        prompt: The prompt.
        max_tokens: Most output tokens; None means up to the end of the context. With 0 no text is
            begun, and the parameters are only checked.
        logprobs: Number of likeliest tokens to report; None reports nothing.

    Raises:
        ContextExceeded: If prompt and text do not fit the context.
        InvalidRequest: If another field is out of range.
    """
    room = model.context - len(prompt.tokens)
    if room < (1 if max_tokens is None else max_tokens):
        name = "max_completion_tokens" if isinstance(body, ChatRequest) else "max_tokens"
        limit = "" if max_tokens is None else f" and {name} is too large: {max_tokens}"
        raise model.exceeded(
            "max_tokens" if room >= 1 else prompt.param,
            f"{prompt.param} takes {len(prompt.tokens)}{limit}",
        )
    most = room if max_tokens is None else max_tokens
    if body.min_tokens > most:
        raise InvalidRequest("min_tokens", f"expected int <= {most}, got {body.min_tokens}")
    bias, stops = body.biases(), body.stop_token_ids or []
    if unknown := [token for token in bias if token >= model.vocab_size]:
        names = ", ".join(map(str, unknown[:MAX_NAMED]))
        expected = f"expected token ids below {model.vocab_size}, got {names}, out of vocabulary"
        raise InvalidRequest(f"logit_bias.{unknown[0]}", expected)
    check_tokens("stop_token_ids", stops, model)
    temperature = _or(body.temperature, 1.0)
    if 0 < temperature < MIN_TEMPERATURE:
        raise InvalidRequest(
            "temperature", f"expected 0 or at least {MIN_TEMPERATURE}, got {temperature}"
        )
    ends = () if body.ignore_eos else model.end_tokens
    params = SamplingParams(
        temperature=temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=bias,
        bad_words=_bad_words(body.bad_words or [], model),
        seed=secrets.randbits(63) if body.seed in (None, RANDOM_SEED) else body.seed,
        max_tokens=max(most, 1),
        min_tokens=body.min_tokens,
        stop_token_ids=tuple(dict.fromkeys([*ends, *stops])),
        logprobs=logprobs,
    )
    if params.may_ban_all(model.vocab_size):
        raise InvalidRequest(
            "bad_words",
            "with the end tokens before min_tokens, they ban every token; leave at least one of "
            f"the {model.vocab_size}",
        )
    return params


def _prompt(
    param: str,
    given: str | list[int],
    special: bool,
    model: TextModel,
    deadline_s: float | None,
    echo: bool = False,
) -> Prompt:
    tokens = encode_text(param, given, model, special, deadline_s)
    if not tokens:
        raise InvalidRequest(param, "is empty; this model needs at least one token to continue")
    if isinstance(given, str):
        return Prompt(param, tokens, given, True)
    return _echo(param, tokens, model) if echo else Prompt(param, tokens, "", False)


def _echo(param: str, tokens: list[int], model: TextModel) -> Prompt:
    """Returns a prompt of tokens with its text."""
    end = len(tokens) - model.tokenizer.spelling.num_open(tokens)
    return Prompt(param, tokens, model.tokenizer.decode(tokens[:end]), False, tokens[end:])


def _turn(number: int, message: ChatMessage) -> dict[str, Any]:
    """Returns a turn as templates know it. Raises InvalidRequest."""
    message.check(f"messages[{number}]")
    turn = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message),
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
        "tool_calls": None if not message.tool_calls else [_call(c) for c in message.tool_calls],
    }
    return {name: value for name, value in turn.items() if value is not None}


def _name_results(turns: Sequence[dict[str, Any]]) -> None:
    """Adds to each result of a call the name of its function, which some templates need."""
    names: dict[str, str] = {}
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            if "id" in call:
                names[call["id"]] = call["function"]["name"]
        name = names.get(turn.get("tool_call_id", ""))
        if turn["role"] == "tool" and name is not None:
            turn.setdefault("name", name)


def _text(message: ChatMessage) -> str:
    """Returns the text of a turn; parts follow each other."""
    content = message.content or ""
    return content if isinstance(content, str) else "".join([part.text for part in content])


def _call(call: ToolCall) -> dict[str, Any]:
    """Returns a call with its arguments as an object, where their text is one."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": call.type, "function": function}


def _bad_words(words: Sequence[str], model: TextModel) -> tuple[tuple[int, ...], ...]:
    """Encodes each word in two forms: at the beginning of a text, and after a space."""
    encode = model.tokenizer.encode
    spelled = [tuple(encode(form, False)) for word in words for form in (word, f" {word}")]
    return tuple(dict.fromkeys(filter(None, spelled)))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value

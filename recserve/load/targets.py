"""Requests to a server and the reading of its responses.

A target makes the body of a request from a sample and reads the answer into a `Reply`. Four exist:
recserve's item routes, and the completion and chat routes of any OpenAI-compatible server, whose
speculation counts are read in the forms of recserve, vLLM, SGLang and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from recserve.load.datasets import Sample

Json = dict[str, Any]


class MalformedReply(ValueError):
    """The server's answer is not of the target's form."""


@dataclass(frozen=True)
class Reply:
    """What one answer said.

    Attributes:
        item_ids: The slate or the ranking, best first.
        dense_weight: Weight of the dense head in the scores of a slate; None if it names none.
        degraded: Ways in which the answer is less than what was asked.
        server_ms: Total time that the server reports for the request; None if it does not.
            llama.cpp's is the time of prompt and decoding, without the wait for a slot.
        text: The text, all choices after one another.
        output_tokens: Tokens written; None if the server does not say.
        prompt_tokens: Tokens of the prompt; None if the server does not say.
        finish_reasons: Why each choice ended: "stop", "length" or another word of the server.
        num_drafts: Verification steps with a draft. llama.cpp does not count them, so all decoding
            steps of a request with drafts count.
        num_draft_tokens: Tokens drafted.
        num_accepted_tokens: Drafted tokens accepted, without bonus tokens.
        versions: Model and catalogue version, where the server names them.
    """

    item_ids: tuple[str, ...] = ()
    dense_weight: float | None = None
    degraded: tuple[str, ...] = ()
    server_ms: float | None = None
    text: str = ""
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    finish_reasons: tuple[str, ...] = ()
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    versions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Items:
    """recserve's /v1/recommend or /v1/rank.

    Attributes:
        name: Name in commands and reports.
        path: Path of the route.
        streams: Whether answers are server-sent events.
        kind: "items" or "text".
    """

    name: str
    path: str
    streams: bool = False
    kind: str = "items"

    def body(self, sample: Sample, fields: Mapping[str, object]) -> bytes:
        """Returns the request's JSON."""
        body: Json = {"user": {"id": sample.unit}}
        if sample.history:
            body["history"] = sample.history
        if sample.candidates:
            body["candidates"] = [{"item_id": item_id} for item_id in sample.candidates]
        return msgspec.json.encode(merge_fields(body, fields))

    def read(self, answer: Json) -> Reply:
        """Returns the slate or ranking. Raises MalformedReply."""
        try:
            timing = answer.get("timing_ms") or {}
            versions = (answer.get("model_version"), answer.get("catalog_version"))
            return Reply(
                item_ids=tuple(str(item["item_id"]) for item in answer["items"]),
                dense_weight=answer.get("dense_weight"),
                degraded=tuple(answer.get("degraded") or ()),
                server_ms=timing.get("total"),
                versions=tuple(str(version) for version in versions if version),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise MalformedReply(f"no slate in the answer: {error!r}") from None


@dataclass(frozen=True)
class Text:
    """/v1/completions or /v1/chat/completions of an OpenAI-compatible server.

    Attributes:
        name: Name in commands and reports.
        path: Path of the route.
        streams: Whether answers are server-sent events.
        kind: "items" or "text".
    """

    name: str
    path: str
    streams: bool = True
    kind: str = "text"

    def body(self, sample: Sample, fields: Mapping[str, object]) -> bytes:
        """Returns the request's JSON for the first turn."""
        body: Json = {}
        if self.name == "chat":
            body["messages"] = [{"role": "user", "content": sample.turns[0]}]
        else:
            body["prompt"] = sample.turns[0]
        if self.streams:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(merge_fields(body, fields))

    def read(self, answer: Json) -> Reply:
        """Returns the text and its counts. Raises MalformedReply."""
        try:
            text = "".join(_choice_text(choice) for choice in answer["choices"])
            usage = answer.get("usage") or {}
            ended = [choice.get("finish_reason") for choice in answer["choices"]]
            reply = Reply(
                server_ms=_server_ms(answer.get("timings") or {}),
                text=text,
                output_tokens=usage.get("completion_tokens"),
                prompt_tokens=usage.get("prompt_tokens"),
                finish_reasons=tuple(str(reason) for reason in ended if reason),
                versions=(str(answer["model"]),) if answer.get("model") else (),
            )
            return _with_speculation(reply, answer)
        except (KeyError, TypeError, AttributeError) as error:
            raise MalformedReply(f"no text in the answer: {error!r}") from None


Target = Items | Text

TARGETS: dict[str, Target] = {
    "recommend": Items(name="recommend", path="/v1/recommend"),
    "rank": Items(name="rank", path="/v1/rank"),
    "completions": Text(name="completions", path="/v1/completions"),
    "chat": Text(name="chat", path="/v1/chat/completions"),
}


def find_target(name: str, stream: bool = True) -> Target:
    """Returns a target by name. stream: whether a text is to come in pieces.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in TARGETS:
        raise ValueError(f"target {name!r}: expected one of {', '.join(TARGETS)}")
    target = TARGETS[name]
    return replace(target, streams=stream) if isinstance(target, Text) else target


def merge_fields(body: Mapping[str, object], fields: Mapping[str, object]) -> Json:
    """Returns the body with further fields; objects are merged, and dots in names nest.

    `{"speculation.drafter": "ngram"}` sets one field of `speculation` and leaves the others.
    """
    result: Json = dict(body)
    for name, value in fields.items():
        head, _, rest = name.partition(".")
        if rest:
            value = {rest: value}
        old = result.get(head)
        if isinstance(value, Mapping):
            base = old if isinstance(old, Mapping) else {}
            result[head] = merge_fields(base, value)
        else:
            result[head] = value
    return result


@dataclass
class StreamJoiner:
    """Joins the events of a text stream into one answer, and notes when pieces of text arrived.

    Attributes:
        piece_times: Time of each event that held text, in seconds of the caller's clock.
        done: Whether the end marker arrived.
    """

    piece_times: list[float] = field(default_factory=list)
    done: bool = False
    _buffer: bytes = b""
    _texts: dict[int, list[str]] = field(default_factory=dict)
    _reasons: dict[int, str] = field(default_factory=dict)
    _answer: Json = field(default_factory=dict)

    def feed(self, data: bytes, now: float) -> None:
        """Takes bytes that arrived at `now`. Raises MalformedReply, also for an error event."""
        self._buffer += data.replace(b"\r\n", b"\n") if b"\r" in data else data
        if b"\n\n" not in self._buffer:
            return
        *events, self._buffer = self._buffer.split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                self._take(b"\n".join(lines), now)

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event: Json = msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise MalformedReply(f"an event is not a JSON object ({error})") from None
        if event.get("error"):
            raise MalformedReply(f"error in the stream: {str(event['error'])[:200]}")
        has_text = False
        for choice in event.get("choices") or ():
            text = _choice_text(choice)
            has_text = has_text or bool(text)
            index = int(choice.get("index") or 0)
            self._texts.setdefault(index, []).append(text)
            if choice.get("finish_reason"):
                self._reasons[index] = choice["finish_reason"]
            if choice.get("meta_info"):
                self._answer["meta_info"] = choice["meta_info"]
        if has_text:
            self.piece_times.append(now)
        for name in ("usage", "metrics", "timings", "model", "meta_info"):
            if event.get(name):
                self._answer[name] = event[name]

    def answer(self) -> Json:
        """Returns the joined answer in the form of an unstreamed completion."""
        choices = [
            {"text": "".join(texts), "finish_reason": self._reasons.get(index)}
            for index, texts in sorted(self._texts.items())
        ]
        return {**self._answer, "choices": choices}


def _choice_text(choice: Mapping[str, Any]) -> str:
    """The text of a choice; a first chat event with only a role has none."""
    part = choice.get("delta") or choice.get("message")
    if part is None:
        return choice.get("text") or ""
    return (part.get("reasoning_content") or "") + (part.get("content") or "")


def _server_ms(timings: Mapping[str, float]) -> float | None:
    """The time of prompt and decoding that llama.cpp reports."""
    if "prompt_ms" not in timings or "predicted_ms" not in timings:
        return None
    return timings["prompt_ms"] + timings["predicted_ms"]


def _with_speculation(reply: Reply, answer: Json) -> Reply:
    """Adds draft counts in the form of the server: recserve, vLLM, SGLang or llama.cpp."""
    counts = (answer.get("metrics") or {}).get("speculative_decoding")
    if counts:
        drafts = counts.get("num_drafts", counts.get("num_spec_steps", 0))
        drafted = counts.get("num_draft_tokens", 0)
        accepted = counts.get("num_accepted_tokens", counts.get("num_accepted_draft_tokens", 0))
        return replace(
            reply, num_drafts=drafts, num_draft_tokens=drafted, num_accepted_tokens=accepted
        )
    meta = answer.get("meta_info") or next(
        (choice["meta_info"] for choice in answer["choices"] if choice.get("meta_info")), None
    )
    if meta and meta.get("spec_verify_ct"):
        steps = meta["spec_verify_ct"]
        written = meta.get("completion_tokens", reply.output_tokens or 0)
        return replace(
            reply,
            num_drafts=steps,
            num_draft_tokens=meta.get("spec_num_proposed_drafts", 0),
            num_accepted_tokens=meta.get("spec_num_correct_drafts", max(written - steps, 0)),
        )
    timings = answer.get("timings") or {}
    if timings.get("draft_n"):
        # llama.cpp sends no number of steps. The prompt's step writes the first token, and every
        # later step its accepted tokens and one more.
        accepted = timings.get("draft_n_accepted", 0)
        written = timings.get("predicted_n", reply.output_tokens or 0)
        return replace(
            reply,
            num_drafts=max(written - 1 - accepted, 1),
            num_draft_tokens=timings["draft_n"],
            num_accepted_tokens=accepted,
        )
    return reply

"""Calls and thoughts in texts: any pieces give the turn of the whole text, and grammars fit."""

from __future__ import annotations

import json
import random

import pytest

from recserve.service.text.tool_calls.call_format import Tool
from recserve.service.text.tool_calls.registry import call_formats, format_of
from recserve.service.text.tool_calls.turn import Thinking, TurnForm, TurnParser, thinking_of
from recserve.tokenizer.chat_template import ChatTemplate
from tests.support.chat_templates import AROUND_TURNS, PUBLISHED, TEMPLATES

STRING = {"type": "string"}
TOOLS = (
    Tool(
        "weather", {"type": "object", "properties": {"city": STRING, "days": {"type": "integer"}}}
    ),
    Tool("now", {"type": "object", "properties": {}}),
    Tool(
        "note",
        {
            "type": "object",
            "properties": {"text": STRING, "to": {"anyOf": [STRING, {"type": "null"}]}},
        },
    ),
)
CALLS = [
    ("weather", {"city": 'B"o\n\\nn }{ é 👩‍👩‍👧', "days": 3}),
    ("now", {}),
    ("note", {"text": "a</param <tool_cal {\n\nb", "to": None}),
    ("note", {"text": "", "to": "<|python_tag|>"}),
]  # fmt: skip


def written(kind: str, name: str, arguments: dict) -> str:
    """A call as a model of this kind writes it."""
    if kind == "qwen_coder":
        parts = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
            "</parameter>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"
    key = "parameters" if kind == "llama" else "arguments"
    body = json.dumps({"name": name, key: arguments}, ensure_ascii=False)
    return body if kind == "llama" else f"<tool_call>\n{body}\n</tool_call>"


def read(form: TurnForm, pieces: list[str]) -> tuple[str, str, list[tuple[str | None, str]]]:
    """Returns thoughts, content and calls of a turn that arrives in pieces."""
    parser, thoughts, content = TurnParser(form), "", ""
    calls: dict[int, list] = {}
    for delta in [*map(parser.push, pieces), parser.finish()]:
        thoughts, content = thoughts + delta.thoughts, content + delta.content
        assert len({call.index for call in delta.calls}) == len(delta.calls)
        for call in delta.calls:
            assert (call.name is not None) == (call.index not in calls), "a name comes once, first"
            calls.setdefault(call.index, [call.name, ""])[1] += call.arguments
    assert list(calls) == list(range(len(calls))) and parser.num_calls == len(calls)
    return thoughts, content, [(name, arguments) for name, arguments in calls.values()]


def split(text: str, draw: random.Random) -> list[str]:
    """Returns a text in pieces of up to `most` characters."""
    pieces, most = [], draw.choice([1, 2, 5, 30, 300])
    while text:
        size = draw.randint(1, most)
        pieces, text = [*pieces, text[:size]], text[size:]
    return pieces


def damaged(text: str, draw: random.Random) -> str:
    """Returns a text that was cut, or from which a part was left out or repeated."""
    start, end = sorted(draw.choices(range(len(text) + 1), k=2))
    end = min(end, start + 12)
    return draw.choice([text[:end], text[:start] + text[end:], text[:end] + text[start:], text])


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("kind", TEMPLATES)
def test_any_pieces_give_the_turn_of_the_whole_text(kind, seed):
    draw = random.Random(f"{kind} {seed}")
    form = TurnForm(draw.choice(list(Thinking)), call_formats()[kind], TOOLS)
    parts = [written(kind, *draw.choice(CALLS)) for _ in range(draw.randint(0, 3))]
    joint = "; " if kind == "llama" else draw.choice(["\n", "", "\n\nand\n"])
    text = draw.choice(["", "Let me see.\n", "\n", "<tool", "{"]) + joint.join(parts)
    text += draw.choice(["", "\n", " Done. ", "</tool_call>"])
    if form.thinking is not Thinking.NONE:
        open_tag = "<think>" if form.thinking is Thinking.MAY else ""
        text = (
            open_tag
            + draw.choice(["\nhm <tool_call> {\n", "", "a\n\nb</thin"])
            + "</think>\n\n"
            + text
        )
    if seed % 3:
        text = damaged(text, draw)
    whole = read(form, [text])
    for _ in range(6):
        assert read(form, split(text, draw)) == whole, text


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_what_models_write_is_read(kind, thinks):
    form = TurnForm(Thinking.MAY if thinks else Thinking.NONE, call_formats()[kind], TOOLS)
    before = "<think>\nhm\n\n<tool_call>\n</think>\n\n" if thinks else ""
    for name, arguments in CALLS:
        thoughts, content, calls = read(form, [before + written(kind, name, arguments)])
        assert (thoughts, content) == ("hm\n\n<tool_call>" if thinks else "", "")
        assert [(called, json.loads(text)) for called, text in calls] == [(name, arguments)]
    joint = "; " if kind == "llama" else "\n"
    text = before + joint.join(written(kind, *call) for call in CALLS)
    calls = [(name, json.loads(given)) for name, given in read(form, [text])[2]]
    assert calls == CALLS
    if kind != "llama":
        text = f"{before}Wait. \n{written(kind, *CALLS[1])}\n\nand {written(kind, *CALLS[0])}\n"
        assert read(form, [text])[1] == "Wait.\n\nand" and len(read(form, [text])[2]) == 2
    for plain in ("", "hello", " a <tool_ b ", "{", '{"a": 1} b', "x<", "<think"):
        assert read(form, [before + plain])[1:] == (plain.lstrip() if thinks else plain, [])
    cut = written(kind, *CALLS[0])
    cut = cut[: cut.index("days")]
    name, arguments = read(form, [cut])[2][0]
    assert name == "weather" and arguments.startswith('{"city": "B\\"o\\n')


@pytest.mark.parametrize("seed", range(40))
def test_json_that_calls_no_known_function_is_content(seed):
    """With the format `llama`: a turn is a call exactly if it begins as one of a known function."""
    draw = random.Random(seed)
    form = TurnForm(Thinking.NONE, call_formats()["llama"], TOOLS)
    name = draw.choice(["weather", "now", "Weather", "no", "nowhere", "we\\u0061ther"])
    key = draw.choice(["parameters", "arguments", "parameter"])
    value = draw.choice(["{}", '{"a": {"b": "}"}}', "[]", "7", '"{}"'])
    blank = [draw.choice(["", " ", "\n\t "]) for _ in range(8)]
    pairs = [f'"name"{blank[0]}:{blank[1]}"{name}"', f'"{key}"{blank[2]}:{blank[3]}{value}']
    if draw.random() < 0.2:
        pairs.reverse()
    before = draw.choice(["", " ", "<|python_tag|>", "<|python _tag|>", "a ", "["])
    text = f"{before}{blank[4]}{{{blank[5]}{pairs[0]}{blank[6]},{blank[7]}{pairs[1]}}}"
    is_call = (
        before in ("", " ", "<|python_tag|>")
        and (name in ("weather", "now") and key != "parameter" and value[0] == "{")
        and pairs[0].startswith('"name"')
    )
    wanted = ("", "", [(name, value)]) if is_call else ("", text, [])
    for pieces in ([text], list(text), split(text, draw)):
        assert read(form, pieces) == wanted
    if not is_call:  # content is passed on as soon as it is sure
        parser = TurnParser(form)
        known = '{"a": {"name": "weather"'
        assert parser.push(known).content == known


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", PUBLISHED)
def test_calls_come_back_from_published_templates(kind, seed):
    """What the model wrote, a client sent back and the template wrote again are the same calls."""
    draw = random.Random(f"{kind} {seed}")
    source = PUBLISHED[kind]
    found = format_of(source)
    assert found is not None and found.name == kind
    calls = [draw.choice(CALLS) for _ in range(1 if kind == "llama" else draw.randint(1, 3))]
    content = "" if kind == "llama" else draw.choice(["", "Let me see.", "<tool> {"])
    joint = "\n" if content else ""
    text = content + joint + "\n".join(written(kind, *call) for call in calls)
    form = TurnForm(Thinking.NONE, found, TOOLS)
    thoughts, plain, parsed = read(form, split(text, draw))
    assert (thoughts, plain) == ("", content)
    assert [(name, json.loads(given)) for name, given in parsed] == calls
    sent = [{"function": {"name": n, "arguments": json.loads(given)}} for n, given in parsed]
    turns = [
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": plain, "tool_calls": sent},
        *({"role": "tool", "content": f"result {n}", "name": n} for n, _ in parsed),
        {"role": "user", "content": "And now?"},
    ]
    tools = [{"function": {"name": t.name, "parameters": dict(t.parameters)}} for t in TOOLS]
    prompt = ChatTemplate(source, {}).render(turns, None, True, None, tools)
    begin, end = AROUND_TURNS[kind]
    again = prompt.split(begin)[1].partition(end)[0]
    assert read(form, split(again, draw)) == read(form, [text])
    assert prompt.endswith(begin) and all(f"result {name}" in prompt for name, _ in parsed)
    if kind != "llama":
        assert prompt.count("<|im_start|>user") == 3, "neighbouring results are one turn"


def test_a_text_between_the_tags_that_is_no_call_stays_content():
    form = TurnForm(Thinking.NONE, call_formats()["hermes"], TOOLS)
    for text in ("<tool_call>\nnothing\n</tool_call>", '<tool_call>{"name": 1}</tool_call> b'):
        assert read(form, [text]) == ("", text, [])
    late = '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>'
    assert read(form, [late]) == ("", "", [("f", '{"a": [1]}')])
    unended = '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g"}</tool_call>'
    assert read(form, [unended])[2] == [("f", "{}"), ("g", "{}")]


def test_the_format_is_that_of_the_template():
    for name, template in TEMPLATES.items():
        found = format_of(template)
        assert found is not None and found.name == name
    assert format_of("{{ messages }}<tool_call>") is None
    others = (
        "{{ tools }}<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>",
        "{{ tools }} Respond with the parameters as [f(a=1)]. ipython",
        '{{ tools }}<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>',
    )
    assert [format_of(template) for template in others] == [None] * 3


def test_thoughts_begin_where_the_prompt_says():
    template = "<think></think>"
    assert thinking_of("", "a<think>") is Thinking.NONE
    assert thinking_of(template, "a<think>\n") is Thinking.OPEN
    assert thinking_of(template, "<think>a</think>b assistant:") is Thinking.MAY
    assert thinking_of(template, "a<think>\n\n</think>\n\n") is Thinking.NONE
    assert thinking_of(template, "user: <think> a", "<think> a") is Thinking.OPEN
    assert thinking_of(template, "a", "a") is Thinking.NONE

"""What a request says about its text becomes a constraint: what it lets through, and refusals."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import AddedToken

from recserve.core.constraint import Matcher, has_token, num_words
from recserve.schemas.items import InvalidRequest
from recserve.schemas.text import ChatRequest, CompletionRequest
from recserve.schemas.validation import to_message
from recserve.service.text.model import TextModel
from recserve.service.text.prompts import TextPlan, plan_chat, plan_completion
from recserve.service.text.tool_calls.turn import TurnParser
from recserve.tokenizer.chat_template import ChatTemplate
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.chat_templates import TEMPLATES, THINKS
from tests.support.constrained_texts import compiled
from tests.support.scripted_text import END, scripted

pytest.importorskip("llguidance")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

THOUGHTS = "<think>\nhm <tool_call> {\n</think>\n\n"
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Ulm"]}, "days": DIGIT, "warm": {"type": "boolean"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMA = {
    "type": "object",
    "properties": {"a": DIGIT, "b": {"type": "array", "items": DIGIT, "maxItems": 2}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
OBJECT = {"response_format": {"type": "json_object"}}
WANTED = {
    "schema": (
        {"response_format": FORMAT},
        ['{"a":1}', '{"a":1,"b":[1,2]}'],
        ["", "a", '{"a": 1}', '{"b":[]}'],
    ),
    "object": (OBJECT, ["{}", '{"é":[1,"x"]}'], ["[]", "{} "]),
    "guided schema": ({"guided_json": json.dumps(SCHEMA)}, ['{"a":1}'], ["{}"]),
    "any JSON": ({"structured_outputs": {"json": {}}}, ["1", "[]", "{}"], ["a", ""]),
    "blanks": (
        {"structured_outputs": {"json": SCHEMA, "blanks": 2}},
        ['{"a":1}', '{ "a" :\n 1}'],
        ['{   "a":1}'],
    ),
    "regex": ({"guided_regex": r"[ab]{2}/\d"}, ["ab/3"], ["ab3", "ab/33"]),
    "choice": ({"structured_outputs": {"choice": ["yes", 'n"o/']}}, ["yes", 'n"o/'], ["y", "yess"]),
    "schema in a grammar": (
        {"guided_grammar": 'start: "%json " %json {"type": "number"}'},
        ["%json 1.5"],
        ["%json 1e400", "%json  1"],
    ),
    "grammar": (
        {"guided_grammar": 'start: other "start"\nother: /start|x/ // start\n'},
        ["xstart", "startstart"],
        ["x", "answer"],
    ),
}  # fmt: skip


def model_of(folder, template: str, thinks: bool) -> TextModel:
    model = scripted(folder, lambda prompt, seed: "x").text.model
    source = template + (THINKS if thinks else "")
    tokenizer = replace(model.tokenizer, template=ChatTemplate(source, {}))
    return replace(model, tokenizer=tokenizer, context=9000)


def planned(model: TextModel, **fields) -> TextPlan:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, **fields}
    return compiled(lambda: plan_chat(to_message(body, ChatRequest), model))


def allows(model: TextModel, plan: TextPlan, text: str) -> bool:
    """Whether a text can be written and end."""
    assert plan.constraint is not None
    matcher, row = plan.constraint.start(), np.zeros(num_words(model.vocab_size), np.int32)
    for token in [*model.tokenizer.encode(text, special=False), END]:
        matcher.fill(row)
        if not has_token(row, token):
            return False
        if token != END:
            matcher.advance(token)
    return True


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("name", WANTED)
def test_what_a_field_lets_through(tmp_path, name, thinks):
    fields, fits, others = WANTED[name]
    model = model_of(tmp_path, TEMPLATES["hermes"], thinks)
    plan = planned(model, **fields)
    for before in ("", THOUGHTS) if thinks else ("",):
        assert [text for text in fits if not allows(model, plan, before + text)] == []
        assert [text for text in others if allows(model, plan, before + text)] == []
    body = to_message({"prompt": "a", **fields}, CompletionRequest)
    plan = compiled(lambda: plan_completion(body, model))
    assert [allows(model, plan, text) for text in (*fits, *others)] == [
        *[True] * len(fits),
        *[False] * len(others),
    ]


def draw_text(model: TextModel, matcher: Matcher, draw: random.Random) -> str | None:
    """Returns a text that the masks lead to; None if it does not end."""
    row, tokens = np.zeros(num_words(model.vocab_size), np.int32), []
    for _ in range(400):
        matcher.fill(row)
        allowed = [token for token in range(END + 1) if has_token(row, token)]
        token = END if END in allowed and draw.random() < 0.5 else draw.choice(allowed)
        if token == END:
            return model.tokenizer.decode(tokens)
        matcher.advance(token)
        tokens.append(token)
    return None


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("choice", ["required", "weather", "auto", "one"])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_every_call_fits_its_schema(tmp_path, kind, choice, thinks):
    """Random walks over the masks: from the beginning of a call on, it is one, and it is valid."""
    draw, model = random.Random(f"{kind} {choice}"), model_of(tmp_path, TEMPLATES[kind], thinks)
    fields = {"tool_choice": {"auto": "auto", "one": "required"}.get(choice, choice)}
    if choice == "weather":
        fields = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    plan = planned(model, tools=TOOLS, **fields, parallel_tool_calls=choice != "one")
    assert plan.constraint is not None and plan.form is not None
    validator = jsonschema_rs.validator_for(WEATHER)
    ended = 0
    for number in range(8):
        matcher = plan.constraint.start()
        begun = THOUGHTS if thinks and number % 2 else ""
        if choice == "auto":
            begun += '{"name": "weather", "parameters": {' if kind == "llama" else "a <tool_call>"
        elif kind == "llama":
            begun += "{"
        else:
            begun += "<tool_call>"
        for token in model.tokenizer.encode(begun, special=False):
            matcher.advance(token)
        text = draw_text(model, matcher, draw)
        if text is None:
            continue
        ended += 1
        parser = TurnParser(plan.form)
        turn, rest = parser.push(begun + text), parser.finish()
        calls = turn.calls
        assert calls and not rest.calls
        assert choice != "required" or not turn.content + rest.content
        assert choice not in ("weather", "one") or len(calls) == 1
        for call in calls:
            assert call.name in ("weather",) if choice == "weather" else ("weather", "now")
            arguments = json.loads(call.arguments)
            assert validator.is_valid(arguments) if call.name == "weather" else arguments == {}
    assert ended >= 4


FORMATS = {
    "date": ({"type": "string", "format": "date"}, "2024-02-29", ("2023-02-29", "2024-13-01")),
    "space": ({"type": "string", "pattern": r"^a\sb$"}, "a b", ("a\x85b",)),
    "host": ({"type": "string", "format": "hostname"}, "a-b.c", ("-a", "a..b")),
    "time": ({"type": "string", "format": "time"}, "10:00:00Z", ("25:00:00Z", "10:00")),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_held_in_calls_and_behind_thoughts(tmp_path, name):
    """Everywhere as in a plain schema."""
    value, valid, invalid = FORMATS[name]
    schema = {"properties": {"a": value}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "object", **schema}}}
    for kind in ("hermes", "llama"):
        model = model_of(tmp_path, TEMPLATES[kind], True)
        answer = planned(model, response_format=wanted)
        calls = planned(model, tools=[a_tool(schema)], tool_choice="required")
        for text, fits in ((valid, True), *((one, False) for one in invalid)):
            text = json.dumps(text, ensure_ascii=False)
            for before in ("", THOUGHTS):
                assert allows(model, answer, f'{before}{{"a":{text}}}') == fits
                call = f'{{"name": "f", "parameters": {{"a": {text}}}}}'
                if kind == "hermes":
                    inner = call.replace("parameters", "arguments")
                    call = f"<tool_call>\n{inner}\n</tool_call>"
                assert allows(model, calls, before + call) == fits, (call, fits)


# Content of a model that calls by JSON objects.
ANSWERS_OF_LLAMA = [
    '{"a": 1}',
    '{"name": "Ulm", "parameters": {}}',
    '{"name": "weather"}',
    '{"name": "weather", "parameters": 5}',
    '{"parameters": {}, "name": "weather"}',
    '{"name": "weathe\\u0072", "parameters": {}}',
    '[{"name": "weather", "parameters": {}}]',
    '{"name": "weather", "parameters": ',
    '{"name": "weather", "x": {}, "parameters": {}}',
]


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_text_is_free_until_a_call_begins(tmp_path, kind, thinks):
    model = model_of(tmp_path, TEMPLATES[kind], thinks)
    plan = planned(model, tools=TOOLS)
    begin = '{"name": "now", "parameters": {' if kind == "llama" else "<tool_call>\n"
    for before in ("", THOUGHTS) if thinks else ("",):
        for text in ("", "hello { there", "a <tool_", "é\n\n</tool_call>"):
            assert allows(model, plan, before + text), text
        assert not allows(model, plan, before + begin + "x")
        if kind == "llama":
            for text in ANSWERS_OF_LLAMA:
                assert allows(model, plan, before + text), text
            spaced = ' \n{ "name":\t"weather" , "arguments" : {'
            for text in (spaced, begin + '"a": 1}}', f"<|python_tag|> {begin}x", begin):
                assert not allows(model, plan, before + text), text
    if kind != "llama":
        both = planned(model, tools=TOOLS, response_format={"type": "json_object"})
        assert allows(model, both, "{}") and not allows(model, both, "hello")
        assert not allows(model, both, "<tool_call>\nx")


def test_tools_of_a_choice_of_none_are_free_text(tmp_path):
    model = model_of(tmp_path, TEMPLATES["hermes"], False)
    plan = planned(model, tools=TOOLS, tool_choice="none")
    assert plan.constraint is None and plan.form is None
    assert "weather" not in plan.prompts[0].text
    assert "weather" in planned(model, tools=TOOLS).prompts[0].text


def test_special_tokens_of_calls_and_thoughts_are_seen(tmp_path):
    """Tags that are special tokens: the grammar names the tokens, and the text shows them."""
    model = model_of(tmp_path, TEMPLATES["hermes"], True)
    tokenizer = model.tokenizer.tokenizer
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in tags])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = replace(TextTokenizer.open(tmp_path), template=model.tokenizer.template)
    model = replace(model, tokenizer=opened, vocab_size=262)
    plan = planned(model, tools=TOOLS, tool_choice="required")
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for text in (call, f"<think>a</think>\n\n{call}"):
        assert allows(model, plan, text)
    assert not allows(model, plan, "<think>a")
    assert plan.form is not None
    shown = opened.spelling_with(plan.form.tags).texts
    assert [shown[258 + place] for place in range(4)] == [tag.encode() for tag in tags]
    assert opened.spelling.texts[258] == b""


def a_tool(parameters: dict) -> dict:
    return {"function": {"name": "f", "parameters": parameters}}


REFUSED = {
    "twice": ({"tools": [*TOOLS, TOOLS[1]]}, "tools[2].function.name"),
    "no tools": ({"tool_choice": "required"}, "tool_choice"),
    "unknown": (
        {"tools": TOOLS, "tool_choice": {"function": {"name": "q"}}},
        "tool_choice.function.name",
    ),
    "guided tools": ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex"),
    "two": ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    "format and schema": ({**OBJECT, "guided_json": {}}, "response_format"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "format": ({"guided_json": {"type": "string", "format": "zz"}}, "guided_json.format"),
    "no Lark": ({"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
    "no regex": ({"guided_regex": "("}, "guided_regex"),
    "no JSON": ({"guided_json": "{"}, "guided_json"),
    "blanks": (
        {"structured_outputs": {"blanks": 1}, "guided_regex": "a"},
        "structured_outputs.blanks",
    ),
    "schema in Lark": (
        {"guided_grammar": 'start: "a%json {" /%json {/ %json {"minProperties": 2} // %json {'},
        "guided_grammar.minProperties",
    ),
    "number in Lark": (
        {"structured_outputs": {"grammar": 'start: "x" | %json\n{"items": {"const": -1e400}}'}},
        "structured_outputs.grammar.items.const",
    ),
    "end": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    "token": ({"allowed_token_ids": [1, 999]}, "allowed_token_ids[1]"),
    "tool": (
        {"tools": [a_tool({"properties": {"a": {"uniqueItems": True}}})]},
        "tools[0].function.parameters.properties.a.uniqueItems",
    ),
    "keys": (
        {"tools": [TOOLS[0], a_tool({"properties": {"a": {"minProperties": 2}}})]},
        "tools[1].function.parameters.properties.a.minProperties",
    ),
    "type": ({"tools": [a_tool({"type": "array"})]}, "tools[0].function.parameters.type"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_field(tmp_path, name):
    fields, param = REFUSED[name]
    with pytest.raises(InvalidRequest) as caught:
        planned(model_of(tmp_path, TEMPLATES["hermes"], False), **fields)
    assert caught.value.param == param


def test_what_a_template_cannot_do_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="no calls of tools that the server knows"):
        planned(model_of(tmp_path, "{{ messages | length }}", False), tools=TOOLS)
    with pytest.raises(InvalidRequest, match="whose calls are JSON objects too"):
        llama = model_of(tmp_path, TEMPLATES["llama"], False)
        planned(llama, tools=TOOLS, response_format={"type": "json_object"})
    coder = model_of(tmp_path, TEMPLATES["qwen_coder"], False)
    itself = {"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}
    with pytest.raises(InvalidRequest, match="a reference to") as caught:
        planned(coder, tools=[a_tool(itself)])
    assert caught.value.param == "tools[0].function.parameters.properties.a.items.$ref"
    patterned = {"properties": {"a": {"type": "string", "pattern": "x"}}}
    with pytest.raises(InvalidRequest, match="writes texts as they are") as caught:
        planned(coder, tools=[a_tool(patterned)])
    assert caught.value.param == "tools[0].function.parameters.properties.a.pattern"

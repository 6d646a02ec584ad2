"""Constraints for the drawn models: a tokeniser of 40 tokens that can write JSON, and grammars."""

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from recserve.core.constraint import Choices, Grammar, has_token, num_words
from recserve.kernels.acceptance.noise import gumbel
from recserve.service.errors import Uncompiled
from recserve.service.text.constraints.compiler import ConstraintCompiler
from recserve.service.text.prompts import TextPlan
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.text_plain import VOCABULARY, last_logits, processed

LETTERS = '{}[]":,-.0123456789abcdefilnorstux'
MERGES = [('"', ":"), ("{", '"'), ("a", "b"), ("1", "2")]
BEGIN, END = VOCABULARY - 2, VOCABULARY - 1


def json_tokenizer(folder: Path) -> Path:
    """Writes a tokeniser with VOCABULARY tokens to a folder, and returns the folder."""
    tokens = [*LETTERS, *(a + b for a, b in MERGES)]
    assert len(tokens) == BEGIN, len(tokens)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


@cache
def tokenizer() -> TextTokenizer:
    """Returns the tokeniser of the drawn models."""
    with tempfile.TemporaryDirectory() as folder:
        return TextTokenizer.open(json_tokenizer(Path(folder)))


@cache
def compiler() -> ConstraintCompiler:
    """Returns the compiler for the tokeniser."""
    return ConstraintCompiler(tokenizer(), VOCABULARY, (END,))


def schema(**fields) -> Grammar:
    """Returns a request for JSON of a schema."""
    return Grammar("json_schema", json.dumps(fields))


def an_object(**properties) -> Grammar:
    """Returns a request for an object with all of these properties, and no others."""
    return schema(
        type="object",
        properties=properties,
        required=list(properties),
        additionalProperties=False,
    )


WORD = {"type": "string", "maxLength": 4}
SCHEMAS = {
    "object": an_object(a={"type": "integer"}, bc={"enum": ["ab", "cd", "e"]}),
    "array": schema(type="array", items={"enum": [1, 12, "ab"]}, minItems=1, maxItems=3),
    "enum": schema(enum=["abab", "abcd", "true", 12, None]),
    "any_of": schema(anyOf=[{"type": "boolean"}, {"const": "best"}, {"type": "null"}]),
    "refs": schema(
        **{
            "$ref": "#/$defs/list",
            "$defs": {
                "list": {
                    "type": "object",
                    "properties": {"n": {"enum": [1, 2]}, "next": {"$ref": "#/$defs/end"}},
                    "required": ["n", "next"],
                    "additionalProperties": False,
                },
                "end": {"type": "null"},
            },
        }
    ),
    "date": an_object(d={"type": "string", "format": "date"}),
    "bounds": an_object(x={"type": "integer", "minimum": -12, "maximum": 120}),
    "words": an_object(s=WORD, t=WORD),
    "long_keys": an_object(abcdefil={"type": "boolean"}, list12={"enum": ["ab"]}),
    "optional": schema(
        type="object",
        properties={"a": {"type": "boolean"}, "b": {"enum": [1, 2]}},
        additionalProperties=False,
    ),
}
OTHERS = {
    "regex": Grammar("regex", "(ab|cd){1,3}-[0-9]{2}"),
    "open_regex": Grammar("regex", "[a-e]+(12)?"),
    "lark": Grammar("lark", 'start: "{" pair ("," pair)~0..1 "}"\npair: /[ab]{1,2}/ ":" /[0-9]/'),
    "tool": Grammar(
        "lark",
        'start: "a" call | "b" /[cd]{1,3}/\ncall: "t" %json {"type": "object", "properties": '
        '{"id": {"enum": [1, 2]}}, "required": ["id"], "additionalProperties": false, '
        '"x-guidance": {"whitespace_flexible": false}}',
    ),
    "choices": Choices(("ab", "abab", "abcd", "true", "false", "ab12")),
}
GRAMMARS = SCHEMAS | OTHERS


def read(tokens) -> str:
    """Returns the text of tokens."""
    return tokenizer().decode(list(tokens))


def masks(constraint, tokens) -> np.ndarray:
    """Returns [V] bool, the tokens that may follow some tokens, by a new matcher."""
    matcher, row = constraint.start(), np.zeros(num_words(VOCABULARY), np.int32)
    for token in tokens:
        matcher.advance(token)
    matcher.fill(row)
    return np.array([has_token(row, token) for token in range(VOCABULARY)])


@torch.inference_mode()
def plain_constrained(model, query: TextQuery) -> list[int]:
    """Returns the tokens of plain decoding under a constraint: no engine, no cache, no draft."""
    params, prompt = query.params, query.prompt.tolist()
    tokens, limit = list(prompt), model.config.decoder.max_positions
    while len(tokens) - len(prompt) < params.max_tokens and len(tokens) < limit:
        output = tokens[len(prompt) :]
        raw = last_logits(model, tokens)
        raw[~torch.from_numpy(masks(query.constraint, output))] = -torch.inf
        row = torch.tensor(processed(raw, tokens, len(prompt), params))
        if params.temperature:
            row = (
                row + gumbel(torch.tensor([params.seed]), torch.tensor([len(tokens)]), len(row))[0]
            )
        token = int(row.argmax())
        if token in params.stop_token_ids:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def drawn_schema(random: np.random.Generator, depth: int = 0) -> dict:
    """Returns a schema whose texts are short, with whatever schemas have inside each other."""
    simple = ("boolean", "null", "integer", "bounded", "enum", "const", "word", "pattern", "date")
    nested = (
        () if depth > 1 else ("object", "object", "array", "tuple", "any_of", "ref", "optional")
    )
    kind = str(random.choice([*simple, *nested] if depth else nested or simple))
    names = [str(n) for n in random.choice(["a", "bc", "id", "list", "text", "x12"], 3, False)]

    def inner() -> dict:
        return drawn_schema(random, depth + 1)

    least = int(random.integers(-20, 100))
    made = {
        "bounded": {"type": "integer", "minimum": least, "maximum": least + 30},
        "enum": {"enum": [names[0], 12, None, True, names[:2]]},
        "const": {"const": {names[0]: [1, names[1]]}},
        "word": {"type": "string", "minLength": 1, "maxLength": 3},
        "pattern": {"type": "string", "pattern": "^(ab|[cd]{1,2})[0-9]?$"},
        "date": {"type": "string", "format": str(random.choice(["date", "time", "ipv4"]))},
    }
    if kind in made or kind in simple:
        return made.get(kind, {"type": kind, "maximum": 99, "minimum": 0})
    if kind in ("object", "optional"):
        properties = {name: inner() for name in names[: random.integers(1, 4)]}
        required = list(properties) if kind == "object" else [names[0]]
        fields = {"type": "object", "properties": properties, "required": required}
        return fields | {"additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": inner(), "maxItems": int(random.integers(1, 4))}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": 2}
    if kind == "any_of":
        return {"anyOf": [inner(), inner(), {"type": "null"}]}
    if depth:  # references are resolved from the whole schema
        return inner()
    return {"$ref": "#/$defs/own", "$defs": {"own": inner()}}


def drawn_query(
    random: np.random.Generator, wanted: str | Grammar, speculation: Speculation
) -> TextQuery:
    """Returns a request with drawn parameters under a grammar, or the one of a name."""

    def one_of(usual, *others, share=0.3):
        return others[random.integers(len(others))] if random.random() < share else usual

    params = SamplingParams(
        temperature=float(random.choice([0.0, 0.7, 1.3])),
        top_k=one_of(0, 1, 5),
        top_p=one_of(1.0, 0.8),
        min_p=one_of(0.0, 0.1),
        repetition_penalty=one_of(1.0, 1.3),
        presence_penalty=one_of(0.0, 1.0),
        frequency_penalty=one_of(0.0, -0.5, 0.5),
        logit_bias=one_of({}, {int(random.integers(VOCABULARY)): 2.0, 5: -100.0}),
        bad_words=one_of((), ((20, 21), (3, 3, 3))),
        seed=int(random.integers(2**40)),
        max_tokens=int(one_of(40, 3, 12)),
        min_tokens=one_of(0, 2, share=0.2),
        stop_token_ids=(END, *one_of((), (9,), share=0.1)),
        logprobs=one_of(None, 2),
    )
    prompt = random.integers(0, VOCABULARY, random.integers(1, 12))
    grammar = GRAMMARS[wanted] if isinstance(wanted, str) else wanted
    constraint = compiler().compile("grammar", grammar)
    return TextQuery(prompt, params, speculation, constraint=constraint)


def compiled(plan: Callable[[], TextPlan]) -> TextPlan:
    """Returns the plan of a request, and compiles what it waits for."""
    while True:
        try:
            return plan()
        except Uncompiled as needed:
            needed.compile()

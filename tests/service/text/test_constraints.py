"""Constraints of requests: what is refused, with which path, and the tokens of choices."""

import json
import random
import re
import sys
from decimal import Decimal

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from recserve.core.constraint import Choices, Grammar, has_token, num_words
from recserve.schemas.items import InvalidRequest, UnsupportedField
from recserve.service.text.constraints.compiler import ConstraintCompiler
from recserve.service.text.constraints.json_schema import UnfitSchema, read_schema
from recserve.service.text.model import TextModel
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.hostile_grammars import HOSTILE, hostile
from tests.support.scripted_text import END, VOCABULARY, byte_tokenizer
from tests.support.tokenizer_folders import FAMILIES

OPEN = {"type": "object", "minProperties": 2}
# What a schema has at some place, and the end of the path that the refusal names.
REFUSED = [
    (OPEN, ".minProperties"),
    (OPEN | {"additionalProperties": {"type": "integer"}, "required": ["a"]}, ".minProperties"),
    ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
    ({"not": {"type": "string"}}, ".not"),
    ({"type": "string", "format": "regex"}, ".format"),
    ({"const": "a\x00b"}, ".const"),
    ({"enum": [{"k\x1f": 1}]}, ".enum"),
    ({"type": "object", "properties": {"\x01": {}}}, ".properties"),
]
PLACES = {
    "": lambda own: own,
    ".properties.k": lambda own: {"type": "object", "properties": {"k": own}},
    ".items": lambda own: {"type": "array", "items": own},
    ".anyOf[1]": lambda own: {"anyOf": [{"type": "null"}, own]},
    ".$defs.d": lambda own: {"$ref": "#/$defs/d", "$defs": {"d": own}},
    ".x-own.d": lambda own: {"$ref": "#/x-own/d", "x-own": {"d": own}},
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    tokenizer = TextTokenizer.open(byte_tokenizer(tmp_path_factory.mktemp("bytes")))
    return ConstraintCompiler(tokenizer, VOCABULARY, (END,))


def is_text(compiler, constraint, text: str) -> bool:
    """Returns whether the masks of a constraint let a whole text pass."""
    row, matcher = np.zeros(num_words(VOCABULARY), np.int32), constraint.start()
    for token in (*compiler.tokenizer.encode_literal(text), END):
        matcher.fill(row)
        if not has_token(row, token):
            return False
        if token != END:
            matcher.advance(token)
    return True


@pytest.mark.parametrize("place", PLACES)
def test_a_schema_that_is_not_enforced_is_refused_with_its_path(place, compiler):
    for own, path in REFUSED:
        schema = PLACES[place](own)
        with pytest.raises(InvalidRequest) as caught:
            compiler.compile("response_format", Grammar("json_schema", json.dumps(schema)))
        assert caught.value.param == f"response_format{place}{path}"
        assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
    for own, path in REFUSED[:1]:
        with pytest.raises(UnfitSchema) as told:
            read_schema(json.dumps(PLACES[place](own)))
        assert told.value.path == f"{place}{path}"


@pytest.mark.parametrize(
    "kind,text",
    [
        ("json_schema", "{"),
        ("json_schema", "[" * 100_000),
        ("json_schema", '{"allOf":[' * 500 + "{}" + "]}" * 500),
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", '{"$ref": "https://example.com/schema"}'),
        ("json_schema", '{"type": "string", "pattern": "a(?=b)"}'),
        ("json_schema", '{"type": "integer", "minimum": 2, "maximum": 1}'),
        ("json_schema", '{"x-guidance": {"lenient": true}}'),
        ("json_schema", "7"),
        ("regex", "("),
        ("regex", "(((((((a{10}){10}){10}){10}){10}){10}){10}){10}"),
        ("regex", "(?:a?){5000}a{5000}"),
        ("lark", "start: missing"),
        ("lark", 'start: "a" b\nb[max_tokens=3]: /x+/'),
    ],
)
def test_a_grammar_of_no_use_is_refused(kind, text, compiler):
    for _ in range(2):  # the second refusal is cached
        with pytest.raises(InvalidRequest, match=r"^guided\S*: ."):
            compiler.compile("guided", Grammar(kind, text))


HUGE = ["1e400", "-1e400", "1E+999", "1" + "0" * 400, "-" + "9" * 5000]
NUMBERS = {
    "minimum": '{{"minimum": {}}}',
    "exclusiveMaximum": '{{"type": "number", "exclusiveMaximum": {}}}',
    "multipleOf": '{{"type": "number", "multipleOf": {}}}',
    "maxLength": '{{"type": "string", "maxLength": {}}}',
    "const": '{{"const": {}}}',
    "const.a[0]": '{{"const": {{"a": [{}]}}}}',
    "enum[1]": '{{"enum": ["x", {}]}}',
    "default": '{{"default": {}}}',
}


@pytest.mark.parametrize("place", PLACES)
def test_numbers_that_no_double_has_are_refused(place, compiler):
    draw = random.Random(place)
    for path, text in NUMBERS.items():
        own = text.format(number := draw.choice(HUGE))
        schema = json.dumps(PLACES[place]("OWN")).replace('"OWN"', own)
        with pytest.raises(InvalidRequest, match="no double has") as caught:
            compiler.compile("f", Grammar("json_schema", schema))
        assert caught.value.param == f"f{place}.{path}", number
    for value in (2**53 + 1, -(2**63), [{"a": 10**20}]):
        for own in ({"const": value}, {"enum": [1, value]}):
            with pytest.raises(InvalidRequest, match="texts have integers up to") as caught:
                compiler.compile("f", Grammar("json_schema", json.dumps(PLACES[place](own))))
            assert caught.value.param == f"f{place}.{next(iter(own))}"


UNBOUND = [
    {},
    {"type": "number"},
    {"type": "integer"},
    {"type": ["string", "number"]},
    {"type": "number", "minimum": 0},
    {"type": "integer", "exclusiveMinimum": -5},
    {"minLength": 2},
    {"exclusiveMinimum": -1},
    {"type": "number", "maximum": 2**63},
    {"description": "any"},
    {"anyOf": [{"type": "null"}, {"type": "number"}]},
    {"not_a_keyword": 1},
    True,
]
AROUND = {
    "the root": (lambda own: own, "{}"),
    "a list": (lambda own: {"type": "array", "items": own}, "[{}]"),
    "any list": (lambda own: {"type": "array"}, "[{}]"),
    "a property": (lambda own: {"type": "object", "properties": {"k": own}}, '{{"k":{}}}'),
    "another key": (lambda own: {"type": "object"}, '{{"z":[{}]}}'),
    "other keys": (lambda own: {"type": "object", "additionalProperties": own}, '{{"z":{}}}'),
    "a choice": (lambda own: {"anyOf": [{"type": "string"}, own]}, "{}"),
    "one of all": (lambda own: {"allOf": [own if own else {"type": "number"}]}, "{}"),
    "a definition": (lambda own: {"$ref": "#/$defs/d", "$defs": {"d": own}}, "{}"),
}


@pytest.mark.parametrize("name", AROUND)
def test_texts_have_no_number_that_no_double_has(name, compiler):
    around, text = AROUND[name]
    for own in UNBOUND:
        if name in ("the root", "one of all") and own is True:
            continue
        schema = around(own)
        constraint = compiler.compile("f", Grammar("json_schema", json.dumps(schema)))
        assert is_text(compiler, constraint, text.format(7)), schema
        if name == "one of all" and "type" not in own and "anyOf" not in own:
            continue  # what several schemas say of one value is merged as it stands
        for number in HUGE:
            assert not is_text(compiler, constraint, text.format(number)), (schema, number)


@pytest.mark.parametrize("bound", [0, 3, 0.3, -0.1, 2.5e10, -7.25])
def test_a_number_is_not_rounded_to_a_bound_that_it_must_not_have(bound, compiler):
    for name, sign in (("exclusiveMaximum", -1), ("exclusiveMinimum", 1)):
        schema = Grammar("json_schema", json.dumps({"type": "number", name: bound}))
        constraint = compiler.compile("f", schema)
        exact = Decimal(repr(float(bound)))
        near = f"{exact + sign * Decimal('1e-400'):f}"
        assert float(near) == bound and not is_text(compiler, constraint, near)
        assert is_text(compiler, constraint, f"{exact + sign * Decimal('0.05'):f}")


@pytest.mark.parametrize("seed", range(12))
def test_references_that_only_point_at_each_other_are_refused(seed, compiler):
    """A cycle of a drawn length; with a value in between, it is fine."""
    draw = random.Random(seed)
    where = draw.choice(["$defs", "definitions", "x-own"])
    length, known = draw.randint(1, 6), draw.choice([40, 3])
    steps = {
        "$ref": lambda ref: ref,
        "allOf": lambda ref: {"allOf": [ref, {"type": "object"}][:: draw.choice([1, -1])]},
        "anyOf": lambda ref: {"anyOf": [{"type": "null"}, ref]},
        "oneOf": lambda ref: {"oneOf": [ref]},
        "nested": lambda ref: {"anyOf": [{"allOf": [ref]}, {"type": "null"}]},
    }
    names = [draw.choice(list(steps)) for _ in range(length)]
    schemas = {
        f"d{n}": steps[name]({"$ref": f"#/{where}/d{(n + 1) % length}"})
        for n, name in enumerate(names)
    }
    schemas |= {f"d{n}": {"type": "null"} for n in range(length, known)}
    target = {"$ref": f"#/{where}/d{draw.randrange(length)}"}
    root = draw.choice([target, {"type": "array", "items": target}, {"properties": {"k": target}}])
    schema = {**root, where: schemas}
    with pytest.raises(UnfitSchema, match="a cycle of schemas") as caught:
        read_schema(json.dumps(schema))
    found = schema
    for name in re.findall(r"[^.\[\]]+", caught.value.path):
        found = found[int(name) if name.isdigit() else name]
    assert found is not None and caught.value.path
    schemas[f"d{draw.randrange(length)}"] = {"type": "array", "items": {"$ref": f"#/{where}/d0"}}
    read_schema(json.dumps(schema))


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_grammar_that_takes_too_much_is_refused(kind, compiler):
    """The process survives, what others ask for is compiled, and the refusal is remembered."""
    ((field, given),) = hostile(kind, np.random.default_rng(len(kind))).items()
    kinds = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "lark"}
    wanted = Choices(tuple(given)) if field == "guided_choice" else Grammar(kinds[field], given)
    told = None
    try:
        compiler.compile("guided", wanted)
    except InvalidRequest as error:
        told = str(error)
    assert is_text(compiler, compiler.compile("f", Grammar("regex", f"{kind}|a")), kind)
    if told is None:
        assert kind not in ("deep rules", "nested repeats", "many patterns", "multiples")
        return
    assert len(told) < 500
    with pytest.raises(InvalidRequest) as again:
        compiler.compile("guided", wanted, cached=True)
    assert str(again.value) == told


def test_requests_are_bounded():
    for make in (
        lambda: Grammar("json_schema", " " * (1 << 20) + "{}"),
        lambda: Grammar("yaml", "a"),
        lambda: Grammar("regex", "a", blanks=1000),
        lambda: Choices(()),
        lambda: Choices(("a", "")),
        lambda: Choices(("a", "b" * (1 << 20) + "c")),
        lambda: Choices(tuple(map(str, range(100_001)))),
    ):
        with pytest.raises(ValueError):
            make()


def test_blanks_are_bounded_and_off_by_default(compiler):
    schema = '{"type": "array", "items": {"type": "integer"}}'
    for blanks, text, fits in [
        (0, "[1,2]", True),
        (0, "[1, 2]", False),
        (2, "[1,  2]", True),
        (2, "[1,   2]", False),
    ]:
        constraint = compiler.compile("f", Grammar("json_schema", schema, blanks))
        assert is_text(compiler, constraint, text) == fits


@pytest.mark.parametrize(
    "name,fits,others",
    [
        ("date", ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2023-04-31"]),
        ("time", ["23:59:59.5Z", "00:00:00+23:59"], ["23:59:60Z", "24:00:00Z", "12:00:00"]),
        ("date-time", ["2024-02-29T01:02:03Z"], ["2023-02-29T01:02:03Z", "2024-01-01"]),
        ("hostname", ["a-b.c1", "x" * 63], ["xn--a", "-a", "a-", "x" * 64, ".".join(["ab"] * 99)]),
    ],
)
def test_formats_mean_what_they_say(name, fits, others, compiler):
    for more in ({}, {"maxLength": 300}, {"pattern": "^.+$", "allOf": [{"minLength": 1}]}):
        schema = {"type": "string", "format": name} | more
        constraint = compiler.compile("f", Grammar("json_schema", json.dumps(schema)))
        assert [is_text(compiler, constraint, json.dumps(one)) for one in fits] == [True] * len(
            fits
        )
        assert not any(is_text(compiler, constraint, json.dumps(one)) for one in others)


def test_choices_are_spelled_without_the_space_of_a_tokenizer(tmp_path):
    """SentencePiece puts a space before a text; no choice begins with it."""
    vocabulary = ["<unk>", "</s>", "▁", "a", "b", "ab", "▁a", "▁b"]
    tokenizer = Tokenizer(
        models.BPE({t: n for n, t in enumerate(vocabulary)}, [("▁", "a"), ("▁", "b"), ("a", "b")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = ConstraintCompiler(TextTokenizer.open(tmp_path), len(vocabulary), (1,))
    matcher = compiler.compile("choice", Choices(("ab", "ba a"))).start()
    row = np.zeros(1, np.int32)
    matcher.fill(row)
    assert [token for token in range(8) if has_token(row, token)] == [4, 5]
    for token in (4, 3, 6):
        matcher.advance(token)
    matcher.fill(row)
    assert has_token(row, 1) and int(row[0]) == 2
    with pytest.raises(InvalidRequest, match=r"choice\[1\]: no tokens write"):
        compiler.compile("choice", Choices(("ab", "c")))


@pytest.mark.parametrize("seed", range(20))
def test_masks_of_choices(seed, compiler):
    """Drawn choices, of which some are equal and some begin others: masks as by brute force."""
    draw = random.Random(seed)
    letters = draw.choice(["ab", "\x00\x01a", "é👩b"])
    texts = [
        "".join(draw.choices(letters, k=draw.randint(1, 4))) for _ in range(draw.randint(1, 30))
    ]
    texts = [*texts, *draw.choices(texts, k=3), *(text + "a" for text in texts[:2])]
    constraint = compiler.compile("choice", Choices(tuple(texts)))
    rows = {tuple(compiler.tokenizer.encode_literal(text)) for text in texts}
    for row in rows:
        matcher, mask = constraint.start(), np.zeros(num_words(VOCABULARY), np.int32)
        for depth in range(len(row) + 1):
            matcher.fill(mask)
            wanted = {
                other[depth] for other in rows if other[:depth] == row[:depth] and other[depth:]
            }
            wanted |= {END} if row[:depth] in rows else set()
            assert {token for token in range(VOCABULARY) if has_token(mask, token)} == wanted
            if depth < len(row):
                matcher.advance(row[depth])


def test_many_choices_take_few_steps_of_python(compiler):
    """Steps of Python and sorts of Python objects hold the GIL, and with it other requests."""
    choices = Choices(tuple(f"item {n % 9} of {n}" for n in range(20_000)))
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        compiler.compile("choice", choices)
    finally:
        sys.setprofile(None)
    assert calls < 6 * len(choices.texts)


@pytest.mark.parametrize("family", FAMILIES)
def test_grammars_of_every_family_of_tokenisers(family, tmp_path):
    """A text of the masks is a text of the grammar, as the bytes of its tokens spell it."""
    for seed in range(3):
        random = np.random.default_rng(seed)
        made = FAMILIES[family](random)
        made.add_special_tokens(["</s>"])
        made.save(str(tmp_path / "tokenizer.json"))
        tokenizer = TextTokenizer.open(tmp_path)
        size, end = len(tokenizer.all_bytes), tokenizer.tokenizer.token_to_id("</s>")
        compiler = ConstraintCompiler(tokenizer, size, (end,))
        constraint = compiler.compile("regex", Grammar("regex", "(ab){2} ?(a|on|b){1,3}"))
        for _ in range(5):
            matcher, row, text = constraint.start(), np.zeros(num_words(size), np.int32), b""
            while True:
                matcher.fill(row)
                left = [token for token in range(size) if has_token(row, token)]
                token = int(random.choice(left))
                if token == end:
                    break
                matcher.advance(token)
                text += tokenizer.all_bytes[token]
            assert re.fullmatch("(ab){2} ?(a|on|b){1,3}", text.decode()), text


def test_without_end_tokens_or_the_library_a_constraint_is_refused(compiler):
    no_end = ConstraintCompiler(compiler.tokenizer, VOCABULARY, ())
    with pytest.raises(UnsupportedField, match="end token"):
        no_end.compile("choice", Choices(("a",)))

    class Missing:
        def compile(self, *arguments):
            raise ModuleNotFoundError("No module named 'llguidance'", name="llguidance")

    model = object.__new__(TextModel)
    model.__dict__["_constraints"] = Missing()
    with pytest.raises(UnsupportedField, match=r"\[grammar\]"):
        model.constrain("choice", Choices(("a",)))

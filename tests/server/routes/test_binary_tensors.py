"""The binary form of tensors: drawn requests answer as their JSON form; broken ones are refused."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recserve.schemas.inference import InferRequest
from recserve.schemas.items import InvalidRequest
from recserve.server.binary_tensors import HEADER, read_request
from recserve.server.body_decoder import MalformedBody
from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

KINDS = {"BOOL": "?", "INT64": "<i8", "FP32": "<f4"}
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=5)
VALUES = {
    "BYTES": TEXTS,
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "BOOL": st.booleans(),
    "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[httpx.Client]:
    store = f"lmdb:{tmp_path_factory.mktemp('binary')}/store"
    with live(Service.open(shared_bundle(), store, "cpu")) as client:
        yield client


def pack(datatype: str, values: Sequence[Any]) -> bytes:
    if datatype in KINDS:
        return np.array(values, KINDS[datatype]).tobytes()
    texts = [value.encode() for value in values]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def unpack(datatype: str, part: bytes) -> list[Any]:
    if datatype in KINDS:
        return np.frombuffer(part, KINDS[datatype]).tolist()
    texts, start = [], 0
    while start < len(part):
        (size,) = struct.unpack_from("<I", part, start)
        texts.append(part[start + 4 : start + 4 + size].decode())
        start += 4 + size
    return texts


def tensor(name: str, shape: Sequence[int], values: Sequence[Any], datatype: str = "BYTES") -> dict:
    return {"name": name, "shape": list(shape), "datatype": datatype, "data": list(values)}


def in_bytes(one: dict) -> tuple[dict, bytes]:
    part = pack(one["datatype"], one["data"])
    head = {name: value for name, value in one.items() if name != "data"}
    return {**head, "parameters": {"binary_data_size": len(part)}}, part


def body_of(inputs: Sequence[dict], binary: Sequence[bool], **fields: Any) -> tuple[bytes, int]:
    """The body whose inputs are in bytes where `binary` says so, and the length of its JSON."""
    heads, parts = [], []
    for one, as_bytes in zip(inputs, binary, strict=True):
        head, part = in_bytes(one) if as_bytes else (one, b"")
        heads.append(head)
        parts.append(part)
    encoded = json.dumps({"inputs": heads, **fields}).encode()
    return encoded + b"".join(parts), len(encoded)


@st.composite
def drawn_tensors(draw: st.DrawFn) -> tuple[list[dict], list[bool]]:
    inputs = []
    for place in range(draw(st.integers(1, 5))):
        datatype = draw(st.sampled_from(list(VALUES)))
        shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=2))
        size = int(np.prod(shape))
        values = draw(st.lists(VALUES[datatype], min_size=size, max_size=size))
        inputs.append(tensor(f"t{place}", shape, values, datatype))
    size = len(inputs)
    return inputs, draw(st.lists(st.booleans(), min_size=size, max_size=size))


@settings(deadline=None, max_examples=80)
@given(drawn_tensors())
def test_drawn_tensors_have_the_values_of_their_json_form(drawn):
    inputs, binary = drawn
    raw, size = body_of(inputs, binary)
    read = read_request(raw, [str(size)])
    plain = read_request(json.dumps({"inputs": inputs}).encode(), [])
    assert [one.data for one in read.inputs] == [one.data for one in plain.inputs]
    assert [one.shape for one in read.inputs] == [one["shape"] for one in inputs]


def damage(rng: random.Random, raw: bytes, size: int) -> tuple[bytes, int]:
    """A body with a cut, an insertion, a changed byte or a wrong length of the JSON part."""
    place = rng.randrange(len(raw))
    way = rng.randrange(4)
    if way == 0:
        return raw[:place], size
    if way == 1:
        return raw[:place] + rng.randbytes(rng.randint(1, 9)) + raw[place:], size
    if way == 2:
        return raw[:place] + rng.randbytes(1) + raw[place + 1 :], size
    return raw, size + rng.choice((-9, -1, 1, 4, 1 << 40))


def test_damaged_bodies_are_read_or_refused():
    """No other error than a refusal in words comes of 4,000 damaged bodies."""
    rng = random.Random(20261126)
    refused = 0
    for _ in range(4000):
        users = [rng.choice(("a", "", "ü", "user")) for _ in range(rng.randint(0, 3))]
        inputs = [tensor("user_id", [len(users)], users), tensor("k", [1], [3], "INT64")]
        raw, size = damage(rng, *body_of(inputs, [True, rng.random() < 0.8]))
        try:
            assert isinstance(read_request(raw, [str(size)]), InferRequest)
        except (InvalidRequest, MalformedBody) as error:
            assert str(error)
            refused += 1
    assert refused > 2000


USERS = tensor("user_id", [2], ["user000001", "user000002"])
K = tensor("k", [1], [4], "INT64")


def post(server: httpx.Client, model: str, raw: bytes, size: int | str | None) -> httpx.Response:
    headers = {} if size is None else {HEADER: str(size)}
    return server.post(f"/v2/models/{model}/infer", content=raw, headers=headers)


def outputs_of(answer: httpx.Response) -> dict[str, tuple[Any, ...]]:
    """Type, shape and values of each output, of either form."""
    assert answer.status_code == 200, answer.text
    size = int(answer.headers.get(HEADER, len(answer.content)))
    head, rest = json.loads(answer.content[:size]), answer.content[size:]
    found = {}
    for one in head["outputs"]:
        values = one.get("data")
        if "parameters" in one:
            assert values is None
            length = one["parameters"]["binary_data_size"]
            values, rest = unpack(one["datatype"], rest[:length]), rest[length:]
        elif one["datatype"] == "FP32":
            values = np.array(values, np.float32).tolist()
        found[one["name"]] = one["datatype"], one["shape"], values
    assert rest == b""
    return found


def test_requests_of_mixed_forms_have_the_answers_of_json(server):
    """Inputs and outputs are in bytes or in JSON, drawn one by one; strategies are as well."""
    rng = random.Random(7)
    items = [f"item{number:06d}" for number in range(30)]
    for turn in range(16):
        rows, width = rng.randint(1, 4), rng.randint(1, 5)
        matrix = [rng.choice((*items, "", "ünknown")) for _ in range(rows * width)]
        matrix[::width] = rng.choices(items, k=rows)
        users = tensor("user_id", [rows], [f"user{rng.randrange(9):06d}" for _ in range(rows)])
        history = tensor("history", [rows, width], matrix)
        inputs = [rng.choice((users, history))]
        if turn % 2:
            model, extra = "rank", tensor("candidates", [rows, width], matrix)
        else:
            model, extra = "recommend", tensor("k", [1], [rng.randint(1, 20)], "INT64")
        inputs.insert(rng.randrange(2), extra)
        plain = outputs_of(post(server, model, body_of(inputs, [False, False])[0], None))
        wanted = rng.sample(sorted(plain), rng.randint(1, len(plain)))
        forms = [rng.choice(({}, {"binary_data": True}, {"binary_data": False})) for _ in wanted]
        named = [{"name": n, "parameters": f} for n, f in zip(wanted, forms, strict=True)]
        fields = {"parameters": {"binary_data_output": rng.random() < 0.5}}
        if rng.random() < 0.7:
            fields["outputs"] = named
        binary = [rng.random() < 0.7, rng.random() < 0.7]
        raw, size = body_of(inputs, binary, **fields)
        answer = post(server, model, raw, size)
        default = fields["parameters"]["binary_data_output"]
        all_forms = [f.get("binary_data", default) for f in forms]
        expects_bytes = any(all_forms) if "outputs" in fields else default
        assert (HEADER in answer.headers) == expects_bytes
        found = outputs_of(answer)
        names = wanted if "outputs" in fields else list(plain)
        assert list(found) == names
        for name in names:
            assert same(found[name], plain[name]), (model, name, found[name], plain[name])


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    if one[0] == "FP32":
        return one[:2] == other[:2] and np.array_equal(one[2], other[2], equal_nan=True)
    return one == other


def sized(one: dict, size: int) -> dict:
    head = {name: value for name, value in one.items() if name != "data"}
    return {**head, "parameters": {"binary_data_size": size}}


RAW = in_bytes(USERS)[1]
NUMBER = pack("INT64", [4])
LONG = struct.pack("<I", 2**32 - 1)


@pytest.mark.parametrize(
    ("inputs", "rest", "words"),
    [
        ([sized(USERS, 27)], RAW[:-1], "value 1 has a length of 10 bytes, but 9 are left"),
        ([sized(USERS, 28)], RAW + b"x", "1 bytes at the end of the body belong to no input"),
        ([sized(USERS, 29)], RAW, "expected at most the 28 bytes that are left"),
        ([sized(USERS, 7)], b"1234567", "expected at least 8 bytes for the 2 values"),
        ([sized(USERS, -1)], RAW, "binary_data_size: expected int >= 0"),
        ([sized(USERS, 1 << 70)], RAW, "binary_data_size"),
        ([sized(USERS, 2.5)], RAW, "binary_data_size"),
        ([sized({**USERS, "shape": [1]}, 28)], RAW, "14 bytes follow the 1 values of the shape"),
        ([sized({**USERS, "shape": [3]}, 28)], RAW, "value 2 has a length of 0 bytes"),
        ([sized(USERS, 28), sized(K, 28)], RAW, "expected at most the 0 bytes that are left"),
        ([sized(USERS, 28), sized(K, 8)], RAW + NUMBER[:7], "expected at most the 7 bytes"),
        ([sized(USERS, 28), sized(K, 7)], RAW + NUMBER[:7], "expected 8 bytes for the shape"),
        ([sized(USERS, 8)], LONG + b"abcd", f"a length of {2**32 - 1} bytes, but 4 are left"),
        ([{**USERS, "parameters": {"binary_data_size": 28}}], RAW, "data: expected either data or"),
        ([sized({**USERS, "shape": [1 << 20, 1 << 20]}, 28)], RAW, "expected at least 4398046511"),
        ([sized({**USERS, "datatype": "FP64"}, 28)], RAW, "datatype: expected BYTES, got 'FP64'"),
        ([sized({**K, "datatype": "INT32"}, 4)], b"1234", "datatype: expected INT64, got 'INT32'"),
        ([sized({**USERS, "shape": [1]}, 5)], b"\1\0\0\0\xff", "value 0 is not UTF-8"),
        ([sized({**USERS, "shape": [1]}, 7)], b"\3\0\0\0\xed\xa0\x80", "value 0 is not UTF-8"),
    ],
)
def test_sizes_that_lie_are_refused(server, inputs, rest, words):
    encoded = json.dumps({"inputs": inputs}).encode()
    answer = post(server, "recommend", encoded + rest, len(encoded))
    assert answer.status_code == 422, answer.text
    assert words in answer.json()["error"]


def test_lengths_of_the_json_part_that_lie_are_refused(server):
    raw, size = body_of([USERS, K], [True, True])
    for lie in (0, -1, "", "x", "1e3", "+5", len(raw) + 1, "9" * 30, "٣"):
        headers = {HEADER: str(lie).encode()}
        answer = server.post("/v2/models/recommend/infer", content=raw, headers=headers)
        assert answer.status_code == 422 and "Inference-Header-Content-Length" in answer.text
    for lie in (size - 1, size + 2, len(raw), None):
        answer = post(server, "recommend", raw, lie)
        assert answer.status_code == 400 and "not valid JSON" in answer.json()["error"]
    twice = [(HEADER, str(size)), (HEADER, str(size))]
    answer = server.post("/v2/models/recommend/infer", content=raw, headers=twice)
    assert answer.status_code == 422 and "expected one value, got 2" in answer.text
    assert post(server, "recommend", raw, size).status_code == 200

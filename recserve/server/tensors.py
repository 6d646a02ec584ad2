"""Converts the tensors of the Open Inference Protocol to requests, and answers to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from recserve.schemas.inference import (
    InferRequest,
    InferTensor,
    OutputTensor,
    RequestedOutput,
    TensorMetadata,
)
from recserve.schemas.items import (
    MAX_BATCH,
    InvalidRequest,
    RankedItem,
    RankRequest,
    RankResponse,
    RecommendedItem,
    RecommendRequest,
    RecommendResponse,
)
from recserve.schemas.numbers import ENCODER
from recserve.schemas.validation import json_text, to_message

USER, HISTORY, K, CANDIDATES = "user_id", "history", "k", "candidates"
TYPES = {USER: "BYTES", HISTORY: "BYTES", K: "INT64", CANDIDATES: "BYTES"}
INPUTS = {"recommend": (USER, HISTORY, K), "rank": (USER, HISTORY, CANDIDATES)}
COLUMNS = {"user_id": [-1], "history": [-1, -1], "k": [1], "candidates": [-1, -1]}
FIELD = "fields."  # begins the names of outputs that are columns of the catalogue
PAD = ""  # fills rows that are shorter than the tensor
ENVELOPE = (
    ("strategy", "BYTES"),
    ("exact", "BOOL"),
    ("degraded", "BYTES"),
    ("catalog_version", "BYTES"),
)


def describe_inputs(model: str) -> list[TensorMetadata]:
    """Returns the inputs of `recommend` or `rank`."""
    return [
        TensorMetadata(name=name, datatype=TYPES[name], shape=COLUMNS[name])
        for name in INPUTS[model]
    ]


def describe_outputs(model: str, tasks: Sequence[str]) -> list[TensorMetadata]:
    """Returns the outputs of `recommend` or `rank`; `tasks` are those of the ranker."""
    names = {"item_id": "BYTES", "score": "FP32", "source": "BYTES"}
    if model == "rank":
        names = {**dict.fromkeys(tasks, "FP32"), "rank": "INT64"}
    wide = [TensorMetadata(name=n, datatype=t, shape=[-1, -1]) for n, t in names.items()]
    return wide + [TensorMetadata(name=n, datatype=t, shape=[-1]) for n, t in ENVELOPE]


def slate_requests(body: InferRequest) -> list[RecommendRequest]:
    """Returns one recommend request per row.

    Raises:
        InvalidRequest: If a tensor or a value is invalid.
    """
    tensors = _tensors(body, "recommend")
    (k,) = _whole_numbers(tensors[K]) if K in tensors else (10,)
    given = body.parameters
    fields: dict[str, Any] = {
        "k": k,
        "exclude": {"seen": given.exclude_seen},
        "fields": _requested_fields(body),
        "diversity": json_text("parameters.diversity", given.diversity),
        "exclude_shown": json_text("parameters.exclude_shown", given.exclude_shown),
        "discount_shown": json_text("parameters.discount_shown", given.discount_shown),
        "scoring": json_text("parameters.scoring", given.scoring),
        "on_deadline": given.on_deadline,
    }
    if given.strategy is not None:
        fields["strategy"] = given.strategy
    if given.beam_width is not None:
        fields["beam_width"] = given.beam_width
    return [to_message({**row, **fields}, RecommendRequest) for row in _rows(tensors)]


def ranking_requests(body: InferRequest) -> tuple[list[RankRequest], list[list[str]]]:
    """Returns one rank request per row, and the [n, m] candidates with their padding.

    Padding is no candidate of a request.

    Raises:
        InvalidRequest: If a tensor or a value is invalid.
    """
    tensors = _tensors(body, "rank")
    if CANDIDATES not in tensors:
        raise InvalidRequest("inputs", f"{CANDIDATES} is required")
    fields: dict[str, Any] = {"fields": _requested_fields(body)}
    if body.parameters.scorer is not None:
        fields["scorer"] = body.parameters.scorer
    rows, candidates = _rows(tensors), _texts(tensors[CANDIDATES])
    if len(rows) != len(candidates):
        raise InvalidRequest(
            "inputs", f"{CANDIDATES} has {len(candidates)} rows; expected {len(rows)}"
        )
    requests = [
        to_message({**row, **fields, "candidates": _candidates(ids)}, RankRequest)
        for row, ids in zip(rows, candidates, strict=True)
    ]
    return requests, candidates


def slate_tensors(
    requests: Sequence[RecommendRequest], answers: Sequence[RecommendResponse]
) -> list[OutputTensor]:
    """Returns slates as tensors of k items; rows of shorter slates are padded."""
    width = requests[0].k
    columns: dict[str, tuple[str, list[Any], Any]] = {
        "item_id": ("BYTES", [[i.item_id for i in a.items] for a in answers], PAD),
        "score": ("FP32", [[i.score for i in a.items] for a in answers], None),
        "source": ("BYTES", [[i.source for i in a.items] for a in answers], PAD),
    }
    tensors = [_pad(n, t, rows, width, pad) for n, (t, rows, pad) in columns.items()]
    items = [a.items for a in answers]
    named = [*_field_tensors(requests[0].fields, items, width), *_envelope(answers)]
    if any(answer.scoring is not UNSET for answer in answers):
        texts = ["" if a.scoring is UNSET else ENCODER.encode(a.scoring).decode() for a in answers]
        named.append(OutputTensor(name="scoring", shape=[len(texts)], datatype="BYTES", data=texts))
    return [*tensors, *named]


def ranking_tensors(
    requests: Sequence[RankRequest],
    answers: Sequence[RankResponse],
    candidates: Sequence[Sequence[str]],
) -> list[OutputTensor]:
    """Returns rankings as tensors in the order of the candidates.

    Unknown items and padding have no score.

    Args:
        requests: One for each row.
        answers: One for each row.
        candidates: [n, m] candidates, padding included.
    """
    width = len(candidates[0])
    tasks = list(answers[0].items[0].scores) if answers[0].items else []
    tasks += [t for a in answers for i in a.items[:1] for t in i.scores if t not in tasks]
    scores: dict[str, list[list[float | None]]] = {task: [] for task in tasks}
    ranks: list[list[int]] = []
    places: list[list[RankedItem | None]] = []
    for row, answer in zip(candidates, answers, strict=True):
        found = {item.item_id: item for item in answer.items}
        items = [found.get(item_id) for item_id in row]
        for task in tasks:
            scores[task].append([None if i is None else i.scores.get(task) for i in items])
        ranks.append([0 if item is None else item.rank for item in items])
        places.append(items)
    tensors = [_pad(task, "FP32", rows, width, None) for task, rows in scores.items()]
    tensors.append(_pad("rank", "INT64", ranks, width, 0))
    return [*tensors, *_field_tensors(requests[0].fields, places, width), *_envelope(answers)]


def select_outputs(
    tensors: list[OutputTensor], wanted: Sequence[RequestedOutput] | None
) -> list[OutputTensor]:
    """Returns the requested outputs. Raises InvalidRequest if one is unknown."""
    if not wanted:
        return tensors
    by_name = {tensor.name: tensor for tensor in tensors}
    if len({output.name for output in wanted}) < len(wanted):
        raise InvalidRequest("outputs", "expected each output once")
    for place, output in enumerate(wanted):
        if output.name not in by_name:
            known = ", ".join(by_name)
            raise InvalidRequest(
                f"outputs[{place}].name", f"expected one of {known}, got {output.name!r}"
            )
    return [by_name[output.name] for output in wanted]


def _requested_fields(body: InferRequest) -> list[str]:
    """Returns the columns of the catalogue that the requested outputs name."""
    names = [output.name for output in body.outputs or []]
    return [name.removeprefix(FIELD) for name in names if name.startswith(FIELD)]


def _field_tensors(
    names: Sequence[str],
    rows: Sequence[Sequence[RecommendedItem | RankedItem | None]],
    width: int,
) -> list[OutputTensor]:
    """Returns a tensor of texts for each column; values that are no texts are written as JSON."""
    return [
        _pad(
            FIELD + name,
            "BYTES",
            [[_field(item, name) for item in row] for row in rows],
            width,
            PAD,
        )
        for name in names
    ]


def _field(item: RecommendedItem | RankedItem | None, name: str) -> str:
    value = None if item is None or item.fields is UNSET else item.fields[name]
    if value is None:
        return PAD
    return value if isinstance(value, str) else ENCODER.encode(value).decode()


def _tensors(body: InferRequest, model: str) -> dict[str, InferTensor]:
    """Checks names, types and sizes of the inputs."""
    found: dict[str, InferTensor] = {}
    for place, tensor in enumerate(body.inputs):
        where = f"inputs[{place}]"
        if tensor.name not in INPUTS[model]:
            known = ", ".join(INPUTS[model])
            raise InvalidRequest(f"{where}.name", f"expected one of {known}, got {tensor.name!r}")
        if tensor.name in found:
            raise InvalidRequest(f"{where}.name", f"{tensor.name} occurs twice")
        if tensor.datatype != TYPES[tensor.name]:
            wanted = TYPES[tensor.name]
            raise InvalidRequest(f"{where}.datatype", f"expected {wanted}, got {tensor.datatype!r}")
        found[tensor.name] = tensor
    return found


def _rows(tensors: dict[str, InferTensor]) -> list[dict[str, Any]]:
    """Returns user or history of each row."""
    if (USER in tensors) == (HISTORY in tensors):
        raise InvalidRequest("inputs", f"expected either {USER} or {HISTORY}")
    rows: list[dict[str, Any]]
    if HISTORY in tensors:
        rows = [{"history": [i for i in ids if i != PAD]} for ids in _texts(tensors[HISTORY])]
    else:
        users = _flat(tensors[USER])
        rows = [{"user": {"id": _text(tensors[USER], user)}} for user in users]
    if not 1 <= len(rows) <= MAX_BATCH:
        raise InvalidRequest("inputs", f"expected 1 to {MAX_BATCH} rows, got {len(rows)}")
    return rows


def _flat(tensor: InferTensor) -> list[Any]:
    """Returns the values row by row, whether the data is flat or nested as the shape says."""
    flat = [] if tensor.data is UNSET else tensor.data
    if len(tensor.shape) == 2 and any(isinstance(value, list) for value in flat):
        count, width = tensor.shape
        lengths = [len(row) if isinstance(row, list) else None for row in flat]
        if lengths != [width] * count:
            raise InvalidRequest(
                f"inputs.{tensor.name}.data",
                f"expected {count} rows of {width} values for the shape, got {_rows_of(lengths)}",
            )
        flat = [value for row in flat for value in row]
    size = 1
    for extent in tensor.shape:
        size *= extent
    if len(flat) != size:
        raise InvalidRequest(
            f"inputs.{tensor.name}.data", f"expected {size} values for the shape, got {len(flat)}"
        )
    return flat


def _rows_of(lengths: Sequence[int | None]) -> str:
    """Returns the lengths of rows in words; None stands for a value that is no row."""
    first = ["a single value" if length is None else str(length) for length in lengths[:8]]
    more = ", ..." if len(lengths) > 8 else ""
    return f"{len(lengths)} of {', '.join(first)}{more}"


def _candidates(item_ids: Sequence[str]) -> list[dict[str, str]]:
    return [{"item_id": item_id} for item_id in item_ids if item_id != PAD]


def _texts(tensor: InferTensor) -> list[list[str]]:
    """Returns the rows of a matrix of texts, padding included."""
    if len(tensor.shape) != 2:
        raise InvalidRequest(f"inputs.{tensor.name}.shape", "expected two dimensions, got one")
    flat, (count, width) = _flat(tensor), tensor.shape
    texts = [_text(tensor, value) for value in flat]
    return [texts[row * width : (row + 1) * width] for row in range(count)]


def _text(tensor: InferTensor, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(
            f"inputs.{tensor.name}.data", f"expected text, got {str(value)[:40]!r}"
        )
    return value


def _whole_numbers(tensor: InferTensor) -> list[int]:
    flat = _flat(tensor)
    if len(flat) != 1 or type(flat[0]) is not int:
        raise InvalidRequest(
            f"inputs.{tensor.name}.data", f"expected one integer, got {str(flat)[:40]}"
        )
    return flat


def _pad(
    name: str, datatype: str, rows: Sequence[Sequence[Any]], width: int, pad: Any
) -> OutputTensor:
    data = [value for row in rows for value in [*row, *([pad] * (width - len(row)))]]
    return OutputTensor(name=name, shape=[len(rows), width], datatype=datatype, data=data)


def _envelope(answers: Sequence[RecommendResponse] | Sequence[RankResponse]) -> list[OutputTensor]:
    """Returns one value per row: strategy, exactness, reasons of degradation, version."""
    values: dict[str, list[Any]] = {
        "strategy": [answer.strategy for answer in answers],
        "exact": [answer.exact for answer in answers],
        "degraded": [",".join(answer.degraded) for answer in answers],
        "catalog_version": [answer.catalog_version for answer in answers],
    }
    return [
        OutputTensor(name=name, shape=[len(answers)], datatype=datatype, data=values[name])
        for name, datatype in ENVELOPE
    ]

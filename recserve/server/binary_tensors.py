"""The binary form of tensors: values follow the JSON part of a body, in the order of the tensors.

The header `Inference-Header-Content-Length` has the length of the JSON part. Numbers are
little-endian. A text of a BYTES tensor is its length in 4 bytes and its UTF-8.

    | JSON part | tensor 0 | tensor 3 | ...      tensors without binary_data_size take no bytes

Source: Triton Inference Server, extension of the protocol for binary tensor data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET
from msgspec.structs import replace
from starlette.responses import Response

from recserve.schemas.inference import (
    BinaryOutput,
    InferParameters,
    InferRequest,
    InferResponse,
    InferTensor,
    OutputTensor,
    RequestedOutput,
)
from recserve.schemas.items import InvalidRequest, MissingField, UnsupportedField
from recserve.server.body_decoder import decode
from recserve.server.routing import json_response

HEADER = "Inference-Header-Content-Length"
BODY = msgspec.json.Decoder(InferRequest)
NUMBERS = {"BOOL": "?", "INT64": "<i8", "FP32": "<f4"}  # numpy's names
LENGTH_BYTES = 4  # of the length before each text


def read_request(raw: bytes, lengths: Sequence[str]) -> InferRequest:
    """Decodes a body in the JSON or the binary form; every input then has `data`.

    An input of an unknown type gets no values. `slate_requests` and `ranking_requests` refuse it.

    Args:
        raw: The body.
        lengths: Values of the header `Inference-Header-Content-Length`.

    Raises:
        MalformedBody: If the JSON part is not JSON.
        InvalidRequest: If a field or a size is invalid.
    """
    size = _json_size(lengths, len(raw))
    body = decode(BODY, raw[:size])
    inputs, start = [], size
    for place, tensor in enumerate(body.inputs):
        where, given = f"inputs[{place}]", tensor.parameters
        if given.shared_memory_region is not None:
            _refuse_shared_memory(where)
        if given.binary_data_size is None:
            if tensor.data is UNSET:
                raise MissingField(f"{where}.data", "is required")
        elif tensor.data is not UNSET:
            raise InvalidRequest(
                f"{where}.data", "expected either data or parameters.binary_data_size, got both"
            )
        elif given.binary_data_size > len(raw) - start:
            left = len(raw) - start
            raise InvalidRequest(
                f"{where}.parameters.binary_data_size",
                f"expected at most the {left} bytes that are left after the JSON part and earlier "
                f"inputs, got {given.binary_data_size}",
            )
        else:
            part = raw[start : start + given.binary_data_size]
            start += given.binary_data_size
            tensor = replace(tensor, data=_read_values(tensor, part, where))
        inputs.append(tensor)
    if start < len(raw):
        raise InvalidRequest(
            HEADER, f"{len(raw) - start} bytes at the end of the body belong to no input"
        )
    return replace(body, inputs=inputs)


def check_outputs(outputs: Sequence[RequestedOutput]) -> None:
    """Raises UnsupportedField if an output is requested in a form that the server lacks."""
    for place, output in enumerate(outputs):
        where = f"outputs[{place}]"
        if output.parameters.shared_memory_region is not None:
            _refuse_shared_memory(where)
        if output.parameters.classification:
            raise UnsupportedField(
                f"{where}.parameters.classification", "not supported: items are sorted already"
            )


def write_response(
    answer: InferResponse, parameters: InferParameters, outputs: Sequence[RequestedOutput]
) -> Response:
    """Returns an answer whose outputs are in the requested forms.

    Args:
        answer: The answer in the JSON form.
        parameters: Parameters of the request; they give the form of outputs without one.
        outputs: Requested outputs; empty if all were requested.
    """
    default = parameters.binary_data_output
    own = {output.name: output.parameters.binary_data for output in outputs}
    tensors: list[OutputTensor] = []
    parts: list[bytes] = []
    for tensor in answer.outputs:
        form = own.get(tensor.name)
        if default if form is None else form:
            part = _write_values(tensor)
            parts.append(part)
            size = BinaryOutput(binary_data_size=len(part))
            tensor = replace(tensor, data=UNSET, parameters=size)
        tensors.append(tensor)
    if not parts:
        return json_response(answer)
    head = msgspec.json.encode(replace(answer, outputs=tensors))
    body = b"".join([head, *parts])
    return Response(body, 200, {HEADER: str(len(head))}, "application/octet-stream")


def _json_size(lengths: Sequence[str], size: int) -> int:
    """Returns the length of the JSON part of a body of `size` bytes."""
    if not lengths:
        return size
    if len(lengths) > 1:
        raise InvalidRequest(HEADER, f"expected one value, got {len(lengths)}")
    (given,) = lengths
    digits = given.isascii() and given.isdigit() and len(given) <= 16
    if not digits or not 1 <= int(given) <= size:
        raise InvalidRequest(HEADER, f"expected 1 to the body's {size} bytes, got {given[:40]!r}")
    return int(given)


def _refuse_shared_memory(where: str) -> None:
    raise UnsupportedField(
        f"{where}.parameters.shared_memory_region",
        "shared memory is not supported; send values in the body",
    )


def _read_values(tensor: InferTensor, part: bytes, where: str) -> list[Any]:
    """Returns the values of a tensor, flat."""
    count = 1
    for extent in tensor.shape:
        count *= extent
    if tensor.datatype == "BYTES":
        return _read_texts(part, count, where)
    if tensor.datatype not in NUMBERS:
        return []
    kind = np.dtype(NUMBERS[tensor.datatype])
    if len(part) != count * kind.itemsize:
        raise InvalidRequest(
            f"{where}.parameters.binary_data_size",
            f"expected {count * kind.itemsize} bytes for the shape, got {len(part)}",
        )
    values: list[Any] = np.frombuffer(part, kind).tolist()
    return values


def _read_texts(part: bytes, count: int, where: str) -> list[str]:
    size, texts, start = len(part), [], 0
    least = count * LENGTH_BYTES
    if size < least:
        raise InvalidRequest(
            f"{where}.parameters.binary_data_size",
            f"expected at least {least} bytes for the {count} values of the shape, got {size}",
        )
    for number in range(count):
        begin = start + LENGTH_BYTES
        length = int.from_bytes(part[start:begin], "little")
        start = begin + length
        if begin > size or start > size:
            left = max(0, size - begin)
            raise InvalidRequest(
                where, f"value {number} has a length of {length} bytes, but {left} are left"
            )
        try:
            texts.append(part[begin:start].decode())
        except UnicodeDecodeError:
            raise InvalidRequest(where, f"value {number} is not UTF-8") from None
    if start < size:
        raise InvalidRequest(where, f"{size - start} bytes follow the {count} values of the shape")
    return texts


def _write_values(tensor: OutputTensor) -> bytes:
    """Returns the bytes of an output; a missing score is a NaN."""
    values = [] if tensor.data is UNSET else tensor.data
    if tensor.datatype != "BYTES":
        return np.array(values, np.dtype(NUMBERS[tensor.datatype])).tobytes()
    texts = [text.encode() for text in values]
    return b"".join(len(text).to_bytes(LENGTH_BYTES, "little") + text for text in texts)

"""Questions that the files of several draft networks leave open.

rotary       halves or pairs of a head's numbers turn together
positions    base and scaling of the rotary positions
vocabulary   `d2t` holds offsets, as published, or token ids
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from recserve.drafters.shared.network_files import NEOX
from recserve.models.config import DecoderConfig, RopeFactors
from recserve.models.loading import opened_file, read_flag, tensor_files
from recserve.models.saving import rope_fields
from recserve.speculation.open_question import CheckpointAmbiguity, CheckpointReading

INNER = "transformer_layer_config"  # where speculators keeps the sizes of the layers
TURNED = {True: "halves", False: "pairs"}


def place_field(
    fields: Mapping[str, Any], name: str, value: Any, places: tuple[str, ...]
) -> dict[str, Any]:
    """Returns the change of a field: inside the first of these objects that has it, or outside."""
    for place in places:
        if name in (fields.get(place) or {}):
            return {place: {name: value}}
    return {name: value}


def join_numbers(numbers: tuple[int, ...] | list[int]) -> str:
    """Returns numbers as text."""
    return ", ".join(map(str, numbers))


def rotary_questions(
    fields: Mapping[str, Any], own: DecoderConfig, target: DecoderConfig, *nested: str
) -> Iterator[CheckpointAmbiguity]:
    """Asks which numbers of a head turn together, and for the base where it is not the target's.

    Args:
        fields: Content of config.json.
        own: Sizes of the network's layers.
        target: Sizes of the target's layers.
        nested: Objects of config.json that may hold `is_neox_style`, besides the layers' sizes.
    """
    places = (*nested, INNER)
    every = dict(fields)
    for place in reversed(places):
        every |= fields.get(place) or {}
    halves = read_flag(every, NEOX, True)
    turned = CheckpointReading(TURNED[not halves], place_field(fields, NEOX, not halves, places))
    yield CheckpointAmbiguity("rotary", TURNED[halves], (turned,))
    if (own.rope_theta, own.rope_scaling) != (target.rope_theta, target.rope_scaling):
        change = {INNER: _rope(target)} if fields.get(INNER) else _rope(target)
        other = CheckpointReading(_describe_scaling(target), change)
        yield CheckpointAmbiguity("positions", _describe_scaling(own), (other,))


def vocabulary_questions(folder: Path, vocab_size: int) -> Iterator[CheckpointAmbiguity]:
    """Asks what `d2t` holds, where no `t2d` tells it and token ids would also be valid."""
    files = tensor_files(folder)
    name = next((name for name in files if name.endswith("d2t")), None)
    if name is None or any(other.endswith("t2d") for other in files):
        return
    with opened_file(files[name]) as file:
        tokens = file.get_tensor(name).long()
    distinct = len(set(tokens.tolist())) == len(tokens)
    if distinct and 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        offsets = tokens - torch.arange(len(tokens))
        ids = CheckpointReading("d2t holds token ids", {}, {name: offsets})
        yield CheckpointAmbiguity("vocabulary", "d2t holds offsets", (ids,))


def _rope(target: DecoderConfig) -> dict[str, Any]:
    """Returns the fields of the target's rotary positions."""
    rope = None if target.rope_scaling is None else rope_fields(target)
    return {"rope_theta": target.rope_theta, "rope_parameters": None, "rope_scaling": rope}


def _describe_scaling(decoder: DecoderConfig) -> str:
    scaling = decoder.rope_scaling
    named = "no scaling"
    if isinstance(scaling, RopeFactors):
        least, most = min(scaling.divisors), max(scaling.divisors)
        named = f"frequencies divided by {least:g} to {most:g}, scale {scaling.scale:g}"
    elif scaling is not None:
        named = f"scaling {asdict(scaling)}"
    return f"base {decoder.rope_theta:g}, {named}"

"""What the files of an EAGLE network leave open.

    layers      the numbers count the embedding as 0, or the first layer as 0
    fed back    `norm_output` means that the normalised output is fed back (vLLM, speculators), or
                only that the head reads it (SpecForge, whose training never feeds it back)
    residual    `norm_before_residual` changes no tensor
    rotary      halves or pairs of a head's numbers turn together; base and scaling of the positions

Sources: vLLM (llama_eagle3.py), speculators (models/eagle3), SpecForge (llama3_eagle.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recserve.models.config import DecoderConfig
from recserve.models.drafters.eagle import EagleConfig
from recserve.models.drafters.eagle_files import eagle_tensor_names, read_eagle_config
from recserve.models.drafters.network_files import NEOX
from recserve.models.drafters.open_question import CheckpointReading, OpenQuestion
from recserve.models.language_model import LanguageModel
from recserve.models.loading import read_json

LAYERS = ("eagle_aux_hidden_state_layer_ids", "target_layer_ids")
INNER = "transformer_layer_config"  # where speculators keeps the sizes of the layer
FED_BACK = {False: "the output before its norm", True: "the normalised output"}
RESIDUAL = {False: "the feature", True: "the normalised feature"}
TURNED = {True: "halves", False: "pairs"}


def eagle_questions(folder: Path, target: LanguageModel) -> tuple[OpenQuestion, ...]:
    """Returns what the files of a folder leave open for a target.

    Raises:
        UnsupportedModel: If the configuration cannot be read.
    """
    fields = read_json(folder / "config.json")
    config = read_eagle_config(fields, eagle_tensor_names(folder), target)
    return tuple(_questions(fields, config, target.config.decoder))


def _questions(
    fields: Mapping[str, Any], config: EagleConfig, target: DecoderConfig
) -> Iterator[OpenQuestion]:
    if config.fused:
        yield _layers(fields, config, target.num_layers)
        for name, key, answers in (
            ("fed back", "norm_output", FED_BACK),
            ("residual", "norm_before_residual", RESIDUAL),
        ):
            taken = bool(getattr(config, key))
            other = CheckpointReading(answers[not taken], _placed(fields, key, not taken))
            yield OpenQuestion(name, answers[taken], (other,))
    halves = bool({**fields, **(fields.get(INNER) or {})}.get(NEOX, True))
    turned = CheckpointReading(TURNED[not halves], _sized(fields, {NEOX: not halves}))
    yield OpenQuestion("rotary", TURNED[halves], (turned,))
    own = config.decoder
    if (own.rope_theta, own.rope_scaling) != (target.rope_theta, target.rope_scaling):
        other = CheckpointReading(_named(target), _sized(fields, _rope(target)))
        yield OpenQuestion("positions", _named(own), (other,))


def _layers(fields: Mapping[str, Any], config: EagleConfig, depth: int) -> OpenQuestion:
    taken = config.target_layers
    readings = []
    for shift in (1, -1):
        moved = [number + shift for number in taken]
        if min(moved) >= 0 and max(moved) <= depth:
            key = next((name for name in LAYERS if _find(fields, name)), LAYERS[0])
            readings.append(CheckpointReading(_listed(moved), _placed(fields, key, moved)))
    return OpenQuestion("layers", _listed(taken), tuple(readings))


def _listed(numbers: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, numbers))


def _find(fields: Mapping[str, Any], name: str) -> Any:
    return (fields.get("eagle_config") or {}).get(name) or fields.get(name)


def _placed(fields: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Returns the change of a field, inside `eagle_config` if it lies there."""
    nested = fields.get("eagle_config") or {}
    return {"eagle_config": {name: value}} if name in nested else {name: value}


def _sized(fields: Mapping[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Returns the change of fields that lie among the sizes of the layer."""
    return {INNER: change} if fields.get(INNER) else change


def _rope(target: DecoderConfig) -> dict[str, Any]:
    """Returns the fields of the target's rotary positions."""
    scaling, rope = target.rope_scaling, None
    if scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency,
            "high_freq_factor": scaling.high_frequency,
            "original_max_position_embeddings": scaling.original_positions,
        }
    return {"rope_theta": target.rope_theta, "rope_parameters": None, "rope_scaling": rope}


def _named(decoder: DecoderConfig) -> str:
    scaling = decoder.rope_scaling
    said = "no scaling" if scaling is None else f"scaling {asdict(scaling)}"
    return f"base {decoder.rope_theta:g}, {said}"

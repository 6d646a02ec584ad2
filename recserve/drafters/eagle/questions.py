"""What the files of an EAGLE network leave open.

    layers      the numbers count the embedding as 0, or the first layer as 0
    fed back    `norm_output` means that the normalised output is fed back (vLLM, speculators), or
                only that the head reads it (SpecForge, whose training never feeds it back)
    residual    `norm_before_residual` changes no tensor

See shared_questions.py for the others. Sources: vLLM (llama_eagle3.py), speculators
(models/eagle3), SpecForge (llama3_eagle.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recserve.drafters.eagle.files import (
    LAYERS,
    OUTPUTS,
    eagle_tensor_names,
    read_eagle_config,
    read_target_layers,
)
from recserve.drafters.eagle.network import EagleConfig
from recserve.drafters.shared.questions import (
    join_numbers,
    place_field,
    rotary_questions,
    vocabulary_questions,
)
from recserve.models.decoder import FINAL_LAYER
from recserve.models.language_model import LanguageModel
from recserve.models.loading import read_json
from recserve.speculation.open_question import CheckpointAmbiguity, CheckpointReading

NESTED = ("eagle_config",)
FED_BACK = {False: "the output before its norm", True: "the normalised output"}
RESIDUAL = {False: "the feature", True: "the normalised feature"}


def eagle_questions(folder: Path, target: LanguageModel) -> tuple[CheckpointAmbiguity, ...]:
    """Returns what the files of a folder leave open for a target.

    Raises:
        UnsupportedModel: If the configuration cannot be read.
    """
    fields = read_json(folder / "config.json")
    config = read_eagle_config(fields, eagle_tensor_names(folder), target)
    decoder = target.config.decoder
    return (
        *(_fused_questions(fields, config, decoder.num_layers) if config.fused else ()),
        *rotary_questions(fields, config.decoder, decoder),
        *vocabulary_questions(folder, config.vocab_size),
    )


def _fused_questions(
    fields: Mapping[str, Any], config: EagleConfig, depth: int
) -> Iterator[CheckpointAmbiguity]:
    taken = read_target_layers(dict(fields), depth)
    readings = []
    for shift in (1, -1):
        moved = [number + shift for number in taken.layers]
        if taken.layers != (FINAL_LAYER,) and min(moved) >= 0 and max(moved) <= depth:
            change: dict[str, Any] = {OUTPUTS: None, LAYERS: moved}
            if fields.get("eagle_config"):
                change["eagle_config"] = {LAYERS: None, OUTPUTS: None}
            readings.append(CheckpointReading(f"after layer {join_numbers(moved)}", change))
    default = "the final state"
    if taken.layers != (FINAL_LAYER,):
        default = f"after layer {join_numbers(taken.layers)}"
    yield CheckpointAmbiguity("layers", default, tuple(readings), taken.reason)
    for name, key, answers in (
        ("fed back", "norm_output", FED_BACK),
        ("residual", "norm_before_residual", RESIDUAL),
    ):
        flag = bool(getattr(config, key))
        other = CheckpointReading(answers[not flag], place_field(fields, key, not flag, NESTED))
        yield CheckpointAmbiguity(name, answers[flag], (other,))

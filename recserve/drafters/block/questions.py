"""What the files of a block drafter leave open.

    layers       the ids name outputs of layers (DFlash) or hidden states (speculators)
    attention    the rows of a block see only the rows before them, or all rows
    anchor       the row of the anchor proposes the first token, or the first mask does

See shared_questions.py for the others. Sources: z-lab/dflash, vLLM (qwen3_dflash.py), speculators
(models/dflash), JetSpec (draft_head.py), NeMo.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recserve.drafters.block.files import block_tensor_names
from recserve.drafters.block.layouts import read_block_config
from recserve.drafters.block.network import BlockConfig
from recserve.drafters.shared.questions import (
    INNER,
    join_numbers,
    place_field,
    rotary_questions,
    vocabulary_questions,
)
from recserve.models.language_model import LanguageModel
from recserve.models.loading import read_json
from recserve.speculation.open_question import CheckpointAmbiguity, CheckpointReading

LAYERS = ("aux_hidden_state_layer_ids", "target_layer_ids", "dspark_target_layer_ids")
NESTED = ("dflash_config", INNER)
CAUSAL = {True: "causal within a block", False: "in both directions within a block"}
ANCHOR = {True: "the anchor's row proposes", False: "only the masks' rows propose"}


def block_questions(folder: Path, target: LanguageModel) -> tuple[CheckpointAmbiguity, ...]:
    """Returns what the files of a folder leave open for a target.

    Raises:
        UnsupportedModel: If the configuration cannot be read.
    """
    fields = read_json(folder / "config.json")
    config, _ = read_block_config(fields, block_tensor_names(folder, target), target)
    decoder = target.config.decoder
    return (
        _layers(fields, config, decoder.num_layers),
        _attention(fields, config),
        *_anchor(fields, config),
        *rotary_questions(fields, config.decoder, decoder, NESTED[0]),
        *vocabulary_questions(folder, config.vocab_size),
    )


def _layers(fields: Mapping[str, Any], config: BlockConfig, depth: int) -> CheckpointAmbiguity:
    nested = fields.get("dflash_config") or {}
    key = next(name for name in LAYERS if nested.get(name) or fields.get(name))
    ids = nested.get(key) or fields[key]
    readings = []
    for shift in (1, -1):
        moved = [number + shift for number in config.target_layers]
        if min(moved) >= 0 and max(moved) <= depth:
            change = place_field(fields, key, [int(number) + shift for number in ids], NESTED)
            readings.append(CheckpointReading(f"after layer {join_numbers(moved)}", change))
    return CheckpointAmbiguity(
        "layers", f"after layer {join_numbers(config.target_layers)}", tuple(readings)
    )


def _attention(fields: Mapping[str, Any], config: BlockConfig) -> CheckpointAmbiguity:
    flags = set(config.causal)
    taken = CAUSAL[config.causal[0]] if len(flags) == 1 else "causal in some layers"
    readings = tuple(
        CheckpointReading(CAUSAL[other], place_field(fields, "is_causal", other, (INNER,)))
        for other in (True, False)
        if flags != {other}
    )
    return CheckpointAmbiguity("attention", taken, readings)


def _anchor(fields: Mapping[str, Any], config: BlockConfig) -> Iterator[CheckpointAmbiguity]:
    if config.selector is None:  # DFlash2 predicts from masks only
        other = not config.from_anchor
        change = place_field(fields, "sample_from_anchor", other, NESTED)
        yield CheckpointAmbiguity(
            "anchor", ANCHOR[config.from_anchor], (CheckpointReading(ANCHOR[other], change),)
        )

"""What the files of a SpecFormer network leave open: direction of attention, and layers."""

from __future__ import annotations

from pathlib import Path

from recserve.drafters.shared.questions import join_numbers
from recserve.drafters.specformer.files import read_specformer_config
from recserve.models.decoder import FINAL_LAYER
from recserve.models.language_model import LanguageModel
from recserve.models.loading import read_json
from recserve.speculation.open_question import CheckpointAmbiguity, CheckpointReading

CAUSAL = {True: "causal between the slots", False: "in both directions between the slots"}


def specformer_questions(folder: Path, target: LanguageModel) -> tuple[CheckpointAmbiguity, ...]:
    """Returns what the files of a folder leave open for a target.

    Raises:
        UnsupportedModel: If the configuration cannot be read.
    """
    config = read_specformer_config(read_json(folder / "config.json"), target)
    depth, other = target.config.decoder.num_layers, not config.causal
    hooks = [depth if layer == FINAL_LAYER else layer for layer in config.target_layers]
    moved = [[hook + shift for hook in hooks] for shift in (1, -1)]
    readings = tuple(
        CheckpointReading(join_numbers(own), {"hook_list": own})
        for own in moved
        if min(own) >= 0 and max(own) <= depth
    )
    attention = CheckpointReading(CAUSAL[other], {"is_causal": other})
    return (
        CheckpointAmbiguity("attention", CAUSAL[config.causal], (attention,)),
        CheckpointAmbiguity("layers", join_numbers(hooks), readings),
    )

"""What the files of MTP modules leave open.

    fed back    the output before or after its norm goes into the next level
    state       the target's final state, or its residual stream after the last layer, goes in

DeepSeek's modules feed back the output before the norm, Qwen3-Next's the one after it. No layout
says so.
"""

from __future__ import annotations

from pathlib import Path

from recserve.drafters.mtp.files import read_mtp_config
from recserve.models.decoder import FINAL_LAYER
from recserve.models.language_model import LanguageModel
from recserve.speculation.open_question import CheckpointAmbiguity, CheckpointReading

FED_BACK = {False: "the output before its norm", True: "the normalised output"}


def mtp_questions(folder: Path, target: LanguageModel) -> tuple[CheckpointAmbiguity, ...]:
    """Returns what the files of a folder leave open for a target.

    Raises:
        UnsupportedModel: If the configuration cannot be read.
    """
    config, depth = read_mtp_config(folder, target), target.config.decoder.num_layers
    other = not config.feeds_norm
    states = {FINAL_LAYER: "the final state", depth: "the stream before the final norm"}
    given = next(layer for layer in states if layer != config.target_layer)
    return (
        CheckpointAmbiguity(
            "fed back",
            FED_BACK[config.feeds_norm],
            (CheckpointReading(FED_BACK[other], {"norm_output": other}),),
        ),
        CheckpointAmbiguity(
            "state",
            states[config.target_layer],
            (
                CheckpointReading(
                    states[given], {"target_layer_ids": None if given == FINAL_LAYER else [given]}
                ),
            ),
        ),
    )

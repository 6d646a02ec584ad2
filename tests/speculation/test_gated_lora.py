"""When two sets of mask tokens are one."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from recserve.drafters.mask_tokens.gated_lora import GatedLora
from recserve.models.config import DecoderConfig

CONFIG = DecoderConfig(8, 2, 1, 1, 8, 8)
A, B = Path("a"), Path("b")


@pytest.mark.parametrize(
    ("folders", "alphas", "changed", "equal"),
    [
        ((A, A), (4.0, 4.0), "", True),
        ((A, B), (4.0, 4.0), "", False),
        ((None, None), (4.0, 4.0), "", False),
        ((A, A), (4.0, 8.0), "", False),
        ((A, B), (4.0, 8.0), "", False),
        ((A, A), (4.0, 4.0), "embeddings", False),
        ((A, A), (4.0, 4.0), "layers.1.down.ups.0", False),
    ],
)
def test_two_sets_are_one_if_all_is_equal(folders, alphas, changed, equal):
    """Folder, alpha and every weight; a folder may have been written again in between."""
    pair = [GatedLora(CONFIG, 2, 2, alpha) for alpha in alphas]
    pair[1].load_state_dict(deepcopy(pair[0].state_dict()))
    for lora, folder in zip(pair, folders, strict=True):
        lora.folder = folder
    if changed:
        with torch.no_grad():
            pair[1].get_parameter(changed).view(-1)[-1] += 1
    assert pair[0].equals(pair[1]) == pair[1].equals(pair[0]) == equal
    assert pair[0].equals(pair[0])

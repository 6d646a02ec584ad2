"""Fields of public drafter files that change nothing, and those of the same kind that would."""

import random

import pytest
import torch

from recserve.drafters.block.files import load_block
from recserve.drafters.eagle.files import load_eagle
from recserve.drafters.mtp.files import load_mtp
from recserve.models.loading import UnsupportedModel
from tests.support.drafter_folders import changed_copy, uneven_model, write_drawn

LOADERS = {
    "eagle-1": load_eagle,
    "eagle-3": load_eagle,
    "dflash": load_block,
    "dspark": load_block,
    "mtp": load_mtp,
}
# What speculators, ModelOpt, SpecForge and AngelSlim write beside the sizes of a network.
HARMLESS = {
    "has_no_defaults_at_init": False,
    "base_model_tp_plan": None,
    "base_model_pp_plan": {"layers": [["hidden_states"], ["hidden_states"]]},
    "base_model_ep_plan": None,
    "num_local_experts": 32,
    "experts_per_token": 4,
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "video_token_id": 151656,
    "attn_implementation": "sdpa",
    "router_aux_loss_coef": 0.9,
    "pad_token_id": None,
}
HARMFUL = {
    "position_embedding_type": "alibi",
    "num_key_value_groups_of_tomorrow": 2,
    "attention_multiplier": 0.5,
    "hidden_act": "gelu",
    "model_type": "gemma2",
}


def opened(kind, folder):
    """Returns the tensors of the network that a folder holds."""
    return LOADERS[kind](folder, uneven_model()).state_dict()


@pytest.mark.parametrize("kind", LOADERS)
def test_harmless_fields_change_nothing_and_harmful_ones_are_named(tmp_path, kind):
    draw, folder = random.Random(kind), write_drawn(kind, tmp_path / "as-written")
    expected = opened(kind, folder)
    for number in range(6):
        added = dict(draw.sample(sorted(HARMLESS.items()), draw.randint(1, len(HARMLESS))))
        copy = changed_copy(folder, tmp_path / f"{number}", lambda f, _, a=added: f.update(a))
        found = opened(kind, copy)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    for name, value in HARMFUL.items():
        change = {name: value}
        copy = changed_copy(folder, tmp_path / name, lambda f, _, c=change: f.update(c))
        with pytest.raises(UnsupportedModel, match=name):
            opened(kind, copy)


@pytest.mark.parametrize("bias", [False, True])
def test_vllms_form_of_eagle_1(tmp_path, bias):
    """All fields lie inside `model`; `eagle_fc_bias` says what the tensors say."""

    def nest(fields, weights):
        inner = dict(fields)
        if bias:
            inner["eagle_fc_bias"] = inner["bias"] = True
            weights["fc.bias"] = torch.ones(weights["fc.weight"].shape[0])
        else:
            inner["bias"] = False
            weights.pop("fc.bias", None)
        fields.clear()
        fields |= {"model_type": "eagle", "model": inner}

    folder = write_drawn("eagle-1", tmp_path / "as-written")
    nested = opened("eagle-1", changed_copy(folder, tmp_path / "nested", nest))
    plain = opened("eagle-1", folder)
    assert nested.keys() - {"fc.bias"} == plain.keys() - {"fc.bias"}
    assert all(torch.equal(nested[name], plain[name]) for name in plain if name != "fc.bias")
    assert ("fc.bias" in nested) == bias

    def contradict(fields, weights):
        nest(fields, weights)
        fields["model"]["eagle_fc_bias"] = not bias

    with pytest.raises(UnsupportedModel, match="eagle_fc_bias"):
        opened("eagle-1", changed_copy(folder, tmp_path / "wrong", contradict))

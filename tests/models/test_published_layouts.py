"""Public layouts of draft heads: each opens as it comes and computes what its authors' code does.

What is not read is refused in words. docs/reference/drafter-files.md has the table.
"""

import json
from dataclasses import replace

import pytest
import torch

from recserve.drafters.block.files import load_block
from recserve.drafters.eagle.files import load_eagle, save_eagle
from recserve.drafters.mtp.files import load_mtp
from recserve.models.attention import DenseAttention
from recserve.models.language_model import LanguageModel
from recserve.models.loading import UnsupportedModel
from tests.support import published_block, published_eagle, published_mtp
from tests.support.published_eagle import PUBLIC, WINDOWS, Published, inner, peagle
from tests.support.published_mtp import write_folder
from tests.support.text_plain import drawn_model


def target_of(depth: int, positions: int = 64) -> LanguageModel:
    """Returns drawn_model(0) with another number of layers."""
    config = drawn_model(0).config
    decoder = replace(config.decoder, num_layers=depth, max_positions=positions)
    model = LanguageModel(replace(config, decoder=decoder)).requires_grad_(False).eval()
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.copy_(torch.randn(weight.shape))
    return model


@pytest.fixture(scope="module")
def target():
    return target_of(6)


@pytest.mark.parametrize("name", PUBLIC)
@torch.inference_mode()
def test_a_head_computes_what_its_authors_code_does(name, tmp_path, target):
    """Rows that read the target's states, and then rows that read outputs of rows before."""
    torch.manual_seed(0)
    make, layers = PUBLIC[name]
    fields, weights = make()
    network = load_eagle(write_folder(tmp_path / "head", fields, weights), target)
    assert network.config.target_layers == layers
    theirs, attend = Published(fields, weights), DenseAttention()
    states, embedded = torch.randn(7, network.config.num_features), torch.randn(9, 32)
    ours, expected = network.features(states), theirs.features(states)
    for count in (7, 8, 9):
        outputs = network(ours[None], embedded[None, :count], torch.arange(count), attend)[0]
        found = theirs.outputs(expected, embedded[:count])
        fed_back = theirs.last(found) if theirs.fields.get("norm_output") else found
        torch.testing.assert_close(outputs, fed_back, rtol=1e-3, atol=1e-3)
        logits = network.logits(outputs, target)
        torch.testing.assert_close(logits, theirs.logits(found, target), rtol=1e-3, atol=1e-3)
        ours, expected = (
            torch.cat([x, y[-1:]]) for x, y in ((ours, outputs), (expected, fed_back))
        )
    save_eagle(network, tmp_path / "saved")
    again = load_eagle(tmp_path / "saved", target)
    assert again.config == network.config
    for key, weight in network.state_dict().items():
        assert torch.equal(weight, again.state_dict()[key]), key


@pytest.mark.parametrize("make", [published_eagle.speculators, peagle])
def test_windows_of_2048_positions_are_read_where_texts_are_longer(make, tmp_path):
    torch.manual_seed(0)
    long = target_of(6, positions=4096)
    network = load_eagle(write_folder(tmp_path, *inner(make, **WINDOWS)), long)
    assert {view.window for view in network.config.views} == {2048}


def modelopt_windows() -> tuple[dict, dict]:
    """ModelOpt's DFlash: all layers see a window, in both directions."""
    fields, weights = published_block.dflash()
    nested = fields["dflash_config"] | {"use_swa": True, "swa_window_size": 20, "causal": False}
    return fields | {"sliding_window": 20, "dflash_config": nested}, weights


def test_windows_of_modelopts_dflash(tmp_path):
    torch.manual_seed(0)
    network = load_block(write_folder(tmp_path, *modelopt_windows()), drawn_model(0))
    assert network.config.windows == (20, 20) and network.config.causal == (False, False)


# Drafters of each loader: the folder, the loader, the object inside it, a field of the top.
LOADERS = {
    "eagle": (published_eagle.eagle3, load_eagle, "eagle_config", "rope_theta"),
    "speculators": (
        published_eagle.speculators,
        load_eagle,
        "transformer_layer_config",
        "norm_output",
    ),
    "block": (published_block.dflash, load_block, "dflash_config", "layer_types"),
    "mtp": (published_mtp.speculators, load_mtp, "transformer_layer_config", "eagle_config"),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_field_has_one_value_in_the_place_where_it_is_read(kind, tmp_path):
    """A field of the top inside an object, and a size with two values, are refused."""
    torch.manual_seed(0)
    make, load, place, foreign = LOADERS[kind]
    (fields, weights), target = make(), drawn_model(0)
    objects = fields[place]

    def refusal(changed: dict) -> str:
        with pytest.raises(UnsupportedModel) as caught:
            load(write_folder(tmp_path / "head", changed, weights), target)
        return str(caught.value)

    said = refusal(fields | {place: objects | {foreign: fields.get(foreign, True)}})
    assert f"unknown field {foreign!r} inside {place}" in said
    for name, value in objects.items():
        if name in ("model_type", "torch_dtype", "eagle_aux_hidden_state_layer_ids"):
            continue
        other = 7 if isinstance(value, int) else 0.5
        assert name in refusal(fields | {name: other}), name
    rope = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    rope["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    inside = place == "transformer_layer_config"
    both = {place: objects | rope} if inside else rope
    assert "remove the wrong one" in refusal(fields | both)


@pytest.mark.parametrize("kind", LOADERS)
def test_mrope_is_the_default_for_texts(kind, tmp_path):
    torch.manual_seed(0)
    make, load, place, *_ = LOADERS[kind]
    (fields, weights), target = make(), drawn_model(0)
    plain = load(write_folder(tmp_path / "plain", fields, weights), target).config
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}}
    inside = place == "transformer_layer_config"
    changed = fields | ({place: fields[place] | rope} if inside else rope)
    assert load(write_folder(tmp_path / "mrope", changed, weights), target).config == plain
    assert json.loads((tmp_path / "mrope" / "config.json").read_text()) == changed

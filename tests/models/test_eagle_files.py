"""EAGLE's published layouts: written here tensor by tensor, read back, and refused where wrong."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from recserve.drafters.eagle.files import load_eagle, read_target_layers, save_eagle
from recserve.drafters.eagle.network import Eagle
from recserve.drafters.eagle.questions import eagle_questions
from recserve.drafters.mtp.files import load_mtp, save_mtp
from recserve.drafters.shared.feature_network import LayerView
from recserve.models.attention import Attend
from recserve.models.config import RopeScaling
from recserve.models.decoder import FINAL_LAYER
from recserve.models.language_model import LanguageModel
from recserve.models.loading import UnsupportedModel
from recserve.speculation.open_question import write_view
from tests.support.mtp_drafter import mtp
from tests.support.mtp_drafter import peagle as parallel
from tests.support.published_eagle import (
    LAYOUTS,
    SIZES,
    eagle3,
    peagle,
    speculators,
)
from tests.support.published_mtp import write_folder as written
from tests.support.text_engines import eagle
from tests.support.text_plain import VOCABULARY, drawn_model


@pytest.fixture(scope="module")
def target():
    return drawn_model(0)


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3", "mtp"])
def test_biases_and_scaled_positions_of_the_target_are_saved(kind, tmp_path):
    """Qwen2 has biases on queries, keys and values alone; Llama 3.1 scales its positions."""
    plain = drawn_model(0).config
    scaled = replace(
        plain.decoder,
        attention_bias=True,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16),
    )
    target = LanguageModel(replace(plain, decoder=scaled)).requires_grad_(False)
    if kind == "mtp":
        network, load = mtp(target).network, load_mtp
        save_mtp(network, tmp_path, scaled.num_layers)
    else:
        network, load = eagle(target, kind == "eagle-3").network, load_eagle
        save_eagle(network, tmp_path)
    again = load(tmp_path, target)
    assert again.config == network.config
    assert torch.equal(again._frequencies, network._frequencies)
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def in_pairs(weight: torch.Tensor, dim: int = 8) -> torch.Tensor:
    """Returns rows 0 4 1 5 2 6 3 7 of each head, so that neighbours turn together."""
    halves = weight.unflatten(0, (-1, 2, dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


@pytest.mark.parametrize("name", ["eagle-1", "speculators", "deepspec"])
def test_rotary_pairs_are_read_as_halves(name, tmp_path, target):
    fields, weights = LAYOUTS[name]()
    halves = load_eagle(written(tmp_path / "halves", fields, weights), target)
    for key in list(weights):
        if any(part in key for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
            weights[key] = in_pairs(weights[key])
    pairs = load_eagle(
        written(tmp_path / "pairs", fields | {"is_neox_style": False}, weights), target
    )
    for key, weight in halves.state_dict().items():
        assert torch.equal(weight, pairs.state_dict()[key]), key


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_other_reading_loads_and_says_so(name, tmp_path, target):
    fields, weights = LAYOUTS[name]()
    folder = written(tmp_path / "head", fields, weights)
    taken = load_eagle(folder, target)
    for number, question in enumerate(eagle_questions(folder, target)):
        for reading in question.others:
            view = write_view(folder, reading, tmp_path / f"{number}-{reading.answer}")
            other = load_eagle(view, target)
            same = torch.equal(other.layers[0].qkv.weight, taken.layers[0].qkv.weight)
            assert other.config != taken.config or not same, question.name
            again = {one.name: one.default for one in eagle_questions(view, target)}
            assert again.get(question.name, reading.answer) == reading.answer


@pytest.mark.parametrize("ids", [False, True], ids=["offsets", "ids"])
def test_a_map_without_t2d_is_an_open_question(ids, tmp_path, target):
    """Token ids that are valid offsets too load in silence, so both readings are listed."""
    fields, weights = eagle3()
    tokens = torch.tensor([1, 2, 3, 5, 8, 9, 11, 14, 15, 18, 20, 24, 25])
    weights["d2t"] = tokens if ids else tokens - torch.arange(13)
    weights["lm_head.weight"] = torch.randn(13, 32)
    fields = fields | {"draft_vocab_size": 13}
    folder = written(tmp_path / "full", fields, weights)
    with pytest.raises(UnsupportedModel, match="d2t"):
        load_eagle(folder, target)  # t2d tells
    del weights["t2d"]
    folder = written(tmp_path / "head", fields, weights)
    read = load_eagle(folder, target).token_map.tolist()
    assert (read == tokens.tolist()) != ids
    names = [question.name for question in eagle_questions(folder, target)]
    if not ids:
        assert "vocabulary" not in names  # as ids, some offsets would repeat
        return
    question = eagle_questions(folder, target)[names.index("vocabulary")]
    view = write_view(folder, question.others[0], tmp_path / "view")
    assert load_eagle(view, target).token_map.tolist() == tokens.tolist()


def deep_target(num_layers: int) -> LanguageModel:
    plain = drawn_model(0).config
    return LanguageModel(replace(plain, decoder=replace(plain.decoder, num_layers=num_layers)))


def sglang_layers(fields: dict) -> list[int] | None:
    """SGLang's rule for the ids in eagle_config: + 1 if they begin with 1."""
    ids = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return None if not ids else [n + (ids[0] == 1) for n in ids]


def vllm_layers(fields: dict) -> list[int] | None:
    """vLLM's rule: ids at the top as they are, DeepSpec's + 1."""
    ids = fields.get("eagle_aux_hidden_state_layer_ids")
    return ids or [n + 1 for n in fields.get("target_layer_ids") or ()] or None


@given(ids=st.lists(st.integers(0, 6), min_size=3, max_size=3, unique=True).map(sorted))
@settings(max_examples=25, deadline=None)
def test_layer_ids_are_read_as_others_read_them(ids):
    """Files of others: nested as SGLang, at the top and DeepSpec's as vLLM."""
    key = "eagle_aux_hidden_state_layer_ids"
    other = SIZES | {"architectures": ["LlamaForCausalLMEagle3"]}
    nested = other | {"eagle_config": {key: ids, "use_aux_hidden_state": True}}
    assert list(read_target_layers(nested, 8).layers) == sglang_layers(nested)
    for fields in (other | {key: ids}, other | {"target_layer_ids": ids}):
        assert list(read_target_layers(fields, 8).layers) == vllm_layers(fields)


@given(
    depth=st.integers(3, 12),
    numbers=st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True).map(sorted),
)
@settings(max_examples=25, deadline=None)
def test_saved_layers_are_read_alike_by_all(tmp_path_factory, depth, numbers):
    """What SGLang cannot be told is not told in the place that it reads."""
    layers = tuple(n for n in numbers if n <= depth) or (1,)
    target = deep_target(depth)
    made = eagle(target, True, seed=2).network.config
    network = Eagle(
        replace(made, target_layers=layers, draft_vocab_size=VOCABULARY)
    ).requires_grad_(False)
    folder = tmp_path_factory.mktemp("head")
    save_eagle(network, folder)
    fields = json.loads((folder / "config.json").read_text())
    assert load_eagle(folder, target).config.target_layers == layers
    assert vllm_layers(fields) == list(layers)
    assert sglang_layers(fields) in (list(layers), None)
    assert (sglang_layers(fields) is None) == (layers[0] == 1)


def test_a_head_saved_by_an_older_version_means_what_it_meant(tmp_path):
    """It has ids in eagle_config alone, which named inputs even where they begin with 1."""
    target = deep_target(5)
    made = eagle(target, True, seed=2).network.config
    save_eagle(
        Eagle(replace(made, target_layers=(1, 2, 4), draft_vocab_size=VOCABULARY)).requires_grad_(
            False
        ),
        tmp_path,
    )
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2, 4]
    del fields["eagle_aux_hidden_state_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load_eagle(tmp_path, target).config.target_layers == (1, 2, 4)
    fields["architectures"] = ["LlamaForCausalLMEagle3"]  # as others write them
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load_eagle(tmp_path, target).config.target_layers == (2, 3, 5)


def test_two_fields_that_name_different_layers_are_refused():
    key, other = "eagle_aux_hidden_state_layer_ids", {"architectures": ["A"]}
    fields = other | {key: [2, 4, 6], "eagle_config": {key: [1, 3, 5]}}
    assert read_target_layers(fields, 8).layers == (2, 4, 6)  # the same layers, told twice
    fields = other | {key: [2, 4, 6], "eagle_config": {key: [2, 4, 5]}}
    with pytest.raises(UnsupportedModel, match=r"\(2, 4, 6\).*\(2, 4, 5\)"):
        read_target_layers(fields, 8)
    for wrong in ("1,2", [1, "2"], [1.5], {"a": 1}, [True]):
        with pytest.raises(UnsupportedModel, match="a list of layers is needed"):
            read_target_layers(other | {key: wrong}, 8)


def test_a_head_on_the_final_state_has_no_projection(tmp_path, target):
    """`use_aux_hidden_state: false`: vLLM reads the final state as the feature."""
    fields, weights = eagle3()
    fields = fields | {"eagle_config": {"use_aux_hidden_state": False}}
    with pytest.raises(UnsupportedModel, match=r"'fc.weight'"):
        load_eagle(written(tmp_path / "three", fields, weights), target)
    del weights["fc.weight"]
    network = load_eagle(written(tmp_path / "head", fields, weights), target)
    assert network.config.target_layers == (FINAL_LAYER,)
    states = torch.randn(5, 32)
    assert torch.equal(network.features(states), states)
    save_eagle(network, tmp_path / "again")
    assert load_eagle(tmp_path / "again", target).config == network.config


WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"]}


def test_windows_are_read_by_the_rule_of_their_layout(tmp_path, target):
    """The default of speculators, and the same fields in other layouts."""
    fields, weights = speculators()
    fields["transformer_layer_config"] = SIZES | WINDOWED
    network = load_eagle(written(tmp_path / "speculators", fields, weights), target)
    assert network.config.views == (LayerView(window=5),)
    for more in ({"use_sliding_window": None}, {"layer_types": None}):
        fields["transformer_layer_config"] = SIZES | WINDOWED | more
        network = load_eagle(written(tmp_path / "less", fields, weights), target)
        assert network.config.views == (LayerView(window=5),), more
    fields["transformer_layer_config"] = SIZES | WINDOWED | {"sliding_window": 2048}
    network = load_eagle(written(tmp_path / "long", fields, weights), target)
    assert network.config.views == ()  # the target has 64 positions
    fields, weights = peagle()
    inner = WINDOWED | {"layer_types": ["full_attention", "sliding_attention"]}
    fields["transformer_layer_config"] |= inner
    network = load_eagle(written(tmp_path / "p-eagle", fields, weights), target)
    assert network.config.views == (LayerView(moves=True), LayerView(window=5, moves=True))
    fields, weights = eagle3()
    network = load_eagle(written(tmp_path / "eagle-3", fields | WINDOWED, weights), target)
    assert network.config.views == (LayerView(window=5, moves=True),)


@pytest.mark.parametrize(
    "name", ["eagle-1", "eagle-3", "speculators", "speculators of two layers", "p-eagle"]
)
@given(window=st.integers(1, 63), kinds=st.lists(st.booleans(), min_size=2, max_size=2))
@settings(max_examples=8, deadline=None)
def test_saved_windows_are_read_back(tmp_path_factory, name, window, kinds):
    """By this loader, and by vLLM's rule: a kind per layer and one `sliding_window`."""
    target, folder = drawn_model(0), tmp_path_factory.mktemp("head")
    fields, weights = (peagle if " " in name or name == "p-eagle" else LAYOUTS[name])()
    if name == "speculators of two layers":
        del weights["mask_hidden"], weights["embed_tokens.weight"], fields["mask_token_id"]
        fields["speculators_model_type"] = "eagle3"
    inner = fields.get("transformer_layer_config", fields)
    kinds = [True, *kinds[1:]][: inner["num_hidden_layers"]]
    types = ["sliding_attention" if kind else "full_attention" for kind in kinds]
    own = {"use_sliding_window": True, "sliding_window": window, "layer_types": types}
    fields = fields | (
        {"transformer_layer_config": inner | own} if "transformer_layer_config" in fields else own
    )
    network = load_eagle(written(folder / "head", fields, weights), target)
    assert [view.window for view in network.config.views] == [window * kind for kind in kinds]
    save_eagle(network, folder / "saved")
    again = load_eagle(folder / "saved", target)
    assert again.config == network.config
    for key, weight in network.state_dict().items():
        assert torch.equal(weight, again.state_dict()[key]), key
    said = json.loads((folder / "saved" / "config.json").read_text())
    assert {key: said[key] for key in own} == own


def test_windows_without_a_layout_are_not_saved(target, tmp_path):
    for views in (
        (LayerView(window=5, moves=True), LayerView(window=6, moves=True)),
        (LayerView(window=5), LayerView(window=5)),
    ):
        network = parallel(target, fields={"views": views}).network
        with pytest.raises(ValueError, match="windows? "):
            save_eagle(network, tmp_path)


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
LONG = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 2.0, 5.0, 9.0]}
LONG |= {"rope_type": "longrope", "original_max_position_embeddings": 32}


class Queries(Attend):
    """An `Attend` that keeps the queries."""

    def __call__(self, number, query, key, value):
        self.queries = query
        return query


@pytest.mark.parametrize("rope", [YARN, LONG], ids=["yarn", "longrope"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_scaled_positions_of_a_head_equal_transformers(name, rope, tmp_path, target):
    """ModelOpt's default, and longrope: the target serves 64 positions, so its long factors."""
    fields, weights = LAYOUTS[name]()
    place = fields.get("transformer_layer_config", fields)
    fields = json.loads(json.dumps(fields))
    fields.get("transformer_layer_config", fields)["rope_scaling"] = rope
    network = load_eagle(written(tmp_path / "scaled", fields, weights), target)
    own = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
    config = LlamaConfig(**{n: place[n] for n in own}, rope_parameters={"rope_theta": 1e4} | rope)
    theirs = LlamaRotaryEmbedding(config)
    theirs(torch.zeros(1), torch.arange(64)[None])
    assert network.config.decoder.rope_scale == pytest.approx(theirs.attention_scaling, rel=1e-5)
    torch.testing.assert_close(network._frequencies, theirs.inv_freq, rtol=1e-5, atol=0)
    plain = load_eagle(written(tmp_path / "plain", *LAYOUTS[name]()), target)
    plain.load_state_dict(network.state_dict())
    sizes = []
    for one in (network, plain):
        attend = Queries()
        torch.manual_seed(1)
        features, embedded = torch.randn(1, 5, 32), torch.randn(1, 5, 32)
        one(features, embedded, torch.arange(5), attend)
        sizes.append(attend.queries.norm(dim=-1))
    torch.testing.assert_close(sizes[0], sizes[1] * network.config.decoder.rope_scale)
    save_eagle(network, tmp_path / "again")
    again = load_eagle(tmp_path / "again", target).config.decoder
    assert (again.rope_scaling, again.rope_theta) == (
        network.config.decoder.rope_scaling,
        network.config.decoder.rope_theta,
    )

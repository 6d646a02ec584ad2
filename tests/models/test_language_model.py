"""Language models from folders: logits equal to transformers, and refusals that say why."""

import json
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from recserve.files import parse_record
from recserve.kernels.cache.kv_pool import KVPool, KVShape
from recserve.kernels.tree import chain
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.attention import DenseAttention, PagedAttention, Rope, rope_frequencies
from recserve.models.config import DecoderConfig
from recserve.models.decoder import AuxHiddenStates
from recserve.models.loading import UnsupportedModel, load_language_model, read_config
from recserve.models.packing import PackedLinear, pack_weights, packable
from recserve.models.saving import rope_fields, save_language_model
from tests.support.model_folders import FAMILIES, LLAMA3, drawn


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_equal_transformers(family, tmp_path):
    for seed in range(2):
        theirs = drawn(tmp_path, family, seed)
        ours = load_language_model(tmp_path)
        tokens = torch.randint(0, 61, (2, 40))
        for start in (0, 3000):
            positions = torch.arange(start, start + 40).expand(2, -1)
            expected = theirs(tokens, position_ids=positions).logits
            logits = ours.logits(ours(tokens, positions, DenseAttention()))
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_shards_are_the_same_model(tmp_path):
    drawn(tmp_path / "one", "qwen2")
    drawn(tmp_path / "many", "qwen2", shard="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = load_language_model(tmp_path / "one"), load_language_model(tmp_path / "many")
    for ours, theirs in zip(one.parameters(), many.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@torch.inference_mode()
def test_dtype_is_the_configuration_s_unless_asked(tmp_path):
    drawn(tmp_path, "llama")
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"dtype": "bfloat16"}))
    assert load_language_model(tmp_path).tokens.weight.dtype == torch.bfloat16
    assert load_language_model(tmp_path, torch.float32).tokens.weight.dtype == torch.float32


def test_end_of_text_tokens_come_from_both_files(tmp_path):
    """Chat models name theirs in generation_config.json."""
    drawn(tmp_path, "llama")
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert load_language_model(tmp_path).config.eos_tokens == (2, 7, 9)


def test_older_rope_fields_mean_the_same(tmp_path):
    drawn(tmp_path, "llama-3.1")
    fields = json.loads((tmp_path / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    older = fields | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert read_config(older) == read_config(fields | {"rope_parameters": LLAMA3})
    assert read_config(older).decoder.rope_scaling is not None


KINDS = st.sampled_from(["linear", "llama3", "yarn", "longrope"])


@st.composite
def ropes(draw, head_dim: int = 8) -> dict:
    """Draws rope parameters as transformers takes them."""
    kind = draw(KINDS)
    rope = {"rope_type": kind, "rope_theta": draw(st.sampled_from([500.0, 1e4, 5e5]))}
    rope["factor"] = draw(st.sampled_from([1.0, 2.0, 3.7, 32.0]))
    if kind == "linear":
        return rope
    rope["original_max_position_embeddings"] = draw(st.sampled_from([16, 64, 512, 4096]))
    if kind == "llama3":
        return rope | {"low_freq_factor": 1.0, "high_freq_factor": draw(st.floats(1.5, 8.0))}
    if draw(st.booleans()):
        rope["attention_factor"] = draw(st.floats(0.5, 2.0))
    if kind == "longrope":
        numbers = st.lists(st.floats(1.0, 50.0), min_size=head_dim // 2, max_size=head_dim // 2)
        return rope | {"short_factor": draw(numbers), "long_factor": draw(numbers)}
    rope |= draw(st.sampled_from([{}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"truncate": False}]))
    return rope | draw(st.sampled_from([{}, {"mscale": 1.0, "mscale_all_dim": 0.7}]))


@given(rope=ropes(), older=st.booleans())
@settings(max_examples=40, deadline=None)
def test_rotary_positions_equal_transformers(rope, older):
    """Cosines and sines of all kinds to 1e-5, from new and from older fields."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 1}
    sizes |= {"intermediate_size": 8, "vocab_size": 9, "max_position_embeddings": 2048}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(rope)))
    fields = sizes | {"model_type": "llama", "rope_parameters": rope}
    if older:
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        fields = sizes | {"model_type": "llama", "rope_scaling": scaling}
        fields["rope_theta"] = rope["rope_theta"]
    config = read_config(fields).decoder
    # The longest served text decides for longrope, so it is among the positions.
    positions = torch.tensor([0, 1, 17, 300, 2047])
    cos, sin = theirs(torch.zeros(1), positions[None])
    ours = Rope(positions, rope_frequencies(config), torch.float32, config.rope_scale)
    torch.testing.assert_close(ours.cos, cos[0, :, :4], rtol=1e-5, atol=1e-5 * 2047**0.5)
    torch.testing.assert_close(ours.sin, sin[0, :, :4], rtol=1e-5, atol=1e-5 * 2047**0.5)
    near = positions < 20
    torch.testing.assert_close(rope_frequencies(config), theirs.inv_freq, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.cos[near], cos[0, near, :4], rtol=1e-5, atol=1e-5)
    kept = parse_record(json.loads(json.dumps(asdict(config))), DecoderConfig)
    assert kept == config
    again = fields | {"rope_scaling": None, "rope_parameters": rope_fields(config)}
    assert read_config(again).decoder == config


@pytest.mark.parametrize("positions", [512, 4096])
@torch.inference_mode()
def test_longrope_is_fixed_by_the_longest_text(positions, tmp_path):
    """A model of 512 positions has the short factors, one of 4,096 the long ones."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512}
    rope |= {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 3.0, 9.0, 30.0]}
    theirs = drawn(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=positions)
    ours, tokens = load_language_model(tmp_path), torch.randint(0, 61, (1, 40))
    places = torch.arange(positions - 40, positions)[None]
    expected = theirs(tokens, position_ids=places).logits
    logits = ours.logits(ours(tokens, places, DenseAttention()))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    save_language_model(ours, tmp_path / "again")
    assert load_language_model(tmp_path / "again").config == ours.config


@pytest.mark.parametrize(
    "content, message",
    [
        ({}, "weight_map is missing"),
        ([], "weight_map is missing"),
        (
            {"weight_map": {"model.norm.weight": "../../outside.safetensors"}},
            "outside.*this folder",
        ),
        ({"weight_map": {"model.norm.weight": "/outside.safetensors"}}, "gives '/outside"),
        ({"weight_map": {"model.norm.weight": 3}}, "gives 3 for model.norm.weight"),
        ({"weight_map": {"model.norm.weight": "gone.safetensors"}}, "gone.safetensors"),
    ],
)
def test_an_index_names_files_of_its_folder(content, message, tmp_path):
    drawn(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match=message):
        load_language_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2"])
@torch.inference_mode()
def test_packed_weights_are_the_same_model(family, dtype, tmp_path):
    """Sums in another order: float32 to 1e-4, bfloat16 to a few of its last bits."""
    drawn(tmp_path, family)
    plain, packed = load_language_model(tmp_path, dtype), load_language_model(tmp_path, dtype)
    pack_weights(packed)
    assert isinstance(packed.head, PackedLinear) == packable(plain.tokens.weight)
    assert isinstance(packed.decoder.layers[0].qkv, PackedLinear) == packable(plain.tokens.weight)
    for rows in (1, 2, 33):
        tokens = torch.randint(0, 61, (1, rows))
        positions = torch.arange(rows)[None]
        ours = packed.logits(packed(tokens, positions, DenseAttention()))
        expected = plain.logits(plain(tokens, positions, DenseAttention()))
        tolerance = 1e-4 if dtype == torch.float32 else 0.06
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def test_a_weight_that_has_no_layout_stays():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 4))
    pack_weights(model)
    assert isinstance(model[0], torch.nn.Linear)
    assert isinstance(model[1], PackedLinear) == packable(torch.zeros(1))


@pytest.mark.parametrize("packed", [False, True], ids=["torch", "packed"])
@torch.inference_mode()
def test_states_between_layers_equal_transformers(packed, tmp_path):
    """Number n is the stream after n layers, and taps change no bit of the final states."""
    theirs = drawn(tmp_path, "qwen3")
    ours = load_language_model(tmp_path)
    if packed:
        pack_weights(ours)
    tokens = torch.randint(0, 61, (40,))
    pool = KVPool(KVShape(3, 2, 16), 10, 8)
    slots, rows = torch.arange(40), torch.tensor([3, 39])
    batch = TreeBatch(chain(tokens), None, slots, Prefixes.of([slots[:0]]))
    expected = theirs(tokens[None], output_hidden_states=True).hidden_states
    for layers in ((0, 1, 2), (2,), (1, 3)):
        for some in (None, rows):
            taps = AuxHiddenStates(layers)
            final = ours(tokens, slots, PagedAttention(batch, pool), some, taps)
            plain = ours(tokens, slots, PagedAttention(batch, pool), some)
            assert torch.equal(final, plain)
            assert len(taps.states) == len(layers)
            for n, states in zip(layers, taps.states, strict=True):
                if n == 3:  # transformers applies the final norm to its last one
                    assert torch.equal(ours.decoder.norm(states), final)
                    continue
                wanted = expected[n][0] if some is None else expected[n][0, rows]
                torch.testing.assert_close(states, wanted, rtol=1e-4, atol=1e-4)

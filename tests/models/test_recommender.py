from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.recommender import Recommender, load_recommender, save_recommender

SIZES = (4, 5, 3)
CODES = torch.tensor([[0, 0, 0], [0, 1, 2], [3, 4, 1], [2, 2, 0], [3, 4, 2]])


def decoder() -> DecoderConfig:
    return DecoderConfig(16, 2, 2, 2, 8, 32)


def build(**values: object) -> Recommender:
    torch.manual_seed(0)
    config = RecommenderConfig(decoder(), SIZES, **values)  # type: ignore[arg-type]
    return Recommender(config).eval()


def items_model(**values: object) -> Recommender:
    model = build(num_items=5, vector_dim=6, id_embedding=True, dense_head=True, **values)
    model.bind_items(CODES, torch.randn(5, 6))
    return model


def test_item_token_is_sum_of_levels_vector_and_id() -> None:
    model = items_model()
    first_item = model.config.num_code_tokens
    assert first_item == 13
    got = model.embed(torch.tensor([0, 3, first_item + 2]))
    table, vector = model.tokens.weight, model.item_vectors
    assert vector is not None
    # Row 2 has codes (3, 4, 1): tokens 1 + 3, 5 + 4, 10 + 1.
    item = table[4] + table[9] + table[11]
    item = item + model.vector_projection(vector[2]) + model.ids.weight[2]
    torch.testing.assert_close(got, torch.stack([table[0], table[3], item]))


def test_item_later_than_training_has_no_id_embedding() -> None:
    model = items_model()
    later = torch.cat([CODES, torch.tensor([[1, 1, 1]])])
    vectors = torch.randn(6, 6)
    model.bind_items(later, vectors)
    got = model.embed_items(torch.tensor([5]))[0]
    unit = vectors[5] / vectors[5].norm()
    expected = model.tokens.weight[[2, 6, 11]].sum(0) + model.vector_projection(unit)
    torch.testing.assert_close(got, expected)
    assert model.dense_scores(torch.randn(2, 16)).shape == (2, 6)


def test_level_logits_are_slices_of_full_logits() -> None:
    model = build(input="codes", normalization="vocabulary")
    hidden = torch.randn(3, 16)
    full = model.full_logits(hidden)
    assert full.shape == (3, 13)
    levels = [model.level_logits(hidden, level) for level in range(3)]
    torch.testing.assert_close(torch.cat(levels, 1), full[:, 1:])


def test_dense_scores_are_log_probabilities_and_follow_new_weights() -> None:
    model = items_model()
    hidden = torch.randn(3, 16)
    with torch.no_grad():
        before = model.dense_scores(hidden)
        torch.testing.assert_close(before.exp().sum(1), torch.ones(3))
        model.train().eval()
        model.tokens.weight.add_(torch.randn_like(model.tokens.weight))
        assert not torch.allclose(model.dense_scores(hidden), before)


def test_level_heads_start_as_the_level_itself() -> None:
    model = build(level_heads=True)
    hidden = torch.randn(3, 16)
    torch.testing.assert_close(model.parallel_logits(hidden, 2), model.level_logits(hidden, 2))
    with pytest.raises(ValueError, match="without level heads"):
        build().parallel_logits(hidden, 0)


@pytest.mark.parametrize("temperature", [0.0, 0.05], ids=["dot", "cosine"])
def test_stacked_level_heads_say_what_each_head_says(temperature: float) -> None:
    """Codebooks of 4, 5 and 3 codes: what pads the shorter ones takes no probability."""
    model = build(level_heads=True, level_temperature=temperature)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    hidden = torch.randn(6, 16)
    with torch.no_grad():
        got = model.level_tables().log_probs(hidden)
        each = [model.parallel_logits(hidden, level).log_softmax(-1) for level in range(3)]
    torch.testing.assert_close(got[:, 1:], torch.cat(each, dim=1))
    assert got.shape == (6, model.config.num_code_tokens) and not got[:, 0].any()
    with pytest.raises(ValueError, match="without level heads"):
        build().level_tables()


def test_cosine_logits_know_no_lengths() -> None:
    model = build(level_heads=True, level_temperature=0.1)
    hidden = torch.randn(2, 16)
    logits = model.parallel_logits(hidden, 1)
    codes = model.level_codes(1)
    expected = torch.cosine_similarity(hidden[:, None], codes[None], dim=-1) / 0.1
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_saved_model_scores_the_same(tmp_path: Path, tied: bool) -> None:
    model = items_model(tied=tied, level_heads=True)
    save_recommender(model, tmp_path)
    loaded = load_recommender(tmp_path, CODES, model.item_vectors)
    assert loaded.config == model.config
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    tokens = torch.tensor([[0, 13, 17, 15]])
    positions = torch.arange(4)
    with torch.no_grad():
        before = model(tokens, positions, DenseAttention())
        after = loaded(tokens, positions, DenseAttention())
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loaded.full_logits(after[0]), model.full_logits(before[0]))
        torch.testing.assert_close(loaded.dense_scores(after[0]), model.dense_scores(before[0]))
    assert loaded.head.weight.data_ptr() == loaded.tokens.weight.data_ptr() or not tied


def test_damaged_files_are_named(tmp_path: Path) -> None:
    save_recommender(build(), tmp_path)
    config = tmp_path / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "colour": 1}))
    with pytest.raises(ValueError, match="config.json: colour is unknown"):
        load_recommender(tmp_path)
    config.write_text(json.dumps({**values, "codebook_sizes": [4, 5, 4]}))
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit"):
        load_recommender(tmp_path)
    config.write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_recommender(tmp_path)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"input": "words"}, "input is 'words'"),
        ({"normalization": "level"}, "normalization is 'level'"),
        ({"input": "codes", "dense_head": True}, "'codes' takes no"),
        ({"id_embedding": True}, "num_items >= 1, got 0"),
        ({"level_temperature": -1.0}, "level_temperature is -1.0"),
        ({"autoregressive": False}, "needs level_heads"),
    ],
)
def test_config_refuses(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**values)


def test_bind_items_refuses_what_does_not_fit() -> None:
    model = items_model()
    with pytest.raises(ValueError, match="the model has 3 levels"):
        model.bind_items(CODES[:, :2], torch.randn(5, 6))
    with pytest.raises(ValueError, match=r"vectors are None; this model needs \(5, 6\)"):
        model.bind_items(CODES)


@pytest.mark.parametrize("dense_first", [False, True], ids=["no-table", "table"])
def test_appended_items_are_those_of_a_model_bound_to_all(dense_first):
    """Two appends, past the spare rows of the first; learned rows keep their id embedding."""
    torch.manual_seed(0)
    config = RecommenderConfig(
        DecoderConfig(32, 1, 2, 2, 16, 48),
        (8, 8, 4),
        num_items=20,
        vector_dim=6,
        id_embedding=True,
        dense_head=True,
    )
    codes = torch.randint(0, 4, (3000, 3))
    vectors = torch.randn(3000, 6)
    live, whole = Recommender(config).eval(), Recommender(config).eval()
    whole.load_state_dict(live.state_dict())
    whole.bind_items(codes, vectors)
    live.bind_items(codes[:30], vectors[:30])
    learned = torch.full((2970,), -1)
    learned[:5] = torch.tensor([4, -1, 19, 0, 20])  # 20 is a bound item without an embedding
    with torch.inference_mode():
        if dense_first:
            before = live.dense_item_rows().clone()
        for first, last in ((30, 35), (35, 3000)):
            part = slice(first, last)
            live.append_items(codes[part], vectors[part], learned[first - 30 : last - 30])
        assert live.num_bound_items == 3000
        expected = whole.embed_items(torch.arange(3000))
        expected[30] += live.ids.weight[4]
        expected[32] += live.ids.weight[19]
        expected[33] += live.ids.weight[0]
        torch.testing.assert_close(live.embed_items(torch.arange(3000)), expected)
        table = live.dense_item_rows()
        torch.testing.assert_close(table, torch.nn.functional.normalize(expected, dim=-1))
        if dense_first:
            assert torch.equal(table[:30], before)
        # A reader that began before the items came may leave a table without them.
        live._dense_table = table[:2990].clone()
        assert torch.equal(live.dense_item_rows(), table)
        live._dense_table = table[:2990].clone()
        live.append_items(codes[:2], vectors[:2], torch.full((2,), -1))
        assert torch.equal(live.dense_item_rows()[:3000], table)
        hidden = torch.randn(2, 32)
        scores = live.dense_scores(hidden, 33)
        expected = (live.dense_query_rows(hidden) @ table[:33].T).log_softmax(-1)
        torch.testing.assert_close(scores, expected)

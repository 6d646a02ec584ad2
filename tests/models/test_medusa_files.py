"""Medusa heads in files: both layouts, shards, parts of a vocabulary, and refusals by name."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from recserve.drafters.medusa.drafter import MedusaDrafter
from recserve.drafters.medusa.files import load_accuracies, load_medusa, save_medusa
from recserve.drafters.medusa.network import MedusaHeads
from recserve.drafters.registry import build_drafter
from recserve.drafters.shared.rank_tree import best_tree, rank_tree
from recserve.models.loading import UnsupportedModel
from recserve.speculation.draft import Budget
from tests.support.medusa_heads import E, K, V, context, drawn_heads
from tests.support.paths import ROOT
from tests.support.text_loop import tiny_model

CONVERT = ROOT / "benchmarks" / "text" / "convert_medusa.py"


def original(heads: MedusaHeads, prefix: str = "") -> dict[str, torch.Tensor]:
    """Names of the paper's repository."""
    layers = heads.config.num_layers
    named = {}
    for k in range(heads.config.num_heads):
        for j in range(layers):
            named[f"{prefix}{k}.{j}.linear.weight"] = heads.blocks[k][j].weight
            named[f"{prefix}{k}.{j}.linear.bias"] = heads.blocks[k][j].bias
        named[f"{prefix}{k}.{layers}.weight"] = heads.outputs[k].weight
    return {name: tensor.contiguous().clone() for name, tensor in named.items()}


def vllm(heads: MedusaHeads, prefix: str = "") -> dict[str, torch.Tensor]:
    """Names of vLLM."""
    named = {}
    for k in range(heads.config.num_heads):
        for j, layer in enumerate(heads.blocks[k]):
            for part, tensor in layer.named_parameters():
                named[f"{prefix}blocks.{k}.layers.{j}.{part}"] = tensor
    for k, output in enumerate(heads.outputs):
        named[f"{prefix}lm_heads.{k}.weight"] = output.weight
    return {name: tensor.contiguous().clone() for name, tensor in named.items()}


def write(folder: Path, weights, fields=None, name="medusa_lm_head.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / name)
    if fields is not None:
        (folder / "config.json").write_text(json.dumps(fields))
    return folder


def plain_logits(weights, hidden, k, layers=1):
    """The paper's formula on the original names."""
    x = hidden
    for j in range(layers):
        x = x + F.silu(x @ weights[f"{k}.{j}.linear.weight"].T + weights[f"{k}.{j}.linear.bias"])
    return x @ weights[f"{k}.{layers}.weight"].T


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    "layout,prefix,name",
    [
        (original, "", "medusa_lm_head.safetensors"),
        (original, "medusa_head.", "model.safetensors"),
        (vllm, "", "model.safetensors"),
        (vllm, "medusa_heads.", "model.safetensors"),
    ],
)
def test_both_layouts_are_the_same_heads(layout, prefix, name, layers, tmp_path):
    heads = drawn_heads(num_layers=layers)
    extra = {
        "model.layers.0.mlp.up_proj.weight": torch.zeros(3, 3),
        "lm_head.weight": torch.zeros(V, E),
    }
    fields = {"medusa_num_heads": 2, "medusa_num_layers": 1}  # as published ones say, wrongly
    write(tmp_path, layout(heads, prefix) | extra, fields, name)
    loaded = load_medusa(tmp_path, E, V)
    hidden = torch.randn(5, E)
    logits = loaded(hidden)
    assert logits.shape == (K, 5, V) and loaded.config == heads.config
    for k in range(K):
        torch.testing.assert_close(logits[k], plain_logits(original(heads), hidden, k, layers))
    assert load_medusa(tmp_path, E, V, torch.bfloat16).weight.dtype == torch.bfloat16


def test_heads_sharded_with_their_model(tmp_path):
    weights = original(drawn_heads(), "medusa_head.")
    names = sorted(weights)
    write(tmp_path, {n: weights[n] for n in names[:4]}, name="one.safetensors")
    write(tmp_path, {n: weights[n] for n in names[4:]}, name="two.safetensors")
    files = {n: "one.safetensors" if n in names[:4] else "two.safetensors" for n in names}
    files["model.norm.weight"] = "three.safetensors"  # not there, and not needed
    index = json.dumps({"weight_map": files})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    torch.testing.assert_close(
        load_medusa(tmp_path, E, V)(torch.ones(1, E)), drawn_heads()(torch.ones(1, E))
    )


@pytest.mark.parametrize("whole_rows", [True, False])
def test_vllm_heads_of_a_part_of_the_vocabulary(whole_rows, tmp_path):
    words = torch.tensor([3, 7, 8, 20, 28])
    whole = drawn_heads()
    weights = vllm(whole) | {"token_map": words}
    if not whole_rows:
        weights |= {
            f"lm_heads.{k}.weight": weights[f"lm_heads.{k}.weight"][words] for k in range(K)
        }
    loaded = load_medusa(write(tmp_path, weights, name="model.safetensors"), E, V)
    assert loaded.config.head_vocab == 5
    hidden = torch.randn(4, E)
    torch.testing.assert_close(loaded(hidden), whole(hidden)[..., words])
    guesses = loaded.tokens(loaded(hidden).argmax(-1))
    assert torch.equal(guesses, words[whole(hidden)[..., words].argmax(-1)])
    drafter = MedusaDrafter(loaded, E, V, rank_tree([[0], [1], [0, 0]]))
    draft = drafter.propose([context(hidden[0])], [Budget(9, 9)])[0]
    assert set(draft.tokens.tolist()) <= set(words.tolist())
    with pytest.raises(ValueError, match="ranks up to 5"):
        MedusaDrafter(loaded, E, V, rank_tree([[rank] for rank in range(6)]))


def test_vllm_heads_that_share_one_output(tmp_path):
    shared = drawn_heads(shared=True)
    weights = vllm(shared)
    assert sum(name.startswith("lm_heads") for name in weights) == 1
    for name in ("lm_heads.0.weight", "lm_head.weight"):
        renamed = {n.replace("lm_heads.0.weight", name): t for n, t in weights.items()}
        write(tmp_path / name, renamed, {"original_lm_head": True}, "model.safetensors")
        loaded = load_medusa(tmp_path / name, E, V)
        torch.testing.assert_close(loaded(torch.ones(2, E)), shared(torch.ones(2, E)))


def without_bias(weights):
    return {n: t for n, t in weights.items() if not n.endswith("bias")}


def test_blocks_without_bias(tmp_path):
    weights = without_bias(vllm(drawn_heads()))
    loaded = load_medusa(write(tmp_path, weights, name="model.safetensors"), E, V)
    assert not loaded.config.bias


def test_other_targets_and_missing_or_damaged_files(tmp_path):
    with pytest.raises(UnsupportedModel, match="has none of"):
        load_medusa(tmp_path, E, V)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match=r"convert medusa_lm_head\.pt offline"):
        load_medusa(tmp_path, E, V)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(UnsupportedModel, match="damaged"):
        load_medusa(tmp_path, E, V)
    with pytest.raises(ValueError, match="hidden size 16 and 29 tokens, the target has 32 and 29"):
        MedusaDrafter(drawn_heads(), 32, V)
    write(tmp_path / "good", original(drawn_heads()))
    with pytest.raises(UnsupportedModel, match=r"vocabulary 61\) needs"):
        build_drafter("medusa", tiny_model(vocabulary=61), [tmp_path / "good"])


def test_saved_heads_are_read_back_with_their_accuracies(tmp_path):
    heads = drawn_heads(num_layers=2)
    measured = [[0.5, 0.2], [0.3, 0.1], [0.2, 0.05]]
    save_medusa(heads, tmp_path, measured)
    read = load_medusa(tmp_path, E, V).state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in heads.state_dict().items())
    assert load_accuracies(tmp_path) == measured
    drafter = build_drafter("medusa", tiny_model(), [tmp_path])
    assert drafter.tree == best_tree(measured, 24) and drafter.heads.weight.dtype == torch.float64
    with pytest.raises(ValueError, match="cannot express"):
        save_medusa(drawn_heads(bias=False), tmp_path)


def test_a_pickled_file_is_converted_offline(tmp_path, monkeypatch, capsys):
    weights = original(drawn_heads())
    weights["1.1.weight"] = weights["0.1.weight"]  # shared memory, as repeated modules have
    torch.save(weights, tmp_path / "medusa_lm_head.pt")  # noqa: TID251
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    arguments = [str(CONVERT), str(tmp_path / "medusa_lm_head.pt"), str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(CONVERT), run_name="__main__")
    assert "9 tensors" in capsys.readouterr().out
    written = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in weights.items())
    assert load_medusa(tmp_path / "out", E, V).config.num_heads == K
    torch.save([1, 2], tmp_path / "list.pt")  # noqa: TID251
    monkeypatch.setattr(sys, "argv", [str(CONVERT), str(tmp_path / "list.pt"), str(tmp_path)])
    with pytest.raises(SystemExit, match="holds list"):
        runpy.run_path(str(CONVERT), run_name="__main__")


def test_heads_without_a_matrix_read_the_target_s(tmp_path):
    """The repository's present trainer writes the blocks only."""
    heads, target = drawn_heads(), tiny_model().float()
    blocks = {n: w for n, w in original(heads).items() if ".linear." in n}
    drafter = build_drafter("medusa", target, [write(tmp_path, blocks)])
    hidden = torch.randn(3, E)
    head = target.tokens.weight if target.head is None else target.head.weight
    for k in range(K):
        weight, bias = (blocks[f"{k}.0.linear.{part}"] for part in ("weight", "bias"))
        state = hidden + F.silu(F.linear(hidden, weight, bias))
        wanted = F.linear(state, head)
        torch.testing.assert_close(drafter.heads(hidden)[k], wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(UnsupportedModel, match="holds no Medusa heads"):
        load_medusa(tmp_path, E, V)


def shared_blocks(heads: MedusaHeads, layers: int) -> dict[str, torch.Tensor]:
    """Names of heads whose blocks are one module, which safetensors stores once."""
    weights = original(heads)
    for k in range(K):
        weights[f"{k}.{layers}.weight"] = weights.pop(f"{k}.1.weight")
    return weights


@pytest.mark.parametrize("own_matrix", [True, False])
def test_blocks_that_are_one_module_are_repeated(own_matrix, tmp_path):
    weights, head = shared_blocks(drawn_heads(), 3), torch.randn(V, E)
    if not own_matrix:  # only the configuration tells the number of blocks
        weights = {name: w for name, w in weights.items() if ".linear." in name}
    write(tmp_path, weights, {"medusa_num_layers": 1 if own_matrix else 3})
    loaded = load_medusa(tmp_path, E, V, target_head=head)
    assert loaded.config.num_layers == 3
    hidden = torch.randn(4, E)
    for k in range(K):
        x = hidden
        for _ in range(3):
            x = x + F.silu(
                F.linear(x, weights[f"{k}.0.linear.weight"], weights[f"{k}.0.linear.bias"])
            )
        wanted = F.linear(x, weights.get(f"{k}.3.weight", head))
        torch.testing.assert_close(loaded(hidden)[k], wanted)


def test_a_logit_scale_reaches_the_logits(tmp_path):
    heads, hidden = drawn_heads(), torch.randn(4, E)
    folder = write(tmp_path, vllm(heads), {"logit_scale": 0.25}, "model.safetensors")
    torch.testing.assert_close(load_medusa(folder, E, V)(hidden), 0.25 * heads(hidden))


@pytest.mark.parametrize(("field", "value"), [("num_heads", K + 1), ("num_hidden_layers", 2)])
def test_counts_of_vllm_agree_with_the_tensors(field, value, tmp_path):
    write(
        tmp_path, vllm(drawn_heads()), {"model_type": "medusa", field: value}, "model.safetensors"
    )
    with pytest.raises(UnsupportedModel, match=f"{field} is {value}"):
        load_medusa(tmp_path, E, V)


def test_one_output_that_is_stored_for_every_head(tmp_path):
    weights = vllm(drawn_heads())
    weights |= {f"lm_heads.{k}.weight": weights["lm_heads.0.weight"].clone() for k in range(K)}
    write(tmp_path, weights, {"original_lm_head": True}, "model.safetensors")
    assert load_medusa(tmp_path, E, V).config.shared
    weights["lm_heads.1.weight"] += 1
    write(tmp_path, weights, {"original_lm_head": True}, "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"'lm_heads\.1\.weight' differs from another one"):
        load_medusa(tmp_path, E, V)

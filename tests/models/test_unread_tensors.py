"""No loader leaves out a tensor of its files without a word.

A language model is compared with transformers, whatever its files hold. All other loaders get a
tensor more, or a changed copy of one that they do not need.
"""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from recserve.drafters.registry import build_drafter
from recserve.models.attention import DenseAttention
from recserve.models.loading import UnsupportedModel, load_language_model
from tests.support.drafter_folders import uneven_model, write_drawn
from tests.support.model_folders import drawn

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DRAFTERS = {
    **{kind: kind for kind in ("mtp", "medusa", "specformer", "mask_tokens")},
    **{"eagle-1": "eagle", "eagle-3": "eagle", "dflash": "block", "dspark": "block"},
}
TOKENS = torch.tensor([[1, 5, 9, 4, 60, 0, 33]])


def logits_of(model):
    return model.logits(model(TOKENS[0], torch.arange(TOKENS.shape[1]), DenseAttention()))


def write_shards(folder, weights, placed, listed):
    """Writes tensors by file, and an index that names `listed` and no others."""
    for file in set(placed.values()):
        save_file({n: weights[n] for n, own in placed.items() if own == file}, folder / file)
    if listed is not None:
        (folder / INDEX).write_text(
            json.dumps({"metadata": {}, "weight_map": {n: placed[n] for n in listed}})
        )


@pytest.mark.parametrize("seed", range(12))
def test_a_language_model_equals_transformers_or_is_refused(seed, tmp_path):
    """Draws the family, the head, a further tensor, the number of files, and what an index names.

    transformers reads all tensors of the files that an index names.
    """
    draw = random.Random(seed)
    family = draw.choice(["llama", "llama-tied", "qwen2", "qwen3"])
    drawn(tmp_path, family, seed)
    weights = load_file(tmp_path / WEIGHTS)
    fields = json.loads((tmp_path / "config.json").read_text())
    head = ("own", "copy", "none")[seed % 3]
    weights.pop(HEAD, None)
    if head != "none":
        weights[HEAD] = weights[EMBEDDING].flip(0) if head == "own" else weights[EMBEDDING].clone()
    fields["tie_word_embeddings"] = head == "none" or draw.random() < 0.7
    further = draw.choice(
        ["", "rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"]
        + ["extra.lm_head.weight", "model.layers.3.mlp.up_proj.weight", "model.scale"]
    )
    if further:
        weights[further] = torch.randn(4)
    files = [WEIGHTS] if draw.random() < 0.3 else ["a.safetensors", "b.safetensors"]
    placed = {name: draw.choice(files) for name in sorted(weights)}
    unnamed = HEAD if head != "none" and len(files) > 1 and draw.random() < 0.3 else None
    listed = [name for name in placed if name != unnamed] if len(files) > 1 else None
    (tmp_path / WEIGHTS).unlink()
    write_shards(tmp_path, weights, placed, listed)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    if refused := unnamed or (further if "inv_freq" not in further else ""):
        with pytest.raises(UnsupportedModel, match=refused):
            load_language_model(tmp_path)
        return
    model = load_language_model(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model), theirs(TOKENS).logits[0], atol=1e-4, rtol=1e-4)
    assert model.config.tied == (head != "own" and fields["tie_word_embeddings"])


def test_weights_in_one_file_and_in_shards_are_one_too_many(tmp_path):
    drawn(tmp_path, "llama")
    weights = load_file(tmp_path / WEIGHTS)
    write_shards(tmp_path, weights, dict.fromkeys(weights, "a.safetensors"), weights)
    with pytest.raises(UnsupportedModel, match=f"both {WEIGHTS} and {INDEX}"):
        load_language_model(tmp_path)


COPIES = {
    "eagle-1": {"embed_tokens.weight": "embedding", HEAD: "head"},
    "eagle-3": {"embed_tokens.weight": "embedding"},
    "mtp": {EMBEDDING: "embedding", "model.norm.weight": "norm", HEAD: "head"},
    "medusa": {HEAD: "head"},
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in COPIES for name in COPIES[kind]]
)
def test_a_tensor_of_the_target_in_a_drafter_is_a_copy(kind, name, tmp_path):
    """Rounded to 16 bits it is one; a single number that differs by 2 % is none."""
    target = uneven_model()
    own = {
        "embedding": target.tokens.weight,
        "norm": target.decoder.norm.weight,
        "head": target.head.weight,
    }[COPIES[kind][name]]
    (file,) = write_drawn(kind, tmp_path).glob("*.safetensors")
    weights = load_file(file)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        save_file(weights | {name: own.detach().to(dtype).clone()}, file)
        build_drafter(DRAFTERS[kind], target, [tmp_path])
    other = own.detach().clone()
    number = random.Random(kind + name).randrange(other.numel())
    other.view(-1)[number] = 1.02 * other.view(-1)[number] + 1e-3
    save_file(weights | {name: other}, file)
    with pytest.raises(UnsupportedModel, match=f"{name} differs from that of the target"):
        build_drafter(DRAFTERS[kind], target, [tmp_path])


def test_heads_of_medusa_lie_in_one_place(tmp_path):
    file = write_drawn("medusa", tmp_path) / "medusa_lm_head.safetensors"
    heads = {f"medusa_head.{name}": tensor + 1 for name, tensor in load_file(file).items()}
    save_file({HEAD: uneven_model().head.weight.detach().clone()}, tmp_path / WEIGHTS)
    build_drafter("medusa", uneven_model(), [tmp_path])
    save_file(heads, tmp_path / WEIGHTS)
    with pytest.raises(UnsupportedModel, match=f"heads in {file.name} and in {WEIGHTS}"):
        build_drafter("medusa", uneven_model(), [tmp_path])

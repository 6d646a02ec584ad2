"""What a drafter's files say before anything runs: positions, norms, vocabulary, copies, texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from recserve.doctor.drafter_kind import DrafterFiles
from recserve.doctor.finding import Finding
from recserve.models.language_model import LanguageModel
from recserve.tokenizer.tokenizer import TextTokenizer

MIN_COVERAGE = 0.8
# Mean weights of norms: around 1 as factors, around 0 as differences from 1.
MIN_FACTOR, MAX_DIFFERENCE = 0.25, 0.75
# Families whose norms are stored as differences from 1.
CENTRED = ("qwen3_next", "qwen3_5")
MIN_COSINE = 0.5  # of a trained copy's rows with the embedding that it started from
NUM_ROWS = 4096


def check_positions(files: DrafterFiles, target: LanguageModel) -> Finding:
    """Compares rotary range, base and scaling with the target's."""
    own, fields = target.config.decoder, files.fields
    said = f"positions 0..{own.max_positions - 1} of the target are used"
    named = fields.get("max_position_embeddings")
    if named is not None and named != own.max_positions:
        said += f"; config.json names {named}"
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or fields.get("rope_theta") or own.rope_theta)
    if theta != own.rope_theta:
        return Finding(
            "positions",
            "warn",
            f"{said}; rope_theta is {theta:g}, the target's is {own.rope_theta:g}",
        )
    return Finding("positions", "ok", f"{said}; rotary base {theta:g}")


def check_norms(files: DrafterFiles) -> Finding:
    """Checks that norms are stored as their reader expects: as factors or differences from 1."""
    names = [name for name in files.tensors if "norm" in name and name.endswith("weight")]
    means = {
        name: float(files.load(name).float().mean())
        for name in sorted(names)
        if len(files.shape(name)) == 1
    }
    if not means:
        return Finding("norms", "ok", "there are none")
    text = files.config.get("text_config") or {}
    family = str(text.get("model_type") or files.fields.get("model_type"))
    centred = family.startswith(CENTRED)
    odd = {
        name: mean
        for name, mean in means.items()
        if (mean > MAX_DIFFERENCE if centred else abs(mean) < MIN_FACTOR)
    }
    kept = "differences from 1" if centred else "factors"
    if not odd:
        return Finding("norms", "ok", f"{len(means)} norms, read as {kept}")
    name = next(iter(odd))
    return Finding(
        "norms",
        "warn",
        f"{len(odd)} of {len(means)} norms do not look like {kept}: the mean of {name} is "
        f"{odd[name]:.2f}. model_type {family!r} decides how they are read",
    )


def check_vocabulary(
    files: DrafterFiles, target: LanguageModel, written: NDArray[np.int64]
) -> Finding:
    """Checks how many of the tokens that the target wrote can be drafted.

    Args:
        files: The drafter's files.
        target: The target.
        written: [m] int64 tokens that the target wrote.
    """
    every = target.config.vocab_size
    tokens = draft_tokens(files)
    if tokens is None:
        return Finding("vocabulary", "ok", f"all {every:,} tokens of the target")
    covered = float(np.isin(written, tokens.numpy()).mean()) if len(written) else 0.0
    found = f"{len(tokens):,} of {every:,} tokens, {covered:.0%} of what the target writes"
    if covered < MIN_COVERAGE:
        advice = "the vocabulary map (d2t) is wrong, or was made for other texts"
        return Finding("vocabulary", "warn", f"{found}; {advice}")
    return Finding("vocabulary", "ok", found)


def draft_tokens(files: DrafterFiles) -> Tensor | None:
    """Returns the tokens that can be drafted, as the loaders read the map; None means all."""
    for name in files.tensors:
        if name.endswith("d2t"):
            offsets = files.load(name).long()
            tokens: Tensor = offsets + torch.arange(len(offsets))
            return tokens
        if name.endswith("token_map"):
            listed: Tensor = files.load(name).long()
            return listed
    return None


def check_copies(files: DrafterFiles, target: LanguageModel) -> Finding:
    """Compares an embedding or head in the files with the target's."""
    own = {"embed_tokens.weight": target.tokens.weight}
    own["lm_head.weight"] = getattr(target.head, "weight", target.tokens.weight)
    said, state = [], Finding("copies", "ok", "")
    for name in sorted(files.tensors):
        theirs = next((own[end] for end in own if name.endswith(end)), None)
        if theirs is None:
            continue
        if files.shape(name) != tuple(theirs.shape):
            said.append(f"{name} is its own, {files.shape(name)}")
            continue
        rows = slice(0, NUM_ROWS)
        mine, same = files.load(name)[rows].float(), theirs[rows].detach().cpu().float()
        cosine = float(F.cosine_similarity(mine, same, dim=-1).mean())
        if torch.allclose(mine, same, atol=1e-2):
            said.append(f"{name} is the target's")
            continue
        said.append(f"{name} is its own (cosine with the target's {cosine:.2f})")
        if "embed" in name and cosine < MIN_COSINE and files.kinds[0] != "draft_model":
            said[-1] += ": it may be for another target"
            state = Finding("copies", "warn", "")
    nothing = "embedding and head are the target's" if not said else "; ".join(said)
    return Finding("copies", state.state, nothing)


def check_tokenizer(
    files: DrafterFiles, target: LanguageModel, tokenizer: TextTokenizer
) -> Finding:
    """Compares tokenizer, chat template and end tokens of the drafter with the target's."""
    template = "a chat template" if tokenizer.template is not None else "no chat template"
    size, scored = len(tokenizer.all_bytes), target.config.vocab_size
    found = f"the target has {size:,} tokens and {template}"
    if size > scored:
        return Finding("tokenizer", "fail", f"{found}, but it scores only {scored:,} tokens")
    ends = files.fields.get("eos_token_id")
    named = set(ends if isinstance(ends, list) else [ends]) - {None}
    if target.config.eos_tokens and named - set(target.config.eos_tokens):
        right = list(target.config.eos_tokens)
        detail = f"{found}; config.json ends texts with {sorted(named)}, the target with {right}"
        return Finding("tokenizer", "warn", detail)
    if not (files.folder / "tokenizer.json").exists():
        return Finding("tokenizer", "ok", f"{found}; the drafter's folder has none")
    other = TextTokenizer.open(files.folder)
    own, others = (one.tokenizer.get_vocab() for one in (tokenizer, other))
    differing = [word for word in own.keys() | others.keys() if own.get(word) != others.get(word)]
    if differing:
        word = min(differing)
        detail = (
            f"{len(differing)} tokens differ from the target's, such as {word!r}: "
            f"{own.get(word)} in the target, {others.get(word)} in the drafter"
        )
        return Finding("tokenizer", "fail", detail)
    if (message := _template_difference(tokenizer, other)) is not None:
        return Finding("tokenizer", "warn", f"{found}; {message}")
    return Finding("tokenizer", "ok", f"{found}; the drafter's folder has the same")


def _template_difference(tokenizer: TextTokenizer, other: TextTokenizer) -> str | None:
    """Returns how the chat templates differ, on a short chat."""
    if other.template is None or tokenizer.template is None:
        return None
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    ours, theirs = (one.template.render(chat) for one in (tokenizer, other) if one.template)
    if ours == theirs:
        return None
    return (
        f"the drafter's chat template writes {theirs[:60]!r}, the target's {ours[:60]!r}; it was "
        "trained on chats of another form"
    )

"""Recommenders as other projects leave them: a Hugging Face folder, a map of ids, and scores.

The weights are drawn. The scores are those of transformers' forward pass, for every id.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
# Like the template of OpenOneRec: it drops what is no text, and switches thoughts off.
SOFT_SWITCH = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if m.content is string }}"
    "{{ '/no_think' if loop.last and not enable_thinking }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
PADDING = 13  # rows of the model after the tokens of its tokeniser


@dataclass(frozen=True)
class Foreign:
    """A checkpoint and its data.

    Attributes:
        folder: The checkpoint.
        items: File of the items.
        events: File of the events.
        ids: Texts of the codes of each item, by item id.
        level_tokens: Texts of all codes of each level.
    """

    folder: Path
    items: Path
    events: Path
    ids: dict[str, list[str]]
    level_tokens: list[list[str]]

    @property
    def model(self):
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    @property
    def tokenizer(self):
        return PreTrainedTokenizerFast.from_pretrained(self.folder)


def foreign(
    root: Path,
    family: str = "qwen2",
    num_items: int = 40,
    seed: int = 0,
    tied: bool = False,
    before: str = "<",
) -> Foreign:
    """Writes a checkpoint with drawn weights and drawn ids, of which some are shared.

    Args:
        root: Folder of all files.
        family: Model type.
        num_items: I.
        seed: Of all draws.
        tied: Whether embedding and head are the same.
        before: What a code's token begins with: `<` gives `<a_1>`, `<s_` gives `<s_a_1>`.
    """
    draw = np.random.default_rng(seed)
    sizes = (9, 6, 12)
    # Only used codes exist, as in MiniOneRec; a few that no item has exist too.
    codes = np.stack([draw.integers(0, size, num_items) * 2 for size in sizes], 1)
    codes[-3:] = codes[:3]
    ids = {
        str(row): [f"{before}{letter}_{code}>" for letter, code in zip("abc", one, strict=True)]
        for row, one in enumerate(codes.tolist())
    }
    tokens = [sorted({one[level] for one in ids.values()}) for level in range(3)]
    tokens[1].append(f"{before}b_77>")
    folder = root / "checkpoint"
    folder.mkdir(parents=True)
    added = [text for level in tokens for text in level]
    if before == "<s_":
        added += [
            "<|sid_begin|>",
            "<|sid_end|>",
            "<|im_start|>",
            "<|im_end|>",
            "<think>",
            "</think>",
        ]
        (folder / "chat_template.jinja").write_text(SOFT_SWITCH)
    size = _tokenizer(folder, added, family == "llama")
    torch.manual_seed(seed)
    config = CONFIGS[family](
        vocab_size=size + PADDING,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data += 0.15 * torch.randn(weight.shape)
    model.save_pretrained(folder)
    names = list(ids)
    kinds = [["even", "odd"][row % 2] for row in range(num_items)]
    items = root / "items.parquet"
    table = {"item_id": names, "title": [f"Item {name}" for name in names], "kind": kinds}
    pq.write_table(pa.table({**table, "categories": [[kind] for kind in kinds]}), items)
    events, rows = root / "events.parquet", draw.integers(0, num_items, 60)
    users = np.repeat(np.arange(12), 5)
    pq.write_table(
        pa.table(
            {
                "user_id": [f"u{user}" for user in users],
                "item_id": [names[row] for row in rows],
                "timestamp": pa.array(
                    np.arange(60) * 1_000_000 + 10**15, pa.timestamp("us", tz="UTC")
                ),
            }
        ),
        events,
    )
    return Foreign(folder, items, events, ids, tokens)


def _tokenizer(folder: Path, codes: list[str], begins: bool) -> int:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: n + 2 for n, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    whole = json.loads(tokenizer.to_str())
    whole["model"]["vocab"] |= {"<s>": 0, "</s>": 1}
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.add_tokens(sorted(codes))  # in the order of strings
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    said |= {"bos_token": "<s>"} if begins else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return tokenizer.get_vocab_size()


@torch.inference_mode()
def all_scores(
    model,
    prompt: list[int],
    ids: list[tuple[int, ...]],
    level_tokens: list[list[int]],
    rule: str,
    ending: tuple[int, ...] = (),
    temperature: float = 1.0,
    length_penalty: float = 0.0,
) -> dict[tuple[int, ...], float]:
    """Returns the score of every id by one rule: all of them are scored, one by one."""
    distinct = sorted(set(ids))
    rows = torch.tensor([[*prompt, *one, *ending] for one in distinct])
    logits = model(rows).logits[:, len(prompt) - 1 : -1].double()
    logits = logits / temperature
    found = {}
    for row, one in enumerate(distinct):
        total = 0.0
        for place, token in enumerate((*one, *ending)):
            own = logits[row, place]
            if rule == "vocabulary":
                rivals = own
            elif place >= len(one):
                continue
            elif rule == "level":
                rivals = own[level_tokens[place]]
            else:
                below = {other[place] for other in distinct if other[:place] == one[:place]}
                rivals = own[sorted(below)]
            total += float(own[token] - rivals.logsumexp(0))
        scored = len(one) + (len(ending) if rule == "vocabulary" else 0)
        found[one] = total / scored**length_penalty
    return found


def share(count: int) -> float:
    """Returns what an item loses that shares its id with `count` - 1 others, and its score."""
    return math.log(count)

"""Beam search of transformers, with the trie as a logits processor or as a function per beam."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.support.baselines.beams import BeamSearch, Slates
from benchmarks.support.baselines.constraints import TrieProcessor, allowed_tokens, walk
from benchmarks.support.baselines.llama import Network


def tiger_t5(vocabulary: int) -> Network:
    """Returns a random T5 of TIGER's size: 4 + 4 layers, width 128, 6 heads of 64, feed-forward
    1,024.
    """
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "d_model": 128,
        "d_kv": 64,
        "d_ff": 1024,
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_heads": 6,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    model: Network = T5ForConditionalGeneration(T5Config(**shape))
    return model.eval()


class Generate:
    """`generate` with num_beams.

    `how="processor"` masks all beams in tensors. `how="function"` calls a prefix_allowed_tokens_fn
    per beam; it scores over the vocabulary whatever the search's `normalise` is.
    """

    def __init__(
        self, model: Network, search: BeamSearch, prompt: int, how: str = "processor"
    ) -> None:
        self.model = model
        self.search = search
        self.start = 1 if model.config.is_encoder_decoder else prompt
        trie, offsets = search.trie, search.offsets
        self.constraint: dict[str, Any]
        if how == "function":
            self.constraint = {
                "prefix_allowed_tokens_fn": allowed_tokens(trie, offsets, self.start)
            }
        else:
            processor = TrieProcessor(trie, offsets, self.start, search.normalise)
            self.constraint = {"logits_processor": [processor]}

    @torch.inference_mode()
    def __call__(self, prompts: Tensor) -> Slates:
        """Returns slates for prompts [B, n] of equal length."""
        search = self.search
        out = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=search.levels,
            num_beams=search.width,
            num_return_sequences=search.width,
            length_penalty=0.0,
            do_sample=False,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **self.constraint,
        )
        codes: Tensor = out.sequences[:, self.start :] - torch.tensor(search.offsets)
        leaves = walk(search.trie, codes).clamp(min=search.trie.level_starts[search.levels])
        shape = (prompts.shape[0], search.width)
        rows = search.trie.items_of_leaves(leaves).long()
        return Slates(rows.view(shape), out.sequences_scores.view(shape))

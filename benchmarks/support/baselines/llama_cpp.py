"""Greedy decoding by llama.cpp on the same weights, through a GGUF file and the C interface.

Both packages are optional. Without `gguf` and `llama-cpp-python` (built for this processor, see
docs/results/text.md) the benchmark prints a note and skips llama.cpp.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.baselines.gguf_vocabulary import add_vocabulary
from recserve.models.language_model import LanguageModel
from recserve.models.saving import named_tensors

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def missing() -> list[str]:
    """Returns the packages that are not installed."""
    packages = {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}
    return [package for module, package in packages.items() if find_spec(module) is None]


def write_gguf(
    model: LanguageModel, path: Path, tokenizer: Path | None = None, stored: str | None = None
) -> None:
    """Writes a plain Llama as a GGUF file.

    Norms are float32.

    Args:
        model: The model.
        path: File to write.
        tokenizer: Folder with the tokenizer; None writes no vocabulary.
        stored: Type of the matrices, a name of `GGMLQuantizationType` such as F16 or Q8_0. None
            keeps their type and values.

    Raises:
        ValueError: If the model has biases, norms of queries and keys, or scaled positions, or the
            tokenizer is not a known BPE.
    """
    import gguf

    c = model.config.decoder
    if c.qk_norm or c.attention_bias or c.output_bias or c.rope_scaling is not None:
        raise ValueError("only a Llama without biases and with plain rotary positions is written")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(c.max_positions)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_vocab_size(model.config.vocab_size)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        add_vocabulary(writer, tokenizer)
    kinds = gguf.GGMLQuantizationType
    own_types = {torch.float32: kinds.F32, torch.bfloat16: kinds.BF16}
    matrices = kinds[stored] if stored else own_types[model.tokens.weight.dtype]
    heads = {"attn_q": c.num_heads, "attn_k": c.num_kv_heads}
    for name, weight in named_tensors(model).items():
        own = OUTSIDE.get(name) or _name(name)
        part = own.split(".")[-2]
        if part in heads:
            # llama.cpp's rotary pairs are adjacent; Hugging Face's are half a head apart.
            pairs = weight.unflatten(0, (heads[part], 2, -1)).transpose(1, 2)
            weight = pairs.flatten(0, 2)
        kind = matrices if weight.ndim > 1 else kinds.F32
        values = np.ascontiguousarray(weight.float().numpy())
        writer.add_tensor(own, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    """Returns a GGUF name: model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{PARTS[rest.removesuffix('.weight')]}.weight"


class LlamaCpp:
    """One model and one context of `positions` tokens; `threads` is for decoding and prefill."""

    def __init__(self, path: Path, positions: int, threads: int, dtype: torch.dtype) -> None:
        """Loads the file.

        Raises:
            OSError: If the file cannot be read.
        """
        import llama_cpp

        self.api: Any = llama_cpp
        # The library may call this function until the model is freed, so it must stay referenced.
        self._quiet = self.api.llama_log_callback(lambda *_: None)
        self.api.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self.api.llama_backend_init()
        self.model = self.api.llama_model_load_from_file(
            str(path).encode(), self.api.llama_model_default_params()
        )
        if not self.model:
            raise OSError(f"llama.cpp cannot read {path.name}")
        params = self.api.llama_context_default_params()
        params.n_ctx = params.n_batch = positions
        params.n_threads = params.n_threads_batch = threads
        if dtype == torch.float32:
            params.type_k = params.type_v = self.api.GGML_TYPE_F32
        self.context = self.api.llama_init_from_model(self.model, params)
        vocabulary = self.api.llama_model_get_vocab(self.model)
        self.vocab_size = self.api.llama_vocab_n_tokens(vocabulary)

    def write(
        self, prompt: Seq[int], tokens: int, now: Callable[[], float]
    ) -> tuple[list[int], list[float]]:
        """Returns `tokens` greedy tokens, and the time at which each was known.

        Raises:
            RuntimeError: If decoding fails.
        """
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        written: list[int] = []
        times: list[float] = []
        feed = list(prompt)
        while len(written) < tokens:
            row = (ctypes.c_int32 * len(feed))(*feed)  # the batch only holds a pointer
            batch = self.api.llama_batch_get_one(row, len(feed))
            if code := self.api.llama_decode(self.context, batch):
                raise RuntimeError(f"llama_decode returned {code}")
            last = self.api.llama_get_logits_ith(self.context, -1)
            logits = np.ctypeslib.as_array(last, shape=(self.vocab_size,))
            feed = [int(logits.argmax())]
            written += feed
            times.append(now())
        return written, times

    def write_under(self, prompt: Seq[int], tokens: int, grammar: str) -> list[int]:
        """Returns at most `tokens` greedy tokens under a grammar in GBNF, without the end token.

        As in llama.cpp's own programs, the grammar first checks the likeliest token, and all tokens
        only if that one does not fit.

        Raises:
            ValueError: If the grammar is invalid.
            RuntimeError: If decoding fails.
        """
        api, vocabulary = self.api, self.api.llama_model_get_vocab(self.model)
        sampler = api.llama_sampler_init_grammar(vocabulary, grammar.encode(), b"root")
        if not sampler:
            raise ValueError(f"llama.cpp does not read the grammar {grammar[:80]!r}")
        rows = (api.llama_token_data * self.vocab_size)()
        view = np.ctypeslib.as_array(
            ctypes.cast(rows, ctypes.POINTER(ctypes.c_float)), (self.vocab_size, 3)
        )
        numbers = view.view(np.int32)[:, 0]
        one = (api.llama_token_data * 1)()
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        written: list[int] = []
        feed = list(prompt)
        while len(written) < tokens:
            row = (ctypes.c_int32 * len(feed))(*feed)
            if code := api.llama_decode(self.context, api.llama_batch_get_one(row, len(feed))):
                raise RuntimeError(f"llama_decode returned {code}")
            last = api.llama_get_logits_ith(self.context, -1)
            logits = np.ctypeslib.as_array(last, shape=(self.vocab_size,))
            token = int(logits.argmax())
            one[0].id, one[0].logit = token, float(logits[token])
            array = api.llama_token_data_array(one, 1, -1, False)
            api.llama_sampler_apply(sampler, ctypes.byref(array))
            if not np.isfinite(one[0].logit):
                numbers[:], view[:, 1] = np.arange(self.vocab_size), logits
                array = api.llama_token_data_array(rows, self.vocab_size, -1, False)
                api.llama_sampler_apply(sampler, ctypes.byref(array))
                token = int(numbers[view[:, 1].argmax()])
            if api.llama_vocab_is_eog(vocabulary, token):
                break
            api.llama_sampler_accept(sampler, token)
            feed = [token]
            written += feed
        api.llama_sampler_free(sampler)
        return written

    def close(self) -> None:
        """Frees the context and the model."""
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)

"""The vocabulary of a tokenizer folder in the metadata of a GGUF file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from gguf import GGUFWriter

BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def add_vocabulary(writer: GGUFWriter, folder: Path) -> None:
    """Adds tokens, merges or scores, and special tokens of `tokenizer.json`.

    Two kinds of BPE are known: on bytes with GPT-2's pattern, and on characters with bytes as a
    fallback (Llama 2). llama.cpp merges the latter by scores, so a token's score is its rank.

    Raises:
        ValueError: If the tokenizer is of another kind.
    """
    content = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=dict[str, Any])
    model = content["model"]
    special = {token["id"] for token in content["added_tokens"] if token["special"]}
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    pattern = content["pre_tokenizer"]
    if pattern and pattern["type"] == "ByteLevel" and pattern["use_regex"]:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        pairs = [pair.split() if isinstance(pair, str) else pair for pair in model["merges"]]
        writer.add_token_merges([" ".join(pair) for pair in pairs])
        writer.add_add_space_prefix(pattern["add_prefix_space"])
    elif model["byte_fallback"] and pattern is None:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(number) for number in range(len(tokens))])
        writer.add_add_space_prefix(True)
    else:
        raise ValueError(f"{folder.name}: expected byte-level BPE or BPE with byte fallback")
    writer.add_token_list(tokens)
    writer.add_token_types([_kind(n, token, model, special) for n, token in enumerate(tokens)])
    named = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
    ids = {**model["vocab"], **{token["content"]: token["id"] for token in content["added_tokens"]}}
    writer.add_bos_token_id(ids[named["bos_token"]])
    writer.add_eos_token_id(ids[named["eos_token"]])
    writer.add_add_bos_token(content["post_processor"] is not None)


def _kind(number: int, token: str, model: dict[str, Any], special: set[int]) -> int:
    """Returns the GGUF type of a token."""
    from gguf import TokenType

    if token == model["unk_token"]:
        return TokenType.UNKNOWN
    if number in special:
        return TokenType.CONTROL
    byte = model["byte_fallback"] and BYTE.fullmatch(token)
    return TokenType.BYTE if byte else TokenType.NORMAL

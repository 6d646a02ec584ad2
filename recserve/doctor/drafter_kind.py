"""Finds out which drafter reads a folder, from the names of its tensors.

Tensors decide before names: a DFlash2 file whose configuration names DFlash loads and drafts badly
without its selector, and only the tensors show that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recserve.files import gguf_hint
from recserve.models.loading import (
    UnsupportedModel,
    opened_file,
    read_json,
    read_object,
    weight_map,
)

# Drafters by the tensors that only their files have. The first pattern that fits a tensor decides.
PATTERNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r".*\.lora_[AB]\.weight$|mask_embeddings$", ("mask_tokens", "mask_tokens_linear")),
    (r"(mtp\.)?(down_samp|decoder_att|encoder_att)\.", ("specformer",)),
    (r"mtp\.fc\.|mtp_layers\.\d+\.|(.*\.)?eh_proj\.", ("mtp",)),
    (
        r"(model\.)?(candidate_selector|markov_head|hidden_norm|encoder\.output_norm_enc)\.|"
        r"(model\.)?layers\.\d+\.(attention|mlp)_conv\.",
        ("block",),
    ),
    (r"((medusa_heads?|model)\.)*(\d+\.\d+\.linear|blocks\.\d+\.layers\.\d+)\.", ("medusa",)),
    (r"(model\.)?(fusion_)?fc\.", ("eagle",)),
    (r"model\.embed_tokens\.", ("draft_model", "specinfer")),
)
# Files that loaders read; shards come besides. Checkpoints of a training may lie there too.
FILES = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "adapter_model.safetensors",
    "mtp_head.safetensors",
)
INDEX = "model.safetensors.index.json"
CONFIGS = ("config.json", "adapter_config.json")
PICKLED = ("*.pt", "*.bin", "*.pth")


@dataclass(frozen=True)
class DrafterFiles:
    """The files of a drafter.

    Attributes:
        folder: Their folder.
        tensors: File of each tensor.
        config: Content of the configuration; empty if there is none.
        kinds: Drafters that read such files, the usual one first.
        told_by: The tensor that identifies the kind.
    """

    folder: Path
    tensors: dict[str, Path]
    config: dict[str, Any]
    kinds: tuple[str, ...]
    told_by: str

    @property
    def fields(self) -> dict[str, Any]:
        """The configuration with the fields of `transformer_layer_config` laid over it."""
        return {**self.config, **read_object(self.config, "transformer_layer_config")}

    def load(self, name: str) -> Any:
        """Returns a tensor."""
        with opened_file(self.tensors[name]) as file:
            return file.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape without reading the tensor."""
        with opened_file(self.tensors[name]) as file:
            return tuple(file.get_slice(name).get_shape())


def drafter_files(folder: Path) -> DrafterFiles:
    """Reads the names of a folder's tensors, and finds out which drafters read them.

    Raises:
        UnsupportedModel: If there are no tensors, or they are no known drafter's.
    """
    if not folder.is_dir():
        raise UnsupportedModel(f"there is no folder {folder}{gguf_hint(folder)}")
    tensors: dict[str, Path] = {}
    paths = [folder / name for name in FILES if (folder / name).exists()]
    if (folder / INDEX).exists():
        paths += [folder / name for name in set(weight_map(folder / INDEX).values())]
    for path in sorted(set(paths)):
        with opened_file(path) as file:
            tensors |= dict.fromkeys(file.keys(), path)
    if not tensors:
        pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
        hint = f"; convert {pickled[0]}, which is a pickle" if pickled else ""
        hint += gguf_hint(folder)
        raise UnsupportedModel(f"{folder.name} has none of {list(FILES)}{hint}")
    found = [folder / name for name in CONFIGS if (folder / name).exists()]
    config = read_json(found[0]) if found else {}
    for pattern, kinds in PATTERNS:
        fitting = sorted(name for name in tensors if re.match(pattern, name))
        if fitting:
            return DrafterFiles(folder, tensors, config, kinds, fitting[0])
    raise UnsupportedModel(
        f"{folder.name} holds tensors of no known drafter, such as {min(tensors)!r}; name the "
        "drafter with NAME=DIR"
    )

"""A tokenizer for the drawn models: as many tokens as they have, most of them one byte each."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.text_plain import VOCABULARY


def tiny_tokenizer(folder: Path, special: tuple[str, str] = ("<s>", "</s>")) -> Path:
    """Writes tokenizer.json and its configuration to a folder, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[64 : 64 + VOCABULARY - len(special)]
    tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"bos_token": special[0], "eos_token": special[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder

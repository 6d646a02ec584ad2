"""The folder of a text that a target wrote, and the training text of its drafters.

| file | content |
|---|---|
| `distillation.json` | hashes of the target, its tokenizer and the texts, and the settings |
| `part-00000.parquet` | one row per text: `tokens`, and the index `start` of the continuation |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recserve.files import (
    TEMPORARY,
    UnreadableFile,
    check_format,
    parse_record,
    read_json,
    whole_file,
)
from recserve.models.loading import tensor_files
from recserve.tokenizer.tokenizer import TextTokenizer
from recserve.training.text.language_model import encode, read_texts

FORMAT = "recserve-distilled/1"
METADATA = "distillation.json"
PART_TOKENS = 2**16
SCHEMA = pa.schema([("tokens", pa.list_(pa.int32())), ("start", pa.int32())])


@dataclass(frozen=True)
class DistillationSettings:
    """What the target writes.

    Attributes:
        tokens: Least number of tokens of all texts, prompts included.
        prompt_tokens: Tokens of each prompt, including those that the tokenizer puts before a text.
        length: Most tokens of a continuation; an end-of-text token ends it earlier.
        temperature: Sampling temperature; 0 takes the likeliest token.
        seed: Seed of passages and draws, at least 0.
        batch: Texts that are written at once.

    Raises:
        ValueError: If a value is out of range.
    """

    tokens: int = 1_000_000
    prompt_tokens: int = 32
    length: int = 224
    temperature: float = 1.0
    seed: int = 0
    batch: int = 64

    def __post_init__(self) -> None:
        for name, least in (
            *((name, 1) for name in ("tokens", "prompt_tokens", "length", "batch")),
            *((name, 0) for name in ("temperature", "seed")),
        ):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")

    @property
    def text_tokens(self) -> int:
        """Most tokens of a text: prompt and continuation."""
        return self.prompt_tokens + self.length

    @property
    def part_tokens(self) -> int:
        """Least number of tokens of a part, except of the last one."""
        return max(PART_TOKENS, self.batch * self.text_tokens)

    def parts(self) -> dict[str, int]:
        """Returns the least number of tokens of each part by its file name."""
        starts = range(0, self.tokens, self.part_tokens)
        return {
            f"part-{number:05}.parquet": min(self.part_tokens, self.tokens - start)
            for number, start in enumerate(starts)
        }


@dataclass(frozen=True)
class DistilledText:
    """The texts of a folder.

    Attributes:
        tokens: [n] int64, all texts one after another.
        texts: [r] int64 indices in `tokens` at which the texts start.
        continuations: [r] int64 indices in `tokens` at which the target's own tokens start.
        target_sha256: Hash of the target's configuration and weights.
        tokenizer_sha256: Hash of its tokenizer.
    """

    tokens: NDArray[np.int64]
    texts: NDArray[np.int64]
    continuations: NDArray[np.int64]
    target_sha256: str
    tokenizer_sha256: str


@dataclass(frozen=True)
class DrafterText:
    """Tokens of a target's training texts for drafters.

    Attributes:
        tokens: [n] int64, in the order of the files and folders.
        texts: [r] int64 indices in `tokens` at which the texts of folders start, ascending.
        foreign: Folders that another model with the same tokenizer wrote.
    """

    tokens: NDArray[np.int64]
    texts: NDArray[np.int64]
    foreign: tuple[Path, ...]

    def split(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the training tokens and the last twentieth, which validates.

        The cut moves on to the next start of a text, if there is one.
        """
        cut = len(self.tokens) - len(self.tokens) // 20
        later = self.texts[self.texts >= cut]
        cut = int(later[0]) if len(later) else cut
        return self.tokens[:cut], self.tokens[cut:]


def read_drafter_text(paths: Sequence[Path], llm: Path) -> DrafterText:
    """Reads the training text of a drafter.

    Args:
        paths: Text files, encoded with the target's tokenizer, and folders of `distill`.
        llm: Folder of the target.

    Raises:
        ValueError: If a path is neither, or another tokenizer made the tokens of a folder.
    """
    tokenizer = TextTokenizer.open(llm).tokenizer
    tokens, texts, foreign, length = list[NDArray[np.int64]](), [np.empty(0, np.int64)], [], 0
    for path in paths:
        if not path.is_dir():
            tokens.append(encode(tokenizer, list(read_texts([path]))))
        else:
            found = read_distilled(path)
            if found.tokenizer_sha256 != tokenizer_sha256(llm):
                raise ValueError(
                    f"{path} has the tokens of another tokenizer than {llm}'s; write new text with "
                    f"`recserve train distill --llm {llm}`, or give a text file"
                )
            if found.target_sha256 != target_sha256(llm):
                foreign.append(path)
            tokens.append(found.tokens)
            texts.append(found.texts + length)
        length += len(tokens[-1])
    return DrafterText(np.concatenate(tokens), np.concatenate(texts), tuple(foreign))


def read_distilled(folder: Path) -> DistilledText:
    """Returns the texts of a folder that `distill` has written.

    Raises:
        ValueError: If the folder is none, is not complete or is damaged.
    """
    facts = _facts(folder)
    try:
        names = {field.name for field in fields(DistillationSettings)}
        own = {name: value for name, value in facts.items() if name in names}
        settings = parse_record(own, DistillationSettings)
        origin = str(facts["target_sha256"]), str(facts["tokenizer_sha256"])
    except KeyError as error:
        raise ValueError(f"{folder / METADATA}: {error.args[0]} is missing") from error
    except ValueError as error:
        raise ValueError(f"{folder / METADATA}: {error}") from error
    paths = [folder / name for name in settings.parts()]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(paths)} parts; run the same "
            "`recserve train distill` again to finish it"
        )
    try:
        table = pa.concat_tables([pq.read_table(path, schema=SCHEMA) for path in paths])
    except pa.ArrowException as error:
        raise ValueError(f"{folder} has a damaged part: {error}") from error
    texts = table.column("tokens").combine_chunks()
    lengths = texts.value_lengths().to_numpy().astype(np.int64)
    starts = np.concatenate([[0], lengths.cumsum()[:-1]])
    return DistilledText(
        texts.flatten().to_numpy().astype(np.int64),
        starts,
        starts + table.column("start").to_numpy(),
        *origin,
    )


def target_sha256(llm: Path) -> str:
    """Returns a hash of a model folder's configuration and weights."""
    return sha256_of([llm / "config.json", *sorted(set(tensor_files(llm).values()))])


def tokenizer_sha256(llm: Path) -> str:
    """Returns a hash of a model folder's tokenizer, with the tokens that all its files add."""
    return hashlib.sha256(TextTokenizer.open(llm).tokenizer.to_str().encode()).hexdigest()


def sha256_of(paths: Sequence[Path]) -> str:
    """Returns a hash of the contents of files."""
    digests = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _facts(folder: Path) -> dict[str, Any]:
    """Returns the content of the metadata file."""
    path = folder / METADATA
    if not path.exists():
        raise ValueError(
            f"{folder} has no {METADATA}; `recserve train distill` writes such a folder"
        )
    try:
        facts = read_json(path)
    except UnreadableFile as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(facts, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    check_format(facts.get("format"), FORMAT, path)
    return facts


def check_folder(out: Path, facts: dict[str, Any]) -> None:
    """Checks that a run with these facts may write into a folder.

    Raises:
        ValueError: If the folder holds other files, or parts that were written with other values.
    """
    if not out.exists() or not any(out.glob("[!.]*")):
        return
    if not (out / METADATA).is_file():
        raise ValueError(f"{out} holds other files; choose a new folder")
    written = _facts(out)
    differs = [
        f"{name} is {written.get(name)!r} there and {value!r} here"
        for name, value in facts.items()
        if written.get(name) != value
    ]
    if differs and any(out.glob("part-*")):
        raise ValueError(
            f"{out} was written with other values: {'; '.join(differs)}. Choose another folder; "
            "`recserve train drafter` takes several, with --text for each"
        )


def claim(out: Path, facts: dict[str, Any]) -> None:
    """Writes the metadata file of a folder, and removes what a killed run left unfinished."""
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob(f"{TEMPORARY}*"):
        path.unlink(missing_ok=True)
    text = json.dumps(facts, indent=1) + "\n"
    with whole_file(out / METADATA, shared=True) as new:
        new.write_text(text, encoding="utf-8")


def publish(table: pa.Table, path: Path) -> None:
    """Writes a part, which is complete or absent."""
    with whole_file(path, shared=True) as new:
        pq.write_table(table, new, compression="zstd")

"""Loads a model folder's tokeniser from tokenizer.json and its configuration files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from recserve.files import UnreadableFile, gguf_hint, parse_json, read_bytes, read_json_object
from recserve.tokenizer.chat_template import ChatTemplate
from recserve.tokenizer.length_bound import max_bytes_per_token
from recserve.tokenizer.template_sandbox import TemplateError
from recserve.tokenizer.token_bytes import UnsupportedTokenizer, token_bytes

# Files that a Hugging Face folder has for its tokenizer and its generation.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
    "generation_config.json",
)
# The library caches the tokens of words of up to 255 bytes, per thread and tokeniser. At its own
# 10,000 words, random text takes 80 MB per thread. At 1,000 words, English encodes 25 % slower.
CACHED_WORDS = 1000
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class TextTokenizer:
    """Converts text to token ids and back, for one model.

    Attributes:
        tokenizer: Tokeniser that recognises the names of special tokens in a text.
        literal: The same tokeniser, which treats names of special tokens as plain text.
        all_bytes: Bytes that each token id writes.
        text_bytes: The same, with no bytes for special tokens.
        end_tokens: Token ids that end a text: `eos_token` of tokenizer_config.json and of
            special_tokens_map.json.
        template: Chat template, or None if the folder has none.
        max_bytes_per_token: Most UTF-8 bytes of text that one token covers, or None without a
            bound.
        special: Special tokens of the model by name, such as `eos_token`.
    """

    tokenizer: Tokenizer
    literal: Tokenizer
    all_bytes: tuple[bytes, ...]
    text_bytes: tuple[bytes, ...]
    end_tokens: tuple[int, ...]
    template: ChatTemplate | None
    max_bytes_per_token: int | None = None
    special: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def open(folder: Path, chat_template: Path | None = None) -> TextTokenizer:
        """Loads the tokeniser of a Hugging Face folder.

        Args:
            folder: Folder with tokenizer.json.
            chat_template: Jinja file that replaces the folder's own chat template.

        Raises:
            UnsupportedTokenizer: If a file is missing, invalid or of another family.
            TemplateError: If the chat template is missing or does not parse.
        """
        file = folder / "tokenizer.json"
        if not file.exists():
            raise UnsupportedTokenizer(f"{folder.name} has no tokenizer.json{gguf_hint(folder)}")
        try:
            raw = read_bytes(file)
            fields = parse_json(raw, file)
        except UnreadableFile as error:
            raise UnsupportedTokenizer(str(error)) from error
        tokenizer, literal = _tokenizer(raw, file), _tokenizer(raw, file)
        literal.encode_special_tokens = True
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        every = token_bytes(fields, vocabulary)
        special = {t["id"] for t in fields.get("added_tokens") or () if t.get("special")}
        config = _read(folder / "tokenizer_config.json")
        own = _special_tokens("tokenizer_config.json", config)
        mapped = _special_tokens(
            "special_tokens_map.json", _read(folder / "special_tokens_map.json")
        )
        ends = (
            _number("tokenizer_config.json", own, vocabulary),
            _number("special_tokens_map.json", mapped, vocabulary),
        )
        names = mapped | own
        return TextTokenizer(
            tokenizer,
            literal,
            tuple(every),
            tuple(b"" if n in special else spelled for n, spelled in enumerate(every)),
            tuple(dict.fromkeys(end for end in ends if end is not None)),
            _template(folder, config, names, chat_template),
            max_bytes_per_token(fields, vocabulary, every),
            names,
        )

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: Text in which names of special tokens count as special tokens.
            special: True adds the tokens that the model expects around a text, such as BOS.
        """
        return _encode(self.tokenizer, text, special)

    def encode_literal(self, text: str) -> list[int]:
        """Returns the token ids of an untrusted text, in which no special token is recognised."""
        return _encode(self.literal, text, special=False)

    def starts(self, text: str, tokens: Sequence[int]) -> list[int]:
        """Returns the place in a text at which each of its tokens starts, in characters.

        A token that starts inside a character has the place of that character. Tokens that `encode`
        adds around the text take no characters.

        Args:
            text: The text.
            tokens: Its tokens, as `encode` returns them.
        """
        found = self._untrimmed.encode_batch([text], add_special_tokens=False)[0]
        places = [start for start, _ in found.offsets]
        if len(places) < len(tokens):  # tokens were added, such as BOS
            places = [0] * self._num_before + places
        return places + [len(text)] * (len(tokens) - len(places))

    @cached_property
    def _num_before(self) -> int:
        """Number of special tokens that `encode` adds before a text."""
        added = self.tokenizer.encode("a").special_tokens_mask
        return added.index(0) if 0 in added else len(added)

    @cached_property
    def _untrimmed(self) -> Tokenizer:
        """A copy without post-processing, which can leave spaces out of a token's place."""
        copy = Tokenizer.from_str(self.tokenizer.to_str())
        copy.post_processor = None
        return copy

    def min_tokens(self, text: str) -> int:
        """Returns a lower bound on the number of tokens of a text, without encoding it.

        The result is 0 if no bound is known. Encoding a megabyte takes most of a second; this check
        takes microseconds.
        """
        if self.max_bytes_per_token is None:
            return 0
        return -(-len(text.encode("utf-8", "surrogatepass")) // self.max_bytes_per_token)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without special tokens.

        Spaces at the start are kept, so the result can follow other text.
        """
        table = self.text_bytes
        spelled = b"".join(table[token] for token in tokens if token < len(table))
        return spelled.decode("utf-8", "replace")


def _encode(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    # `Tokenizer.encode` holds the GIL and so blocks the event loop. The batch function does not.
    numbers: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
    return numbers


def _tokenizer(raw: bytes, file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except ValueError as error:
        raise UnsupportedTokenizer(f"{file} is not a tokeniser: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if hasattr(tokenizer.model, "_resize_cache"):  # models without a cache have no such method
        tokenizer.model._resize_cache(CACHED_WORDS)
    return tokenizer


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies the files of FILES from one Hugging Face folder to another one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def _template(
    folder: Path, config: dict[str, Any], names: dict[str, str], file: Path | None
) -> ChatTemplate | None:
    """Returns the template from `file`, chat_template.jinja or tokenizer_config.json."""
    template_file = folder / "chat_template.jinja"
    source: Any = config.get("chat_template")
    if file is not None:
        if not file.is_file():
            raise TemplateError(f"chat template {file} does not exist")
        source = _read_template(file)
    elif template_file.exists():
        source = _read_template(template_file)
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return None if source is None else ChatTemplate(source, names)


def _read_template(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except (UnreadableFile, UnicodeDecodeError) as error:
        raise TemplateError(f"chat template {path} cannot be used: {error}") from error


def _special_tokens(file: str, fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens that a configuration file names, by field.

    The file writes a token as a string, or as an object with `content`.

    Raises:
        UnsupportedTokenizer: If a field holds something else.
    """
    names = {}
    for name in SPECIAL:
        value = fields.get(name)
        if value is None:
            continue
        token = value.get("content") if isinstance(value, dict) else value
        if not isinstance(token, str):
            raise UnsupportedTokenizer(
                f"{file}: {name} is {value!r}; expected a token's text, or an object with the text "
                "as content"
            )
        names[name] = token
    return names


def _number(file: str, names: Mapping[str, str], vocabulary: Mapping[str, int]) -> int | None:
    """Returns the id of the end token that a file names; None if it names none.

    Raises:
        UnsupportedTokenizer: If the vocabulary lacks it. Texts would never end.
    """
    token = names.get("eos_token")
    if token is None:
        return None
    if token not in vocabulary:
        raise UnsupportedTokenizer(
            f"{file}: eos_token is {token!r}; tokenizer.json has no such token"
        )
    return vocabulary[token]


def _read(path: Path) -> dict[str, Any]:
    """Returns the fields of a JSON file; none if there is no such file."""
    if not path.exists():
        return {}
    try:
        return read_json_object(path)
    except UnreadableFile as error:
        raise UnsupportedTokenizer(str(error)) from error

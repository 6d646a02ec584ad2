"""Loads a model folder's tokeniser from tokenizer.json and its configuration files."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from recserve.files import UnreadableFile, gguf_hint, parse_json, read_bytes
from recserve.tokenizer.chat_template import ChatTemplate
from recserve.tokenizer.length_bound import max_bytes_per_token
from recserve.tokenizer.template_sandbox import TemplateError
from recserve.tokenizer.token_bytes import (
    Spelling,
    UnsupportedTokenizer,
    clean_up,
    token_bytes,
)
from recserve.tokenizer.tokenizer_files import MAIN, TokenizerFiles

# Files that a Hugging Face folder has for its tokenizer and its generation.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
    "generation_config.json",
)
# The library caches the tokens of words of up to 255 bytes, per thread and tokeniser. At its own
# 10,000 words, random text takes 80 MB per thread. At 1,000 words, English encodes 25 % slower.
CACHED_WORDS = 1000
CLEANS = "clean_up_tokenization_spaces"
CLEANS_BPE = f"{CLEANS}_for_bpe_even_though_it_will_corrupt_output"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextTokenizer:
    """Converts text to token ids and back, for one model.

    Attributes:
        tokenizer: Tokeniser that recognises the names of special tokens in a text.
        literal: The same tokeniser, which treats names of special tokens as plain text.
        all_bytes: Bytes that each token id writes inside a text.
        spelling: What tokens write in a text, which leaves out special tokens.
        end_tokens: Token ids that end a text: `eos_token` of tokenizer_config.json and of
            special_tokens_map.json.
        template: Chat template, or None if the folder has none.
        max_bytes_per_token: Most UTF-8 bytes of text that one token covers, or None without a
            bound.
        special: Special tokens of the model by name, such as `eos_token`.
        class_name: The class of transformers that tokenizer_config.json names.
    """

    tokenizer: Tokenizer
    literal: Tokenizer
    all_bytes: tuple[bytes, ...]
    spelling: Spelling
    end_tokens: tuple[int, ...]
    template: ChatTemplate | None
    max_bytes_per_token: int | None = None
    special: Mapping[str, str] = field(default_factory=dict)
    class_name: str = "PreTrainedTokenizerFast"

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
        file = folder / MAIN
        if not file.exists():
            raise UnsupportedTokenizer(f"{folder.name} has no tokenizer.json{gguf_hint(folder)}")
        try:
            raw = read_bytes(file)
            fields = parse_json(raw, file)
        except UnreadableFile as error:
            raise UnsupportedTokenizer(str(error)) from error
        tokenizer, literal = _tokenizer(raw, file), _tokenizer(raw, file)
        files = TokenizerFiles.read(folder)
        for one in (tokenizer, literal):
            files.complete(one, fields.get("added_tokens") or ())
        tokenizer.encode_special_tokens = files.config.get("split_special_tokens") is True
        literal.encode_special_tokens = True
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        tokens = {number: token for token, number in vocabulary.items()}
        # The library decodes an added token to its normalised form.
        tokens |= {number: str(tokenizer.id_to_token(number)) for number in added}
        every = token_bytes(fields.get("decoder"), tokens)
        special = [number for number in added if _is_special(tokenizer, number)]
        is_bpe = type(tokenizer.model) is models.BPE
        cleans = bool(files.config.get(CLEANS) and (not is_bpe or files.config.get(CLEANS_BPE)))
        files.warn_of_missing(vocabulary)
        _warn_of_frame(folder, files, tokenizer)
        ends = [_end_token(file, token, vocabulary) for file, token in files.ends.items()]
        return TextTokenizer(
            tokenizer,
            literal,
            every.texts,
            replace(every.without(special), cleans=cleans),
            tuple(dict.fromkeys(ends)),
            _template(folder, files.config, files.names, chat_template),
            max_bytes_per_token(fields, added.values(), vocabulary, every.texts),
            files.names,
            str(files.config.get("tokenizer_class") or TextTokenizer.class_name),
        )

    def names(self, tokens: Sequence[int]) -> list[str]:
        """Returns each token as the vocabulary spells it, such as `Ġis`; "" for an unknown id."""
        return [self.tokenizer.id_to_token(token) or "" for token in tokens]

    def hidden(self, name: str) -> int | None:
        """Returns the id of a special token, which texts leave out; None if `name` is none."""
        number = self.tokenizer.token_to_id(name)
        if number is None or number >= len(self.spelling.texts) or self.spelling.texts[number]:
            return None
        return int(number)

    def spelling_with(self, names: tuple[str, ...]) -> Spelling:
        """Returns what tokens write in texts that show some special tokens."""
        if names not in self._spellings:
            hidden = [self.hidden(name) for name in names]
            texts = list(self.spelling.texts)
            for number in hidden:
                if number is not None:
                    texts[number] = self.all_bytes[number]
            self._spellings[names] = replace(self.spelling, texts=tuple(texts))
        return self._spellings[names]

    @cached_property
    def _spellings(self) -> dict[tuple[str, ...], Spelling]:
        return {}

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

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of untrusted texts, as `encode_literal`, in one call."""
        encodings = self.literal.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encodings]

    def encode_inside(self, text: bytes) -> list[int] | None:
        """Returns tokens that write a text inside another one; None if none do.

        They are those of `encode_literal`, unless the tokeniser puts a space before the text.
        """
        try:
            tokens = self.encode_literal(text.decode())
        except UnicodeDecodeError:
            return self.spell(text)
        if b"".join([self.all_bytes[token] for token in tokens]) == text:
            return tokens
        return self.spell(text)

    def spell(self, text: bytes) -> list[int] | None:
        """Returns the longest tokens that write a text, one after another; None if none do."""
        tokens, place, found = self._by_bytes, 0, list[int]()
        longest = max(map(len, tokens), default=0)
        while place < len(text):
            for size in range(min(longest, len(text) - place), 0, -1):
                token = tokens.get(text[place : place + size])
                if token is not None:
                    found.append(token)
                    place += size
                    break
            else:
                return None
        return found

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        """Tokens by what they write inside a text, without special ones."""
        texts = self.spelling.texts
        return {text: token for token, text in reversed(list(enumerate(texts))) if text}

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
        copy.encode_special_tokens = self.tokenizer.encode_special_tokens
        return copy

    def min_tokens(self, text: str) -> int:
        """Returns a lower bound on the number of tokens of a text, without encoding it.

        The result is 0 if no bound is known. Encoding a megabyte takes most of a second; this check
        takes microseconds.
        """
        if self.max_bytes_per_token is None:
            return 0
        return -(-len(text.encode("utf-8", "surrogatepass")) // self.max_bytes_per_token)

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """Returns the text of tokens.

        Args:
            tokens: Token ids. Ids that the tokeniser lacks have no text.
            skip_special: Whether special tokens are left out.
        """
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
        return clean_up(text) if self.spelling.cleans else text


def _is_special(tokenizer: Tokenizer, number: int) -> bool:
    """Returns whether decoding leaves out a token."""
    twice = [number, number]  # the first token of a text may lose its space
    return bool(tokenizer.decode(twice) != tokenizer.decode(twice, skip_special_tokens=False))


def _warn_of_frame(folder: Path, files: TokenizerFiles, tokenizer: Tokenizer) -> None:
    """Warns where tokenizer_config.json wants other tokens around a text than tokenizer.json."""
    tokens = tokenizer.encode("a").tokens or [""]
    for name, token in (("bos_token", tokens[0]), ("eos_token", tokens[-1])):
        wanted, known = files.config.get(f"add_{name}"), files.names.get(name)
        if isinstance(wanted, bool) and known is not None and wanted != (token == known):
            log.warning(
                "%s: add_%s of tokenizer_config.json is %s, but tokenizer.json %s %r; it counts, "
                "as in transformers 5",
                folder.name,
                name,
                str(wanted).lower(),
                "adds no" if wanted else "adds",
                known,
            )


def _encode(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    # `Tokenizer.encode` holds the GIL and so blocks the event loop. The batch function does not.
    numbers: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
    return numbers


def _tokenizer(raw: bytes, file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except ValueError as error:
        raise UnsupportedTokenizer(f"{file} is not a tokeniser: {str(error):.300}") from error
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
    folder: Path, config: Mapping[str, Any], names: dict[str, str], file: Path | None
) -> ChatTemplate | None:
    """Returns the template from `file`, or the default one of the folder."""
    if file is not None:
        if not file.is_file():
            raise TemplateError(f"chat template {file} does not exist")
        return ChatTemplate(_read_template(file), names)
    found = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        found.setdefault("default", folder / "chat_template.jinja")
    source: Any = config.get("chat_template")
    if found:
        source = {name: _read_template(path) for name, path in found.items()}
    elif isinstance(source, list):
        if not all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in source):
            raise TemplateError(
                "tokenizer_config.json: chat_template is a list; expected objects with name and "
                "template"
            )
        source = {one["name"]: one["template"] for one in source}
    if isinstance(source, dict):
        if "default" not in source:
            log.warning(
                "%s has no default chat template, only %s; start the server with one of them",
                folder.name,
                ", ".join(map(str, source)),
            )
        source = source.get("default")
    if not isinstance(source, str | None):
        raise TemplateError(
            f"tokenizer_config.json: chat_template is {source!r}; expected Jinja source"
        )
    return None if source is None else ChatTemplate(source, names)


def _read_template(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except (UnreadableFile, UnicodeDecodeError) as error:
        raise TemplateError(f"chat template {path} cannot be used: {error}") from error


def _end_token(file: str, token: str, vocabulary: Mapping[str, int]) -> int:
    """Returns the id of the end token that a file names.

    Raises:
        UnsupportedTokenizer: If the vocabulary lacks it. Texts would never end.
    """
    if token not in vocabulary:
        raise UnsupportedTokenizer(
            f"{file}: eos_token is {token!r}; tokenizer.json has no such token"
        )
    return vocabulary[token]

"""Reads what the files of a tokenizer folder say, as the fast tokenizers of transformers 5 do.

| file | what counts |
|---|---|
| `tokenizer.json` | everything but the following |
| `tokenizer_config.json` | `added_tokens_decoder`, special tokens, templates, clean-up of spaces |
| `special_tokens_map.json` | special tokens, if there is no `added_tokens_decoder`; they win |
| `added_tokens.json` | further tokens, if there is no `added_tokens_decoder` |
| `chat_template.jinja`, `additional_chat_templates/` | chat templates; they win |
| `config.json` | `vocab_size`, the number of tokens that the model scores |

Where a tokenizer.json exists, transformers leaves `add_bos_token`, `add_eos_token` and
`add_prefix_space` unread, because tokenizer.json has these steps itself. It also gives a token
another id than a file names if that id is taken. Here, such a folder is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from recserve.files import UnreadableFile, read_json_object
from recserve.tokenizer.token_bytes import UnsupportedTokenizer

MAIN, CONFIG = "tokenizer.json", "tokenizer_config.json"
MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
DECODER, EXTRA, OLD_EXTRA = (
    *("added_tokens_decoder", "extra_special_tokens"),
    "additional_special_tokens",
)
NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
    "mask_token",
)
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
Token = str | AddedToken
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenizerFiles:
    """What the files beside tokenizer.json say about its tokens.

    Attributes:
        folder: The folder.
        config: Content of tokenizer_config.json.
        special: Special tokens by name, such as `cls_token`.
        extra: Special tokens without a name.
        added: Further tokens by id.
        listed: Ids that added_tokens.json names, by token.
        ends: End token by the file that names it.
        vocab_size: Number of tokens that the model scores; None if the folder does not say it.
    """

    folder: Path
    config: Mapping[str, Any]
    special: Mapping[str, Token]
    extra: tuple[Token, ...]
    added: Mapping[int, AddedToken]
    listed: Mapping[str, int]
    ends: Mapping[str, str]
    vocab_size: int | None

    @staticmethod
    def read(folder: Path) -> TokenizerFiles:
        """Reads the files of a folder.

        Raises:
            UnsupportedTokenizer: If a file is invalid.
        """
        config, mapped = read_fields(folder / CONFIG), read_fields(folder / MAP)
        listed = {
            token: _id(f"{ADDED}: {token}", number)
            for token, number in read_fields(folder / ADDED).items()
        }
        named, from_map = _special_tokens(CONFIG, config), _special_tokens(MAP, mapped)
        ends = {
            file: str(tokens["eos_token"])
            for file, tokens in ((CONFIG, named), (MAP, from_map))
            if "eos_token" in tokens
        }
        extra = _extra(CONFIG, config, EXTRA if config.get(EXTRA) else OLD_EXTRA)
        added: dict[int, AddedToken] = {}
        if DECODER in config:
            for key, fields in _object(f"{CONFIG}: {DECODER}", config[DECODER]).items():
                number = _id(f"{CONFIG}: {DECODER}", key)
                added[number] = _added_token(f"{CONFIG}: {DECODER}.{key}", fields)
        else:
            named = {n: t for n, t in named.items() if mapped.get(n, t) is not None} | from_map
            known = {str(token) for _, token in extra}
            more = _extra(MAP, mapped, EXTRA)
            extra += [(name, token) for name, token in more if str(token) not in known]
            # As in transformers, an object of tokenizer_config.json does not count here.
            written = [named[name] for name in NAMES if name in named and name not in from_map]
            written += [token for _, token in extra]
            special = {token for token in written if isinstance(token, str)}
            special |= {str(token) for token in (*from_map.values(), *(t for _, t in more))}
            if not extra and not {EXTRA, OLD_EXTRA} & config.keys():
                extra = _extra(MAP, mapped, OLD_EXTRA)
            for token, number in listed.items():
                flag = token in special
                added[number] = AddedToken(token, normalized=not flag, special=flag)
        # A special token of an object has a name of its own, such as `image_token`.
        named |= {name: token for name, token in extra if name is not None}
        rest = tuple(token for name, token in extra if name is None)
        ordered = {name: named[name] for name in (*NAMES, *named) if name in named}
        size = read_fields(folder / "config.json").get("vocab_size")
        vocab_size = size if isinstance(size, int) and size > 0 else None
        return TokenizerFiles(folder, config, ordered, rest, added, listed, ends, vocab_size)

    @property
    def names(self) -> dict[str, str]:
        """Texts of the special tokens that have a name."""
        return {name: str(token) for name, token in self.special.items()}

    def complete(self, tokenizer: Tokenizer, own: Iterable[Mapping[str, Any]]) -> None:
        """Adds the tokens that tokenizer.json lacks.

        Args:
            tokenizer: The tokenizer of tokenizer.json.
            own: `added_tokens` of tokenizer.json.

        Raises:
            UnsupportedTokenizer: If a file gives a token another id than it has, or an id that the
                model lacks.
        """
        self._check_ids(tokenizer, MAIN, ((token["content"], token["id"]) for token in own))
        there = tokenizer.get_added_tokens_decoder()
        # Without added_tokens_decoder, a name makes a token of tokenizer.json special.
        numbered = {**self.added, **({} if DECODER in self.config else there)}
        tokens: list[Token] = [numbered[number] for number in sorted(numbered)]
        contents = {str(token) for token in (*there.values(), *tokens)}
        for token in (*self.special.values(), *self.extra):
            if (
                str(token) not in contents
                and token not in tokens
                and self._has_room(tokenizer, token, tokens)
            ):
                tokens.append(token)
        named = set(self.names.values())
        for place, token in enumerate(tokens):
            if isinstance(token, str):
                tokens[place] = AddedToken(token, special=True)
            elif str(token) in named:
                token.special = True
        tokenizer.add_tokens(tokens)
        if DECODER in self.config:
            ids = ((str(token), number) for number, token in self.added.items())
            self._check_ids(tokenizer, CONFIG, ids)
        self._check_ids(tokenizer, ADDED, self.listed.items())

    def warn_of_missing(self, vocabulary: Mapping[str, int]) -> None:
        """Warns of tokens that the files name but that do not become tokens."""
        named = map(str, (*self.special.values(), *self.extra, *self.listed))
        for token in sorted({token for token in named if token} - vocabulary.keys()):
            log.warning(
                "%s: %r is named, but tokenizer.json and added_tokens_decoder do not have it, and "
                "the model has no row for it; in texts it is no token",
                self.folder.name,
                token,
            )

    def _has_room(self, tokenizer: Tokenizer, token: Token, before: Iterable[Token]) -> bool:
        """Returns whether the model can have a token to which no file gives an id."""
        if self.vocab_size is None or tokenizer.token_to_id(str(token)) is not None:
            return True
        new = sum(tokenizer.token_to_id(str(one)) is None for one in before)
        return tokenizer.get_vocab_size(with_added_tokens=True) + new < self.vocab_size

    def _check_ids(self, tokenizer: Tokenizer, file: str, ids: Iterable[tuple[str, int]]) -> None:
        for token, number in ids:
            found, other = tokenizer.token_to_id(token), tokenizer.id_to_token(number)
            if file != MAIN and self.vocab_size is not None and number >= self.vocab_size:
                raise UnsupportedTokenizer(
                    f"{file}: {token!r} has the id {number}, but the model scores only "
                    f"{self.vocab_size} tokens; use the files of one model"
                )
            # Beside added_tokens_decoder, added_tokens.json adds no token.
            if found == number or found is None and other is None:
                continue
            clash = f"{token!r} is {found}" if other is None else f"{number} is {other!r}"
            raise UnsupportedTokenizer(
                f"{file}: {token!r} has the id {number}, but in the other files {clash}; use the "
                "files of one model"
            )


def read_fields(path: Path) -> dict[str, Any]:
    """Returns the fields of a JSON file; none if there is no such file.

    Raises:
        UnsupportedTokenizer: If it holds something else than an object.
    """
    if not path.exists():
        return {}
    try:
        return read_json_object(path)
    except UnreadableFile as error:
        raise UnsupportedTokenizer(str(error)) from error


def _special_tokens(file: str, fields: Mapping[str, Any]) -> dict[str, Token]:
    """Returns the special tokens that a file names: those of NAMES, and others of the model."""
    others = [
        name
        for name, value in fields.items()
        if name.endswith("_token") and name not in NAMES and _is_token(value)
    ]
    return {
        name: _token(f"{file}: {name}", fields[name], file == MAP)
        for name in (*NAMES, *others)
        if fields.get(name) is not None
    }


def _extra(file: str, fields: Mapping[str, Any], field: str) -> list[tuple[str | None, Token]]:
    """Returns the special tokens of a list, or those of an object with their names."""
    value, where = fields.get(field), f"{file}: {field}"
    if not isinstance(value, list | dict | None):
        raise UnsupportedTokenizer(f"{where} is {value!r}; expected a list of tokens")
    entries = value.items() if isinstance(value, dict) else enumerate(value or ())
    return [
        (name if isinstance(name, str) else None, _token(f"{where}[{name}]", token, file == MAP))
        for name, token in entries
    ]


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or isinstance(value, dict) and "content" in value


def _token(where: str, value: Any, special: bool) -> Token:
    """Returns a token that a file writes as a text, or as an object with flags."""
    return value if isinstance(value, str) else _added_token(where, value, special)


def _added_token(where: str, value: Any, special: bool = False) -> AddedToken:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise UnsupportedTokenizer(
            f"{where} is {value!r}; expected a token's text, or an object with the text as content"
        )
    flags = {name: value[name] for name in FLAGS if name in value}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise UnsupportedTokenizer(f"{where}.{name} is {flag!r}; expected true or false")
    if special:
        flags["special"] = True
    return AddedToken(value["content"], **flags)


def _id(where: str, value: Any) -> int:
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UnsupportedTokenizer(f"{where}: {value!r} is no token id; expected a whole number")
    return int(text)


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnsupportedTokenizer(f"{where} is {value!r}; expected an object of tokens by id")
    return value

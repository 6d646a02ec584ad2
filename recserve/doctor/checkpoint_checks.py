"""What `recserve doctor FOLDER` says of a recommender that was trained elsewhere, before an import.

Some findings are traps of the original projects: reasons why their own figures differ from what the
weights can do, and so from what is served here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from recserve.doctor.finding import Finding
from recserve.formats.checkpoint_format import ImportFault
from recserve.formats.conversion import check_folder, tokenizer_hint
from recserve.models.loading import UnsupportedModel, read_config, read_json, tensor_files
from recserve.tokenizer.template_sandbox import TemplateError
from recserve.tokenizer.token_bytes import UnsupportedTokenizer
from recserve.tokenizer.tokenizer import TextTokenizer

CODE = re.compile(r"<(s_)?([a-h])_(0|[1-9][0-9]{0,5})>")
MARK = "recserve-probe"
OWN_TENSORS = ("model.", "lm_head.")


def examine_checkpoint(folder: Path) -> list[Finding]:
    """Returns what is known of a folder without its map of ids.

    A folder whose model or tokeniser cannot be read has no further findings.
    """
    try:
        check_folder(folder)
        fields = read_json(folder / "config.json")
        config = read_config(fields)
        names = tensor_files(folder)
    except (ImportFault, UnsupportedModel) as error:
        hint = "; for a drafter, name its language model with --llm"
        return [Finding("model", "fail", f"{error}{hint}")]
    family = str(fields["model_type"])
    found = [Finding("model", "ok", f"{family}, {config.vocab_size} tokens")]
    others = sorted(name for name in names if not name.startswith(OWN_TENSORS))
    if others:
        found.append(
            Finding(
                "tensors",
                "fail",
                f"{others[0]} is no part of a {family}, such as MiniOneRec's CTR head; the import "
                "refuses it. Save the language model alone",
            )
        )
    try:
        tokenizer = TextTokenizer.open(folder)
    except (UnsupportedTokenizer, TemplateError) as error:
        return [*found, Finding("tokenizer", "fail", f"{error}{tokenizer_hint(folder)}")]
    checks: tuple[Callable[[], Finding | None], ...] = (
        lambda: _codes(tokenizer),
        lambda: _vocabulary(tokenizer, config.vocab_size),
        lambda: _path(folder, family),
        lambda: _keys(tokenizer),
        lambda: _sampling(folder),
        lambda: _end(tokenizer, config.eos_tokens),
        lambda: _template(tokenizer),
        lambda: _type(fields),
    )
    return [*found, *(one for check in checks if (one := check()) is not None)]


def _codes(tokenizer: TextTokenizer) -> Finding:
    """Names the levels, and the formats that have such tokens."""
    vocabulary = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    matches = ((CODE.fullmatch(text), token) for text, token in vocabulary.items())
    codes = [(m[1] or "", m[2], int(m[3]), token) for m, token in matches if m]
    if not codes:
        return Finding(
            "codes",
            "warn",
            "no token looks like <a_12>; a generic import needs --id-format, with one token per "
            "code",
        )
    prefix = codes[0][0]
    letters = sorted({letter for _, letter, _, _ in codes})
    spelling = "".join(f"<{prefix}{letter}_{{}}>" for letter in letters)
    form = "generic" if prefix else "minionerec or lc-rec"
    first = sorted((code, token) for _, letter, code, token in codes if letter == letters[0])
    steps = zip(first, first[1:], strict=False)
    detail = f"{len(codes)} codes of {len(letters)} levels, {spelling}: --format {form}"
    if any(one[1] > other[1] for one, other in steps):
        return Finding(
            "codes",
            "warn",
            f"{detail}. Their numbers follow the order of texts (<a_10> before <a_2>), so code "
            "that computes a token from a code is wrong; the import looks tokens up",
        )
    return Finding("codes", "ok", detail)


def _vocabulary(tokenizer: TextTokenizer, rows: int) -> Finding | None:
    tokens = tokenizer.tokenizer.get_vocab_size(with_added_tokens=True)
    if tokens > rows:
        return Finding(
            "vocabulary",
            "fail",
            f"tokenizer.json has {tokens} tokens and the model {rows} rows; this tokeniser belongs "
            "to another model, or the embedding was not resized",
        )
    if tokens < rows:
        return Finding(
            "vocabulary",
            "ok",
            f"{rows - tokens} rows of the model are no tokens; they count in the rule vocabulary, "
            "as in the original",
        )
    return None


def _path(folder: Path, family: str) -> Finding | None:
    """MiniOneRec's evaluation decides by the path of a model how it makes the keys of its trie."""
    path = str(folder.resolve()).lower()
    named = "llama" in path
    if named == (family == "llama") and "gpt2" not in path:
        return None
    word = "gpt2" if "gpt2" in path else "llama"
    holds = "holds" if word in path else "does not hold"
    return Finding(
        "path",
        "warn",
        f'the path {holds} "{word}", and the model is a {family}: MiniOneRec\'s own evaluation '
        "finds no key of its trie then, and decodes without a mask. Its figures are not those of "
        "masked slates. Here the path has no effect",
    )


def _keys(tokenizer: TextTokenizer) -> Finding | None:
    count = len(tokenizer.encode("### Response:\n", special=False))
    if count == 3:
        return None
    return Finding(
        "trie keys",
        "warn",
        f'"### Response:" and a newline are {count} tokens; MiniOneRec\'s own evaluation takes 3 '
        "for granted, and decodes without a mask otherwise. Here that has no effect",
    )


def _sampling(folder: Path) -> Finding | None:
    file = folder / "generation_config.json"
    if not file.exists():
        return None
    fields = read_json(file)
    if fields.get("do_sample") is not True:
        return None
    return Finding(
        "sampling",
        "warn",
        "generation_config.json has do_sample true: an evaluation that does not switch it off "
        "draws its beams, and its figures change from run to run. Slates here are deterministic",
    )


def _end(tokenizer: TextTokenizer, ends: tuple[int, ...]) -> Finding | None:
    own = tokenizer.end_tokens[:1]
    if not own or not ends or own[0] in ends:
        return None
    return Finding(
        "end token",
        "warn",
        f"the tokeniser ends with token {own[0]} and config.json with {ends[0]}; MiniOneRec and "
        "LC-Rec score that of the tokeniser, and so does the import",
    )


def _template(tokenizer: TextTokenizer) -> Finding | None:
    """OpenOneRec's chat template drops a content that is a list of parts."""
    if tokenizer.template is None:
        return None
    content = [{"type": "text", "text": MARK}]
    try:
        text = tokenizer.template.render([{"role": "user", "content": content}])
    except TemplateError:
        return None  # it refuses parts, so nothing is lost
    if MARK in text:
        return None
    return Finding(
        "chat template",
        "warn",
        "the chat template drops a content that is a list of parts, as OpenAI clients send it, and "
        "the model sees an empty prompt; send one text",
    )


def _type(fields: dict[str, object]) -> Finding | None:
    stored = str(fields.get("dtype") or fields.get("torch_dtype") or "float32")
    if stored == "float32":
        return None
    return Finding(
        "type",
        "ok",
        f"weights are {stored}; the originals compute in it, and a server on a CPU in float32 "
        "unless --dtype names another: scores differ in the third digit",
    )

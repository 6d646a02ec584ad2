"""What `recserve doctor FOLDER` says of a recommender that was trained elsewhere, before an import.

Some findings are traps of the original projects: reasons why their own figures differ from what the
weights can do, and so from what is served here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from recserve.doctor.finding import Finding
from recserve.doctor.import_trial import try_import
from recserve.doctor.map_checks import MappedCheckpoint, examine_map, published_figure
from recserve.features.tables.items import read_items
from recserve.formats.checkpoint_format import CheckpointFormat, ImportOptions
from recserve.formats.conversion import check_folder, tokenizer_hint
from recserve.formats.minionerec import MiniOneRec
from recserve.formats.registry import open_format
from recserve.models.language_model import LanguageModelConfig
from recserve.models.loading import (
    EMBEDDING,
    opened_file,
    read_config,
    read_folder,
    read_json,
    read_tensor,
    tensor_files,
)
from recserve.tokenizer.template_sandbox import TemplateError
from recserve.tokenizer.tokenizer import TextTokenizer

CODE = re.compile(r"<(s_)?([a-h])_(0|[1-9][0-9]{0,5})>")
MARK = "recserve-probe"
OWN_TENSORS = ("model.", "lm_head.")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
# Settings of generation_config.json that change beams, and the value that changes nothing.
SEARCH: dict[str, float] = {
    "num_beams": 1,
    "length_penalty": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
}


def examine_checkpoint(
    folder: Path, options: ImportOptions | None = None, histories: int = 4
) -> list[Finding]:
    """Returns what is known of a folder before its import.

    A folder whose model or tokeniser cannot be read has no further findings.

    Args:
        folder: The folder.
        options: Options of the import, with the map of ids. None examines the folder alone.
        histories: Drawn histories that the import is compared with the original on; 0 for none.
    """
    found = _examine_folder(folder)
    if any(finding.name in ("model", "tokenizer") and finding.state == "fail" for finding in found):
        return found
    if options is None:
        todo = (
            "give --items, --ids and --format, as for the import, to compare it with its original"
        )
        return [*found, Finding("import", "ask", todo), published_figure(None)]
    chosen: CheckpointFormat | None = None
    try:
        chosen = open_format(options)
        if chosen.name != MiniOneRec.name:  # whose evaluation these two are about
            found = [one for one in found if one.name not in ("path", "trie keys")]
        given = _read_map(chosen, options)
        found += examine_map(given)
        if histories and not any(finding.state == "fail" for finding in found):
            found += try_import(given, options, histories)
    except ValueError as error:
        found.append(Finding("import", "fail", str(error)))
    return [*found, published_figure(chosen)]


def _read_map(chosen: CheckpointFormat, options: ImportOptions) -> MappedCheckpoint:
    """Reads items and ids. Raises ImportFault, or SchemaError for the file of items."""
    items, _ = read_items(options.items, columns=options.columns)
    texts = chosen.read_texts(items.ids)
    codes = None if texts is not None else chosen.read_ids(items.ids)
    if texts is None:
        assert codes is not None
        texts = [chosen.spelling.spell(one) for one in codes.tolist()]
    config, stored = read_folder(options.folder)
    tokenizer = TextTokenizer.open(options.folder)
    chosen.open_tokenizer(tokenizer)
    return MappedCheckpoint(
        chosen,
        tokenizer,
        config,
        stored.itemsize,
        items.ids,
        codes,
        texts,
        [tuple(tokenizer.encode(text, special=False)) for text in texts],
        chosen.item_texts(items, texts) or texts,
        options.rule or chosen.rule,
        options.max_history or chosen.max_history,
    )


def _examine_folder(folder: Path) -> list[Finding]:
    """Returns what the folder alone shows."""
    try:
        check_folder(folder)
        fields = read_json(folder / "config.json")
        config = read_config(fields)
        names = tensor_files(folder)
    except ValueError as error:
        hint = "; for a drafter, name its language model with --llm"
        adapter = _adapter(folder)
        return [
            Finding("model", "fail", f"{error}{hint}"),
            *([] if adapter is None else [adapter]),
        ]
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
    except ValueError as error:
        return [*found, Finding("tokenizer", "fail", f"{error}{tokenizer_hint(folder)}")]
    checks: tuple[Callable[[], Finding | None], ...] = (
        lambda: _codes(tokenizer),
        lambda: _codebooks(tokenizer),
        lambda: _special(tokenizer),
        lambda: _rows(folder, names, tokenizer, config),
        lambda: _adapter(folder),
        lambda: _vocabulary(tokenizer, config.vocab_size),
        lambda: _path(folder, family),
        lambda: _keys(tokenizer),
        lambda: _sampling(folder),
        lambda: _search(folder),
        lambda: _end(tokenizer, config.eos_tokens),
        lambda: _template(tokenizer),
        lambda: _type(fields),
    )
    for check in checks:
        try:
            one = check()
        except ValueError as error:
            one = Finding("file", "fail", str(error))
        found += [] if one is None else [one]
    return found


def _code_tokens(tokenizer: TextTokenizer) -> list[tuple[str, str, int, int]]:
    """Returns prefix, letter, code and token of all tokens that look like a code."""
    vocabulary = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    matches = ((CODE.fullmatch(text), token) for text, token in vocabulary.items())
    return [(m[1] or "", m[2], int(m[3]), token) for m, token in matches if m]


def _codes(tokenizer: TextTokenizer) -> Finding:
    """Names the levels, and the formats that have such tokens."""
    codes = _code_tokens(tokenizer)
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
    form = "openonerec or generic" if prefix else "minionerec or lc-rec"
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


def _codebooks(tokenizer: TextTokenizer) -> Finding | None:
    """Compares the number of codes of a level with the largest one."""
    levels: dict[str, list[int]] = {}
    for _, letter, code, _ in _code_tokens(tokenizer):
        levels.setdefault(letter, []).append(code)
    gaps = {
        letter: (len(codes), min(codes), max(codes))
        for letter, codes in sorted(levels.items())
        if len(codes) < max(codes) + 1
    }
    if not gaps:
        return None
    parts = (f"{x} has {n} codes from {low} to {high}" for x, (n, low, high) in gaps.items())
    return Finding(
        "codebooks",
        "ok",
        f"not all numbers are codes: level {'; '.join(parts)}. The size of a codebook is the "
        "largest code and one more; an item whose code is no token cannot be imported",
    )


def _special(tokenizer: TextTokenizer) -> Finding | None:
    """Finds ids that texts leave out."""
    hidden = [
        f"<{prefix}{letter}_{code}>"
        for prefix, letter, code, _ in _code_tokens(tokenizer)
        if tokenizer.hidden(f"<{prefix}{letter}_{code}>") is not None
    ]
    if not hidden:
        return None
    return Finding(
        "special tokens",
        "warn",
        f"{len(hidden)} codes, such as {min(hidden)}, are special tokens: code that decodes with "
        "skip_special_tokens deletes ids, and counts each of them as invalid. Here tokens are "
        "compared, not texts",
    )


def _rows(
    folder: Path, names: dict[str, Path], tokenizer: TextTokenizer, config: LanguageModelConfig
) -> Finding | None:
    """Finds codes whose rows of the embedding nobody has trained."""
    tokens = sorted(token for *_, token in _code_tokens(tokenizer) if token < config.vocab_size)
    if len(tokens) < 2 or EMBEDDING not in names:
        return None
    with opened_file(names[EMBEDDING]) as file:
        table = read_tensor(file, EMBEDDING, names[EMBEDDING])
    if table.ndim != 2 or len(table) <= tokens[-1]:
        raise ValueError(
            f"{names[EMBEDDING]}: {EMBEDDING} is {tuple(table.shape)}; config.json requires "
            f"{(config.vocab_size, config.decoder.hidden_size)}"
        )
    rows = table[torch.tensor(tokens)].float()
    if not bool(rows.isfinite().all()):
        raise ValueError(f"{names[EMBEDDING]}: {EMBEDDING} holds NaN or infinity")
    equal = len(tokens) - len(torch.unique(rows, dim=0))
    if not equal:
        return None
    return Finding(
        "embedding",
        "warn",
        f"{equal} of {len(tokens)} codes have the row of another code in {EMBEDDING}: their rows "
        "were never trained. LoRA leaves new rows as they are unless modules_to_save names "
        "embed_tokens and lm_head",
    )


def _adapter(folder: Path) -> Finding | None:
    """Finds LoRA weights that are not in the model, or that lack the rows of new tokens."""
    file = folder / "adapter_config.json"
    if not file.exists():
        return None
    try:
        saved = read_json(file).get("modules_to_save")
    except ValueError as error:
        return Finding("adapter", "fail", str(error))
    named = saved if isinstance(saved, list) else []
    lacks = [name for name in ("embed_tokens", "lm_head") if name not in named]
    detail = f"{file.name}: modules_to_save is {saved!r:.80}"
    if lacks:
        detail += (
            f", without {' and '.join(lacks)}: rows of codes that were added to the vocabulary are "
            "not in the adapter, so a merge leaves them untrained"
        )
    if (folder / "config.json").exists():
        detail += (
            ". The adapter lies beside a model, and the import reads the model alone: if it is not "
            "merged, merge it with peft (merge_and_unload); else delete adapter_*"
        )
    return Finding("adapter", "warn", detail)


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


def _generation_fields(folder: Path) -> dict[str, Any]:
    """Returns what generation_config.json says; nothing without the file."""
    file = folder / "generation_config.json"
    return read_json(file) if file.exists() else {}


def _sampling(folder: Path) -> Finding | None:
    fields = _generation_fields(folder)
    if fields.get("do_sample") is not True:
        return None
    others = [f"{name} {fields[name]!r:.20}" for name in SAMPLING if fields.get(name) is not None]
    also = f", with {', '.join(others)}" if others else ""
    return Finding(
        "sampling",
        "warn",
        f"generation_config.json has do_sample true{also}: an evaluation that does not switch it "
        "off draws its beams, and its figures change from run to run. Here nothing is drawn",
    )


def _search(folder: Path) -> Finding | None:
    """Finds settings of beam search that `generate` takes without a word."""
    fields = _generation_fields(folder)
    found = [
        f"{name} {fields[name]!r:.20}"
        for name, neutral in SEARCH.items()
        if fields.get(name) is not None and fields[name] != neutral
    ]
    if not found:
        return None
    return Finding(
        "search",
        "warn",
        f"generation_config.json has {', '.join(found)}, which generate of transformers applies to "
        "an evaluation that does not set them: a repetition penalty lowers the codes of the "
        "history, a length penalty divides scores. Nothing of it is applied here",
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

"""Counts which JSON schemas constraints accept, and which documents their masks let pass.

Each schema is refused in words or accepted. Of an accepted one, every valid document should be
reachable token by token in compact form, with its keys in any order, and no invalid one.

    python -m benchmarks.text.json_schemas FOLDER

FOLDER has `test-suite-draft2020-12.json.gz`, the official test suite as {path: groups}, and
`maskbench-600.jsonl.gz`, schemas of real programs with documents.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recserve.core.constraint import Constraint, ConstraintError, Grammar, has_token, num_words
from recserve.schemas.items import InvalidRequest
from recserve.service.text.constraints.compiler import ConstraintCompiler
from recserve.service.text.constraints.json_schema import subschemas
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.scripted_text import END, VOCABULARY, byte_tokenizer

MOST_STEPS = 300  # of the search for an order of keys, which begins with that of the schema


class Reader:
    """Whether the masks of a constraint let a document pass, byte by byte."""

    def __init__(self, constraint: Constraint, tokens: dict[int, int], schema: Any) -> None:
        self.constraint, self.tokens = constraint, tokens
        names = [name for _, own in subschemas(schema) for name in own.get("properties") or ()]
        self.ranks = {name: rank for rank, name in reversed(list(enumerate(names)))}
        self.row = np.zeros(num_words(VOCABULARY), np.int32)
        self.steps = 0

    def passes(self, document: Any) -> bool:
        """Returns whether some order of the document's keys is a text of the constraint."""
        self.steps = 0
        for matcher in self._write(self.constraint.start(), document):
            matcher.fill(self.row)
            if has_token(self.row, END):
                return True
        return False

    def _read(self, matcher: Any, text: str) -> Any:
        """Returns a matcher behind a text, or None if a mask refuses it."""
        matcher = matcher.fork()
        try:  # of tokens of one byte, those of the mask are those that a copy advances over
            for byte in text.encode("utf-8", "surrogatepass"):
                matcher.advance(self.tokens[byte])
        except (ConstraintError, KeyError):
            return None
        return matcher

    def _write(self, matcher: Any, value: Any) -> Iterator[Any]:
        """Yields a matcher behind each way to write a value."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            return
        if isinstance(value, dict):
            begun = self._read(matcher, "{")
            if begun is not None:
                yield from self._members(begun, value, True)
        elif isinstance(value, list):
            begun = self._read(matcher, "[")
            if begun is not None:
                yield from self._items(begun, value, 0)
        else:
            text = json.dumps(value, ensure_ascii=False)
            if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
                text = str(int(value))
            done = self._read(matcher, text)
            if done is not None:
                yield done

    def _members(self, matcher: Any, left: dict[str, Any], first: bool) -> Iterator[Any]:
        if not left:
            done = self._read(matcher, "}")
            if done is not None:
                yield done
            return
        for key in sorted(left, key=lambda key: self.ranks.get(key, len(self.ranks))):
            value = left[key]
            name = json.dumps(key, ensure_ascii=False)
            begun = self._read(matcher, ("" if first else ",") + name + ":")
            if begun is None:
                continue
            rest = {other: left[other] for other in left if other != key}
            for behind in self._write(begun, value):
                yield from self._members(behind, rest, False)

    def _items(self, matcher: Any, values: list[Any], place: int) -> Iterator[Any]:
        if place == len(values):
            done = self._read(matcher, "]")
            if done is not None:
                yield done
            return
        begun = self._read(matcher, "," if place else "")
        if begun is None:
            return
        for behind in self._write(begun, values[place]):
            yield from self._items(behind, values, place + 1)


def cases(folder: Path) -> Iterator[tuple[str, str, Any, list[tuple[Any, bool]]]]:
    """Yields source, feature, schema and documents with their validity."""
    with gzip.open(folder / "test-suite-draft2020-12.json.gz", "rt", encoding="utf-8") as file:
        suite = json.load(file)
    for path, groups in suite.items():
        if path.startswith("remotes/"):
            continue
        for group in groups:
            documents = [(test["data"], test["valid"]) for test in group["tests"]]
            yield "official suite", Path(path).stem, group["schema"], documents
    with gzip.open(folder / "maskbench-600.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            documents = [(test["data"], test["valid"]) for test in row["tests"]]
            yield "real programs", ", ".join(row["meta"]["features"]), row["schema"], documents


def main() -> None:
    """Prints a table, and every invalid document that passes."""
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as model:
        tokenizer = TextTokenizer.open(byte_tokenizer(Path(model)))
    tokens = {text[0]: n for n, text in enumerate(tokenizer.all_bytes) if len(text) == 1}
    counts: Counter[tuple[str, str]] = Counter()
    reasons: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    compiler = ConstraintCompiler(tokenizer, VOCABULARY, (END,))
    for source, feature, schema, documents in cases(folder):
        try:
            constraint = compiler.compile("schema", Grammar("json_schema", json.dumps(schema)))
        except (InvalidRequest, ValueError) as error:
            counts[source, "schemas refused"] += 1
            reasons[str(error).rpartition("schema")[2][:80]] += 1
            continue
        counts[source, "schemas accepted"] += 1
        for document, valid in documents:
            try:
                passed = Reader(constraint, tokens, schema).passes(document)
            except ConstraintError as error:
                counts[source, "documents at a limit"] += 1
                print("limit", source, feature, error)
                continue
            kind = "valid" if valid else "invalid"
            counts[source, f"{kind}, {'pass' if passed else 'do not pass'}"] += 1
            if passed and not valid:
                print("WRONG", feature, json.dumps(schema)[:400], json.dumps(document)[:200])
            if valid and not passed:
                lost[f"{source}: {feature}"] += 1
                if "-v" in sys.argv:
                    print("lost", feature, json.dumps(schema)[:300], json.dumps(document)[:200])
    for key, count in sorted(counts.items()):
        print(f"{key[0]:16} {key[1]:24} {count}")
    if "-v" in sys.argv:
        print(reasons.most_common(60), lost.most_common(60), sep="\n")


if __name__ == "__main__":
    main()

"""The text encoder of a bundle: TF-IDF weights times a projection.

`vectors.py` fits it. Encoding needs only numpy, so a server can encode the text of new items.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from recserve.features.tables.items import ItemTable
from recserve.features.words import fold, words
from recserve.files import read_arrays, read_json, whole_file


@dataclass(frozen=True)
class TextEncoder:
    """Maps the text of items to vectors.

    Attributes:
        terms: The vocabulary of V terms.
        idf: [V] float32, inverse document frequency of each term.
        components: [V, F] float32, the projection.
    """

    terms: tuple[str, ...]
    idf: np.ndarray
    components: np.ndarray

    @cached_property
    def _columns(self) -> dict[str, int]:
        return {term: column for column, term in enumerate(self.terms)}

    def encode(self, items: ItemTable) -> np.ndarray:
        """Returns [I, F] float32 vectors of unit length; zero for an item without a known term.

        A term that occurs n times has the weight (1 + log n) * idf. Weights have unit length before
        the projection. Sums run in column order, so the result equals scikit-learn's bit for bit.
        """
        vectors = np.zeros((len(items), self.components.shape[1]))
        for row in range(len(items)):
            counts = Counter(self._known(document(items, row)))
            if not counts:
                continue
            columns = sorted(counts)
            weights = 1 + np.log(np.array([counts[c] for c in columns], np.float64))
            weights *= self.idf[columns]
            weights /= np.sqrt(np.cumsum(weights * weights)[-1])
            vectors[row] = (weights[:, None] * self.components[columns]).sum(axis=0)
        return unit(vectors.astype(np.float32))

    def knows(self, text: str) -> bool:
        """Returns whether a text has a word of the vocabulary."""
        return bool(self._known(text))

    def _known(self, text: str) -> list[int]:
        """Returns the columns of a text's words, in their order."""
        return [self._columns[word] for word in words(text) if word in self._columns]

    def save(self, folder: Path) -> None:
        """Writes terms.json and text.safetensors."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "terms.json").write_text(
            json.dumps(self.terms, ensure_ascii=False), encoding="utf-8"
        )
        with whole_file(folder / "text.safetensors") as new:
            save_file({"idf": self.idf, "components": self.components}, new)

    @staticmethod
    def load(folder: Path) -> TextEncoder:
        """Reads what `save` wrote. Raises ValueError if it is damaged."""
        try:
            terms = read_json(folder / "terms.json")
            arrays = read_arrays(folder / "text.safetensors", ("idf", "components"))
            idf, components = arrays["idf"], arrays["components"]
        except ValueError as error:
            raise ValueError(f"{folder}: not a text encoder ({error})") from error
        if not isinstance(terms, list) or not all(isinstance(term, str) for term in terms):
            raise ValueError(f"{folder}/terms.json: expected a list of strings")
        if len(set(terms)) < len(terms):
            raise ValueError(f"{folder}/terms.json: a term occurs twice")
        for name, array in arrays.items():
            if array.dtype.kind != "f":
                raise ValueError(f"{folder}: {name} are {array.dtype}; expected floats")
        if idf.shape != (len(terms),) or components.ndim != 2 or len(components) != len(terms):
            raise ValueError(
                f"{folder}: {len(terms)} terms do not fit {idf.shape}, {components.shape}"
            )
        return TextEncoder(tuple(terms), idf, components)


def document(items: ItemTable, row: int) -> str:
    """Returns an item's title, keywords and category prefixes; `words` makes each prefix one."""
    texts = [items.titles[row]]
    if "keywords" in items.attributes.column_names:
        keywords = items.attributes.column("keywords")[row].as_py()
        if keywords:
            listed = keywords if isinstance(keywords, list) else [keywords]
            texts += [str(keyword) for keyword in listed if keyword is not None]
    for path in items.categories[row]:
        # Folded before it is divided: folding makes spaces of some characters.
        parts = ["-".join(fold(part).split()) for part in path.split(">")]
        texts += ["c:" + "/".join(parts[: depth + 1]) for depth in range(len(parts))]
    return " ".join(texts)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Returns rows of length 1; zero rows stay zero."""
    with np.errstate(over="ignore"):
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
    extreme = (~np.isfinite(length) | (length == 0))[:, 0]
    if extreme.any():  # the squares of such numbers leave the range of the type
        largest = np.abs(vectors[extreme]).max(axis=1, keepdims=True, initial=0)
        vectors = vectors.copy()
        vectors[extreme] /= np.where(largest > 0, largest, 1)
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(length > 0, length, 1)).astype(np.float32)

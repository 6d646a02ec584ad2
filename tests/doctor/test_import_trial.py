"""The doctor's comparison of an import with its original: it is right, and it can fail."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from recserve.doctor.checkpoint_checks import examine_checkpoint
from recserve.doctor.import_trial import PlainCheckpoint
from recserve.formats import conversion
from recserve.models.imported_model import ImportedModel, ImportedTemplate
from recserve.models.loading import load_language_model
from tests.support.foreign_recommenders import foreign
from tests.support.imports import options

CASES = [
    ("generic", "qwen3"),
    ("minionerec", "qwen2"),
    ("lc-rec", "llama"),
    ("openonerec", "qwen3"),
]


def tried(data, root, name, **changes):
    found = examine_checkpoint(data.folder, options(data, root, name, **changes), 2)
    return {finding.name: finding for finding in found}


@pytest.mark.parametrize(("name", "family"), CASES)
@pytest.mark.parametrize("rule", [None, "level"])
def test_an_import_equals_its_original(name, family, rule, tmp_path):
    data = foreign(tmp_path, family, before="<s_" if name == "openonerec" else "<")
    found = tried(data, tmp_path, name, rule=rule)
    assert found["scores"].state == "ok", found["scores"]
    if name == "openonerec":  # it has no mask
        assert "any tokens" in found["mask"].detail and "masked beams" not in found
    else:
        assert found["masked beams"].state == ("warn" if name == "lc-rec" else "ok")


@pytest.mark.parametrize("rule", ["children", "level", "vocabulary"])
def test_ids_of_unequal_lengths_equal_their_original(rule, tmp_path):
    data, draw = foreign(tmp_path, "qwen3"), np.random.default_rng(0)
    words = [[str(w) for w in draw.choice(["a", "abba", "cab"], 1 + row % 3)] for row in range(40)]
    (tmp_path / "words.json").write_text(json.dumps(dict(zip(data.ids, words, strict=True))))
    changes = {"ids": tmp_path / "words.json", "id_format": "[{text}]", "rule": rule}
    found = tried(data, tmp_path, "generic", item_text="{id} {title}; ", **changes)
    assert found["scores"].state == "ok", found["scores"]
    assert found["masked beams"].state == "ok", found["masked beams"]
    assert "ids have 3 to 17 tokens" in found["lengths"].detail


def _turned(tokens):
    """Returns `ImportedTemplate.tokens` with the history in the other order."""
    return lambda self, rows, codes, user=None: tokens(self, rows[::-1].copy(), codes, user)


def _shifted(rows):
    """Returns `_rows` with each row in the place of another."""
    return lambda table, wanted: rows(table, np.roll(wanted, 1))


def _louder(level_logits):
    return lambda self, hidden, level: 1.01 * level_logits(self, hidden, level)


FAULTS = {
    "order of the history": (ImportedTemplate, "tokens", _turned),
    "rows of the head": (conversion, "_rows", _shifted),
    "logits": (ImportedModel, "level_logits", _louder),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_import_is_found(fault, tmp_path, monkeypatch, force_kernels):
    force_kernels("torch")  # the search in C has the rows of the head itself
    place, name, change = FAULTS[fault]
    monkeypatch.setattr(place, name, change(getattr(place, name)))
    found = tried(foreign(tmp_path), tmp_path, "generic")
    assert found["scores"].state == "fail", found["scores"]


def test_free_beams_are_those_of_generate(tmp_path):
    """Beams without a mask, against transformers, on a model that often spells codes."""
    data = foreign(tmp_path, seed=4)
    path = data.folder / "model.safetensors"
    weights = load_file(path)
    others = torch.ones(len(weights["lm_head.weight"]), dtype=torch.bool)
    others[data.tokenizer.convert_tokens_to_ids(sum(data.level_tokens, []))] = False
    weights["lm_head.weight"][others] *= 0.3
    save_file(weights, path, {"format": "pt"})
    plain, model = PlainCheckpoint(load_language_model(data.folder)), data.model
    draw = np.random.default_rng(0)
    for _ in range(4):
        prompt = draw.integers(2, 250, 20).tolist()
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, 20, dtype=torch.long),
            num_beams=5,
            num_return_sequences=5,
            max_new_tokens=3,
            do_sample=False,
            length_penalty=0.0,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        found = plain.search(prompt, 3, 5, lambda tokens: None, lambda tokens: None)
        assert [list(tokens) for tokens, _ in found] == out.sequences[:, 20:].tolist()
        np.testing.assert_allclose([s for _, s in found], out.sequences_scores, atol=1e-4)

"""`recserve doctor FOLDER`: each trap of a foreign checkpoint has its finding."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from recserve.cli.app import app
from recserve.doctor.checkpoint_checks import examine_checkpoint
from tests.support.foreign_recommenders import foreign
from tests.support.imports import options

EMBEDDING = "model.embed_tokens.weight"


def edit(path, **changes):
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**fields, **changes}))


def spoil(folder, trap):
    """Sets a trap of a folder; returns the folder."""
    weights = folder / "model.safetensors"
    if trap == "path":
        return folder.rename(folder.with_name("LLaMA-Factory"))
    if trap == "sampling":
        edit(folder / "generation_config.json", do_sample=True, top_p=0.8)
    elif trap == "search":
        edit(folder / "generation_config.json", repetition_penalty=1.1, length_penalty=2.0)
    elif trap == "special tokens":
        fields = json.loads((folder / "tokenizer.json").read_text())
        for one in fields["added_tokens"]:
            one["special"] |= one["content"].startswith("<a_")
        edit(folder / "tokenizer.json", **fields)
    elif trap == "codebooks":
        pass  # the drawn checkpoint has used codes alone
    elif trap == "embedding":
        found = load_file(weights)
        found[EMBEDDING][-15:-13] = 0  # the last two codes
        save_file(found, weights)
    elif trap == "adapter":
        edit(folder / "adapter_config.json", modules_to_save=["lm_head"])
    elif trap == "end token":
        edit(folder / "config.json", eos_token_id=5)
    elif trap == "chat template":
        (folder / "chat_template.jinja").write_text(
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}"
            "{% endfor %}done"
        )
    elif trap == "type":
        edit(folder / "config.json", dtype="bfloat16")
    elif trap == "tensors":
        save_file({**load_file(weights), "ctr_head.weight": torch.ones(1, 64)}, weights)
    elif trap == "vocabulary":
        edit(folder / "config.json", vocab_size=20)
    elif trap == "tokenizer":
        (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    elif trap == "model":
        edit(folder / "config.json", model_type="t5")
    return folder


TRAPS = {
    "path": ("warn", "decodes without a mask"),
    "sampling": ("warn", "do_sample true, with top_p 0.8"),
    "search": ("warn", "length_penalty 2.0, repetition_penalty 1.1"),
    "special tokens": ("warn", "9 codes, such as <a_0>, are special"),
    "codebooks": ("ok", "a has 9 codes from 0 to 16"),
    "embedding": ("warn", "1 of 27 codes have the row of another code"),
    "adapter": ("warn", "['lm_head'], without embed_tokens"),
    "end token": ("warn", "ends with token 1 and config.json with 5"),
    "chat template": ("warn", "drops a content"),
    "type": ("ok", "bfloat16"),
    "tensors": ("fail", "ctr_head.weight"),
    "vocabulary": ("fail", "belongs to another model"),
    "tokenizer": ("fail", "use_fast"),
    "model": ("fail", "encoder-decoder"),
}


def examined(folder, options=None, histories=0):
    found = examine_checkpoint(folder, options, histories)
    return {finding.name: (finding.state, finding.detail) for finding in found}


@pytest.mark.parametrize("trap", TRAPS)
def test_each_trap_of_a_folder_has_its_finding(trap, tmp_path):
    data = foreign(tmp_path)
    state, words = TRAPS[trap]
    before = examined(data.folder).get(trap, ("ok", ""))
    assert trap == "codebooks" or (before[0] == "ok" and words not in before[1])
    found = examined(spoil(data.folder, trap))
    assert found[trap][0] == state and words in found[trap][1], found[trap]


def test_an_adapter_alone_is_refused_and_says_what_it_lacks(tmp_path):
    data = foreign(tmp_path)
    (data.folder / "config.json").unlink()
    edit(data.folder / "adapter_config.json", modules_to_save=None)
    found = examined(data.folder)
    assert found["model"][0] == "fail" and "merge_and_unload" in found["model"][1]
    assert "without embed_tokens and lm_head" in found["adapter"][1]


def spoil_map(data, root, trap):
    """Sets a trap of a map; returns the changed options."""
    if trap == "offsets":
        codes = [[int(text[3:-1]) for text in one] for one in data.ids.values()]
        data.ids.update(
            (item, [f"<a_{a}>", f"<b_{100 + b}>", f"<c_{200 + c}>"])
            for item, (a, b, c) in zip(list(data.ids), codes, strict=True)
        )
        return {}
    if trap == "prompt":
        return {"max_history": 200}
    if trap == "rule":
        return {"rule": "children"}
    if trap == "absent":
        data.ids["3"] = ["<a_1>", *data.ids["3"][1:]]
        return {}
    if trap == "unequal":
        data.ids["3"] = data.ids["3"] + ["<d_1>"]
        return {}
    if trap == "words":
        ids = dict.fromkeys(data.ids, "red, warm, wool, long, scarf")
        (root / "words.json").write_text(json.dumps(ids))
        return {"ids": root / "words.json"}
    if trap == "pickled":
        (root / "ids.pt").write_bytes(b"PK")
        return {"ids": root / "ids.pt"}
    if trap == "turned":
        np.save(root / "ids.npy", np.zeros((3, 40), np.int64))
        return {"ids": root / "ids.npy"}
    if trap == "twice":
        table = {"item_id": ["0", "0"], "semantic_id": ["<a_0><b_0><c_0>"] * 2}
        pq.write_table(pa.table(table), root / "ids.parquet")
        return {"ids": root / "ids.parquet"}
    return {}


MAP_TRAPS = {
    "shared ids": ("minionerec", "shared ids", "warn", "40 items have 37 ids"),
    "offsets": ("generic", "offsets", "warn", "counts on after the one before"),
    "level sets": ("lc-rec", "mask", "warn", "ids; 37 ids belong to items"),
    "first level": ("minionerec", "first level", "warn", "9 codes of level 1 are in use"),
    "prompt": ("minionerec", "prompt", "fail", "1024 positions"),
    "separator": ("minionerec", "prompt", "warn", ", <a_"),
    "rule": ("minionerec", "rule", "warn", "The original's rule is vocabulary"),
    "vocabulary": ("lc-rec", "rule", "ok", "all 298 tokens"),
    "end tokens": ("minionerec", "rule", "ok", r"'\n' and '</s>' (tokens [200, 1])"),
    "divisor": ("lc-rec", "divisor", "ok", "to the power of 1, here up to 4"),
    "memory": ("lc-rec", "beams", "warn", "lowers the number of beams by one"),
    "absent": ("minionerec", "import", "fail", "has the code <a_1>, which is no token"),
    "unequal": ("lc-rec", "import", "fail", "item '3' has the id"),
    "words": ("generic", "import", "fail", "expected 3 codes as in <a_{}><b_{}><c_{}>"),
    "pickled": ("generic", "import", "fail", "unpickling runs code"),
    "turned": ("generic", "import", "fail", "(3, 40); expected integers of shape (40, 3)"),
    "twice": ("generic", "import", "fail", "'0' occurs twice"),
    "figure": ("lc-rec", "published figure", "ask", "the mean over 17 prompts"),
}


@pytest.mark.parametrize("trap", MAP_TRAPS)
def test_each_trap_of_a_map_has_its_finding(trap, tmp_path):
    data = foreign(tmp_path, "llama")
    format, name, state, words = MAP_TRAPS[trap]
    changes = spoil_map(data, tmp_path, trap)
    found = examined(data.folder, options(data, tmp_path, format, **changes), trap == "absent")
    assert found[name][0] == state and words in found[name][1], found[name]


def test_the_command_names_levels_formats_and_the_order_of_tokens(tmp_path):
    data = foreign(tmp_path)
    found = examined(data.folder)
    assert found["model"][0] == "ok"
    assert "--format minionerec or lc-rec" in found["codes"][1]
    assert "order of texts" in found["codes"][1]
    # The drawn tokeniser writes bytes, so the keys of MiniOneRec's trie are never found.
    assert "tokens; MiniOneRec" in found["trie keys"][1]
    assert found["import"][0] == found["published figure"][0] == "ask"
    done = CliRunner().invoke(app, ["doctor", str(data.folder)])
    assert done.exit_code == 0 and "codes" in done.output
    given = options(data, tmp_path, "lc-rec")
    command = ["doctor", str(data.folder), "--ids", str(given.ids), "--format", "lc-rec"]
    assert CliRunner().invoke(app, command).exit_code == 2
    done = CliRunner().invoke(app, [*command, "--items", str(data.items), "--histories", "1"])
    assert done.exit_code == 0 and "free beams" in done.output
    spoil(data.folder, "model")
    assert CliRunner().invoke(app, ["doctor", str(data.folder)]).exit_code == 1

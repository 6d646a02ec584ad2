"""`recserve doctor FOLDER`: each trap of a foreign checkpoint has its finding."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from recserve.cli.app import app
from recserve.doctor.checkpoint_checks import examine_checkpoint
from tests.support.foreign_recommenders import foreign


def edit(path, **changes):
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**fields, **changes}))


def spoil(folder, trap):
    """Sets a trap; returns the folder."""
    if trap == "path":
        return folder.rename(folder.with_name("LLaMA-Factory"))
    if trap == "sampling":
        edit(folder / "generation_config.json", do_sample=True)
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
        weights = load_file(folder / "model.safetensors")
        save_file({**weights, "ctr_head.weight": torch.ones(1, 64)}, folder / "model.safetensors")
    elif trap == "vocabulary":
        edit(folder / "config.json", vocab_size=20)
    elif trap == "tokenizer":
        (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    elif trap == "model":
        edit(folder / "config.json", model_type="t5")
    return folder


TRAPS = {
    "path": ("warn", "decodes without a mask"),
    "sampling": ("warn", "do_sample"),
    "end token": ("warn", "ends with token 1 and config.json with 5"),
    "chat template": ("warn", "drops a content"),
    "type": ("ok", "bfloat16"),
    "tensors": ("fail", "ctr_head.weight"),
    "vocabulary": ("fail", "belongs to another model"),
    "tokenizer": ("fail", "use_fast"),
    "model": ("fail", "encoder-decoder"),
}


def examined(folder):
    return {finding.name: (finding.state, finding.detail) for finding in examine_checkpoint(folder)}


@pytest.mark.parametrize("trap", TRAPS)
def test_each_trap_has_its_finding(trap, tmp_path):
    data = foreign(tmp_path)
    before = examined(data.folder).get(trap, ("ok", ""))
    state, words = TRAPS[trap]
    assert before[0] == "ok" and words not in before[1]
    found = examined(spoil(data.folder, trap))
    assert found[trap][0] == state and words in found[trap][1]


def test_the_command_names_levels_formats_and_the_order_of_tokens(tmp_path):
    data = foreign(tmp_path)
    found = examined(data.folder)
    assert found["model"][0] == "ok"
    assert "--format minionerec or lc-rec" in found["codes"][1]
    assert "order of texts" in found["codes"][1]
    # The drawn tokeniser writes bytes, so the keys of MiniOneRec's trie are never found.
    assert "tokens; MiniOneRec" in found["trie keys"][1]
    done = CliRunner().invoke(app, ["doctor", str(data.folder)])
    assert done.exit_code == 0 and "codes" in done.output
    spoil(data.folder, "model")
    assert CliRunner().invoke(app, ["doctor", str(data.folder)]).exit_code == 1

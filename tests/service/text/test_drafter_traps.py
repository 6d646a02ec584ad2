"""Fourteen ways to misread a drafter's files. Each is a fault in good files, and each is named.

The faults are those of published loaders. A fault that changes a tensor's place is an error of the
loader, which the doctor reports. A fault that leaves the files readable is found by the trial: the
drafter is trained first, and the report names a reading that accepts more.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from recserve.doctor import drafter_trial
from recserve.doctor.drafter_checkup import examine_drafter
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.drafter_folders import (
    Change,
    changed_copy,
    own_text,
    uneven,
    uneven_model,
    write_drawn,
    write_trained,
)
from tests.support.grids import chosen
from tests.support.shared_folders import shared_folder
from tests.support.text_plain import VOCABULARY
from tests.support.tiny_tokenizer import tiny_tokenizer

RATE = r"the (?:normalised )?(?:output|final state|stream).*: \d\.\d\d"


@dataclass(frozen=True)
class Trap:
    """A seeded fault.

    Attributes:
        number: Number of the trap.
        base: The good files, a name of `write_drawn` or `write_trained`.
        change: The fault.
        finding: Name of the finding that reports it.
        detail: Pattern of what it says.
        state: State of the finding; None if any.
    """

    number: int
    base: str
    change: Change
    finding: str
    detail: str
    state: str | None = "fail"


def fields_of(**changes) -> Change:
    """Returns a change of top fields; None removes one."""

    def change(fields, weights):
        for name, value in changes.items():
            fields[name] = value
            if value is None:
                del fields[name]

    return change


def nested(**changes) -> Change:
    """Returns a change of fields inside dflash_config."""

    def change(fields, weights):
        fields_of(**changes)(fields["dflash_config"], weights)

    return change


def without(*endings: str) -> Change:
    """Returns the removal of all tensors whose names end so."""

    def change(fields, weights):
        gone = [name for name in weights if name.endswith(endings)]
        assert gone
        for name in gone:
            del weights[name]

    return change


def block_ids_are_states(fields, weights):
    """The ids of speculators, which count the embedding, in a DFlash file."""
    own = fields["dflash_config"]
    own["target_layer_ids"] = [number + 1 for number in own["target_layer_ids"]]


def bias_is_true_by_default(fields, weights):
    del fields["bias"], weights["fc.bias"]


def ids_in_d2t(fields, weights):
    weights["d2t"] = weights["t2d"].nonzero()[:, 0]


def ids_in_d2t_without_t2d(fields, weights):
    """Ids that are also valid as offsets, for a head that proposes a part of the tokens."""
    counts = torch.bincount(torch.from_numpy(own_text(uneven_model())), minlength=VOCABULARY)
    words = counts[:27].topk(13).indices.sort().values
    weights["lm_head.weight"] = weights["lm_head.weight"][words]
    weights["d2t"] = words
    fields["draft_vocab_size"] = len(words)


def output_norm_fed_back(fields, weights):
    """A norm with weights far from 1, whose output is not fed back, and a flag that says it is.

    SpecForge writes such a flag: the norm precedes its head, and its training feeds no norm back.
    """
    fields["norm_output"] = True
    name = "norm.weight"
    if name not in weights:
        name = next(name for name in weights if name.endswith("shared_head.norm.weight"))
        head = name.replace("norm.weight", "head.weight")
        weights[head] = uneven_model().head.weight.clone()
    else:
        head = "lm_head.weight"
    scale = uneven(32)
    weights[name] = weights[name] * scale
    weights[head] = weights[head] / scale


def final_state_read_as_stream(fields, weights):
    """The id of the last layer's stream, for a module that was trained on the final state.

    Of this small target a token tells most of the next one. So the tokens count half as much.
    """
    fields["target_layer_ids"] = [2]
    name = next(name for name in weights if name.endswith("eh_proj.weight"))
    weights[name] = torch.cat([weights[name][:, :32] / 2, weights[name][:, 32:]], 1)


def norm_before_fc_in_two_places(fields, weights):
    weights["input_norm.weight"] = torch.ones(96)
    fields["eagle_config"]["norm_before_fc"] = True
    fields["norm_before_fc"] = False


def norm_before_fc_nowhere(fields, weights):
    weights["input_norm.weight"] = torch.ones(96)


def wide_norm_for_three(fields, weights):
    fields["fc_norm"] = True
    weights["input_norm.weight"] = torch.ones(96)


def contradicting_causal_flags(fields, weights):
    fields["dflash_config"] |= {"causal": True, "causal_head": False}


def pairs_instead_of_halves(fields, weights):
    """Neighbours turn together, and no flag says so."""
    for name in weights:
        if ".q_proj." in name or ".k_proj." in name:
            halves = weights[name].unflatten(0, (-1, 2, 4))
            weights[name] = halves.transpose(1, 2).flatten(0, 2)


def deepspec_without_norms(fields, weights):
    fields["architectures"] = ["Qwen3Eagle3Model"]


TRAPS = (
    Trap(1, "dflash", nested(target_layer_ids=[0, 1, 2]), "files", "layer 2 of its target"),
    Trap(1, "trained dflash", block_ids_are_states, "reading: layers", r"after layer 1: .*better"),
    Trap(2, "eagle-1", bias_is_true_by_default, "files", "fc.bias"),
    Trap(2, "eagle-1", fields_of(bias=False), "files", "fc.bias"),
    Trap(3, "eagle-3", ids_in_d2t, "files", "d2t"),
    Trap(3, "trained eagle3", ids_in_d2t_without_t2d, "reading: vocabulary", "token ids.*better"),
    Trap(4, "eagle-3", norm_before_fc_in_two_places, "files", "norm_before_fc False.*eagle_config"),
    Trap(4, "eagle-3", norm_before_fc_nowhere, "files", "input_norm"),
    Trap(5, "eagle-3", wide_norm_for_three, "files", "fc_norm.0.weight"),
    Trap(6, "trained eagle3", output_norm_fed_back, "reading: fed back", "before its norm"),
    Trap(7, "dflash", contradicting_causal_flags, "files", "causal and causal_head"),
    Trap(7, "trained jetspec", nested(causal_head=None), "reading: attention", "causal within"),
    Trap(8, "dflash2", fields_of(architectures=["DFlashDraftModel"]), "kind", "candidate_", "ok"),
    Trap(8, "dflash2", nested(selector_rank=None), "files", "selector"),
    Trap(9, "trained eagle3", pairs_instead_of_halves, "reading: rotary", "pairs.*is_neox_style"),
    Trap(10, "eagle-3", fields_of(max_position_embeddings=8), "positions", "names 8", "ok"),
    Trap(11, "eagle-3", deepspec_without_norms, "files", "q_norm"),
    Trap(11, "dflash", without("q_norm.weight", "k_norm.weight"), "files", "q_norm"),
    # Of this small target a token tells most of the next one, so the state that goes back matters
    # little: both readings are listed with what they accept.
    Trap(12, "trained mtp", output_norm_fed_back, "reading: fed back", f"{RATE}.*{RATE}", None),
    Trap(12, "trained mtp", final_state_read_as_stream, "reading: state", "final state.*better"),
    Trap(13, "dflash", nested(mask_token_id=VOCABULARY), "files", f"mask_token_id is {VOCABULARY}"),
    Trap(14, "medusa", without("1.1.weight"), "files", "lacks .*head 1"),
)


def good_files(base: str) -> Path:
    """Returns good files, written once for all processes."""
    kind = base.removeprefix("trained ")
    write = write_drawn if kind == base else write_trained

    def make(folder: Path) -> None:
        write(kind, folder / kind)

    return shared_folder(base.replace(" ", "-") + "-drafter", make) / kind


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("drafters")


def report(folder: Path, root: Path) -> dict[str, list]:
    """Returns the findings by name."""
    tokenizer = TextTokenizer.open(tiny_tokenizer(root / "tokenizer"))
    found: dict[str, list] = {}
    for finding in examine_drafter(str(folder), uneven_model(), tokenizer):
        found.setdefault(finding.name, []).append(finding)
    return found


def marked(trap: Trap):
    slow = [pytest.mark.slow] if trap.base.startswith("trained") else []
    return pytest.param(trap, marks=slow, id=f"{trap.number}-{trap.base}-{trap.finding}")


@pytest.fixture(autouse=True)
def short_trials(request, monkeypatch):
    """Few and short texts, where the trial's result does not matter."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(drafter_trial, "NUM_TEXTS", 4)
        monkeypatch.setattr(drafter_trial, "NUM_TIMED", 1)
        monkeypatch.setattr(drafter_trial, "OUTPUT", 8)


@pytest.mark.parametrize("trap", [marked(trap) for trap in TRAPS])
def test_a_trap_is_named(trap, root, tmp_path):
    faulty = changed_copy(good_files(trap.base), tmp_path / "faulty", trap.change)
    found = report(faulty, root)
    named = [one for one in found[trap.finding] if trap.state in (one.state, None)]
    said = [f"{one.name} {one.state} {one.detail}" for own in found.values() for one in own]
    assert any(re.search(trap.detail, one.detail) for one in named), "\n".join(said)


def test_every_trap_is_in_the_table():
    assert {trap.number for trap in TRAPS} == set(range(1, 15))


def test_a_pickled_mask_is_refused(root, tmp_path):
    """Trap 13: DFlash may lay its mask's embedding beside the weights."""
    faulty = changed_copy(good_files("dflash"), tmp_path / "faulty", fields_of())
    (faulty / "mask_embedding.pt").write_bytes(b"")
    assert "mask_embedding.pt" in report(faulty, root)["files"][0].detail


def test_heads_without_matrices_read_the_targets(root, tmp_path):
    """Trap 14: heads of the published trainer have no output matrix, and are no fault."""
    change = without(*(f"{head}.1.weight" for head in range(3)))
    found = report(changed_copy(good_files("medusa"), tmp_path / "legacy", change), root)
    assert found["files"][0].state == "ok"


@pytest.mark.parametrize(
    "base",
    chosen(
        (
            *("eagle-1", "eagle-3", "mtp", "dflash", "jetspec", "dspark", "dflash2"),
            *("specformer", "medusa"),
        ),
        *("eagle-3", "mtp"),
    ),
)
def test_good_files_load_under_every_reading(base, root):
    """The loader reads every view that the doctor makes of them."""
    found = report(good_files(base), root)
    assert found["kind"][0].state == found["files"][0].state == "ok"
    readings = [one for name in found if name.startswith("reading") for one in found[name]]
    assert not [one for one in readings if "is refused" in one.detail], readings
    assert bool(readings) == (base != "medusa")


@pytest.mark.slow
@pytest.mark.parametrize("base", ["eagle3", "mtp", "dflash", "jetspec"])
def test_a_good_drafter_passes(base, root):
    found = report(good_files(f"trained {base}"), root)
    assert not [one for own in found.values() for one in own if one.state == "fail"], found
    assert "tokens per step" in found["acceptance"][0].detail

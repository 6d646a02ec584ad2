"""`recserve doctor DRAFTER`: examines a drafter's folder for a target, and tries it on texts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from recserve.core.draft_policy import BREAK_EVEN
from recserve.doctor.drafter_checks import (
    check_copies,
    check_norms,
    check_positions,
    check_tokenizer,
    check_vocabulary,
)
from recserve.doctor.drafter_kind import DrafterFiles, drafter_files
from recserve.doctor.drafter_trial import (
    DraftMeasure,
    Openings,
    compare,
    cut_openings,
    measure_acceptance,
    measure_cost,
    write_openings,
)
from recserve.doctor.finding import Finding
from recserve.drafters.registry import build_drafter, drafter_classes
from recserve.models.language_model import LanguageModel
from recserve.models.packing import pack_weights
from recserve.speculation.drafter import Drafter
from recserve.speculation.open_question import (
    CheckpointAmbiguity,
    CheckpointReading,
    write_view,
)
from recserve.tokenizer.tokenizer import TextTokenizer

MAX_CHARACTERS = 400_000  # of a held-out text


@dataclass(frozen=True)
class _Alternative:
    """Another reading of the files, built.

    Attributes:
        question: What the files leave open.
        reading: The reading.
        drafter: The drafter that reads so; None if it cannot be built.
        refusal: Why not.
    """

    question: CheckpointAmbiguity
    reading: CheckpointReading
    drafter: Drafter | None
    refusal: str = ""


def examine_drafter(
    named: str, target: LanguageModel, tokenizer: TextTokenizer, text: str | None = None
) -> list[Finding]:
    """Examines a drafter and tries it.

    Args:
        named: `DIR`, or `NAME=DIR` as for `serve --drafter`.
        target: The model to draft for. Its weights are packed.
        tokenizer: The target's tokenizer.
        text: Held-out text. None lets the target write the beginnings of the texts.

    Returns:
        Findings, in order. The last ones are missing if the files cannot be loaded.

    Raises:
        ValueError: If the text is too short.
    """
    name, _, folder = named.rpartition("=")
    try:
        files = drafter_files(Path(folder))
        name = _name(name, files)
    except ValueError as error:
        return [Finding("kind", "fail", str(error))]
    findings = [_kind(name, files)]
    try:
        drafter = build_drafter(name, target, [files.folder])
        questions = drafter_classes()[name].open_questions(files.folder, target)
    except (ValueError, OSError) as error:
        return [*findings, Finding("files", "fail", str(error))]
    findings.append(Finding("files", "ok", f"{len(files.tensors)} tensors, all in their places"))
    checks: dict[str, Callable[[], Finding]] = {
        "positions": lambda: check_positions(files, target),
        "norms": lambda: check_norms(files),
        "copies": lambda: check_copies(files, target),
        "tokenizer": lambda: check_tokenizer(files, target, tokenizer),
    }
    findings += [_run_check(check, run) for check, run in checks.items()]
    with tempfile.TemporaryDirectory() as views:
        others = list(_alternatives(name, files.folder, target, questions, Path(views)))
    pack_weights(target)
    if text is None:
        openings = write_openings(target)
    else:
        tokens = tokenizer.encode(text[:MAX_CHARACTERS])
        openings = cut_openings(np.array(tokens, dtype=np.int64), target)
    measure = measure_acceptance(target, drafter, openings)
    findings.append(
        _run_check(
            "vocabulary", lambda: check_vocabulary(files, target, np.concatenate(measure.outputs))
        )
    )
    findings += [
        Finding(f"reading: {question.name}", "ok", _describe_served(question))
        for question in questions
        if question.reason and not question.others
    ]
    if others:
        chains = measure_acceptance(target, drafter, openings, chains=True)
        findings += [_judge(one, chains, target, openings) for one in others]
    return [*findings, _acceptance(measure), _cost(target, drafter, openings)]


def _name(name: str, files: DrafterFiles) -> str:
    """Returns the drafter's name. Raises ValueError if the tensors contradict a given one."""
    if not name:
        return files.kinds[0]
    if name not in drafter_classes():
        raise ValueError(f"drafter is {name!r}; choose one of {sorted(drafter_classes())}")
    built_in = drafter_classes()[name].__module__.startswith("recserve.")
    if built_in and name not in files.kinds:
        raise ValueError(
            f"{files.told_by!r} is a tensor of {files.kinds[0]!r}, which the drafter {name!r} does "
            "not read"
        )
    return name


def _kind(name: str, files: DrafterFiles) -> Finding:
    said = ", ".join(files.config.get("architectures") or ())
    said = said or str(files.config.get("speculators_model_type") or "")
    named = f"; config.json says {said}" if said else ""
    return Finding("kind", "ok", f"{name}, told by the tensor {files.told_by}{named}")


def _run_check(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except (ValueError, OSError) as error:
        return Finding(name, "fail", str(error))


def _alternatives(
    name: str,
    folder: Path,
    target: LanguageModel,
    questions: tuple[CheckpointAmbiguity, ...],
    views: Path,
) -> Iterator[_Alternative]:
    """Builds the drafter once for each other reading."""
    for number, question in enumerate(questions):
        for other, reading in enumerate(question.others):
            view = write_view(folder, reading, views / f"{number}-{other}")
            try:
                built = build_drafter(name, target, [view])
            except ValueError as error:
                yield _Alternative(question, reading, None, str(error))
            else:
                yield _Alternative(question, reading, built)


def _describe_served(question: CheckpointAmbiguity) -> str:
    """Returns the reading that is served, and why."""
    return question.default + (f" ({question.reason})" if question.reason else "")


def _judge(
    one: _Alternative, taken: DraftMeasure, target: LanguageModel, openings: Openings
) -> Finding:
    """Tries another reading, and says whether it is better than the one that is served."""
    name, served = f"reading: {one.question.name}", _describe_served(one.question)
    if one.drafter is None:
        return Finding(name, "ok", f"{served}; {one.reading.answer} is refused: {one.refusal}")
    measure = measure_acceptance(target, one.drafter, openings, chains=True)
    gain = compare(taken, measure)
    found = (
        f"{served}: {taken.per_draft:.2f} accepted per draft; {one.reading.answer}: "
        f"{measure.per_draft:.2f} ({gain.mean:+.2f} +- {gain.error:.2f})"
    )
    if gain.is_better:
        advice = f"set {json.dumps(dict(one.reading.fields))} in config.json"
        return Finding(name, "fail", f"{found}. The second reading is better: {advice}")
    worse = replace(gain, mean=-gain.mean).is_better
    return Finding(name, "ok", found if worse else f"{found}, which may be chance")


def _acceptance(measure: DraftMeasure) -> Finding:
    found = (
        f"{1 + measure.per_draft:.2f} tokens per step over {measure.num_drafts} drafts; accepted "
        f"up to position 1, 2, ..: {', '.join(f'{share:.2f}' for share in measure.shares)}"
    )
    if measure.per_draft < BREAK_EVEN:
        advice = "a server pauses this drafter; is it for this target?"
        return Finding("acceptance", "fail", f"{found}; {advice}")
    return Finding("acceptance", "ok", found)


def _cost(target: LanguageModel, drafter: Drafter, openings: Openings) -> Finding:
    cost = measure_cost(target, drafter, openings)
    found = (
        f"one text at a time: a draft takes {cost.draft_ms:.2f} ms and a step with one "
        f"{cost.step_ms:.2f} ms; a plain step takes {cost.plain_ms:.2f} ms; "
        f"{cost.speedup:.2f} times plain decoding's speed"
    )
    return Finding("cost", "ok" if cost.speedup >= 1 else "warn", found)

"""Compares an imported recommender with its original, recomputed plainly, on drawn histories.

Ours is a bundle that is imported into a temporary folder and asked through the service. The
original is the checkpoint itself: the format's prompt, all tokens of all beams in one causal pass
without a cache, the softmax of its rule, and the original's mask. Nothing of import, search,
prompts as token programs, trie or cache is used there, so each of them can be found wrong.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recserve.doctor.finding import Finding
from recserve.doctor.map_checks import MappedCheckpoint
from recserve.formats.checkpoint_format import ImportOptions
from recserve.formats.conversion import import_checkpoint
from recserve.models.attention import DenseAttention
from recserve.models.language_model import LanguageModel
from recserve.models.loading import load_language_model

BEAMS = 10
MOST_ITEMS = 10  # of a drawn history
TOLERANCE = 1e-3  # of scores in float32, of two orders of summation
SAME = 0.9  # least share of equal beams; beams of nearly the same score may change places
Tokens = tuple[int, ...]
Allowed = Callable[[Tokens], list[int] | None]  # what may follow tokens; None: all


@dataclass(frozen=True)
class Slate:
    """Items of a slate and their scores, best first."""

    items: list[str]
    scores: list[float]


class PlainCheckpoint:
    """The log-probabilities of a checkpoint: one causal pass over a prompt and all that follow."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], branches: Sequence[Tokens]) -> list[Tensor]:
        """Returns the logits after the prompt and after each token of each branch.

        Args:
            prompt: Tokens.
            branches: Tokens that follow the prompt, each branch for itself.

        Returns:
            [len(branch) + 1, V] float64 of each branch.
        """
        count, sizes = len(prompt), [len(branch) for branch in branches]
        tokens = torch.tensor([*prompt, *(token for branch in branches for token in branch)])
        positions = torch.tensor(
            [*range(count), *(count + n for size in sizes for n in range(size))]
        )
        total = len(tokens)
        mask = torch.zeros(total, total, dtype=torch.bool)
        mask[:, :count] = True
        mask[:count, :count].tril_()
        starts = np.cumsum([count, *sizes]).tolist()
        for start, stop in zip(starts, starts[1:], strict=False):
            mask[start:stop, start:stop] = True
            mask[start:stop, start:stop].tril_()
        rows = torch.arange(count - 1, total)
        hidden = self._model(tokens[None], positions[None], DenseAttention(mask), rows)[0]
        logits = self._model.logits(hidden).double()
        return [
            torch.cat([logits[:1], logits[start - count + 1 : stop - count + 1]])
            for start, stop in zip(starts, starts[1:], strict=False)
        ]

    def search(
        self, prompt: Sequence[int], length: int, beams: int, allowed: Allowed, over: Allowed
    ) -> list[tuple[Tokens, float]]:
        """Returns the best beams of `length` tokens, with the sums of their log-probabilities.

        Args:
            prompt: Tokens.
            length: Tokens of a beam.
            beams: Number of beams.
            allowed: Tokens that may follow.
            over: Tokens that the softmax runs over.
        """
        best: list[tuple[Tokens, float]] = [((), 0.0)]
        for _ in range(length):
            scored = self.logits(prompt, [tokens for tokens, _ in best])
            found = []
            for (tokens, total), logits in zip(best, scored, strict=True):
                may = allowed(tokens)
                if may == []:  # it has ended
                    found.append((tokens, total))
                    continue
                rivals = over(tokens)
                one = logits[-1]
                rows = total + one - (one if rivals is None else one[rivals]).logsumexp(0)
                if may is None:
                    top = rows.topk(min(beams, len(rows)))
                    choices = zip(top.indices.tolist(), top.values.tolist(), strict=True)
                else:
                    choices = zip(may, rows[may].tolist(), strict=True)
                found += [((*tokens, token), score) for token, score in choices]
            best = sorted(found, key=lambda one: -one[1])[:beams]
        return best


def try_import(given: MappedCheckpoint, options: ImportOptions, histories: int) -> list[Finding]:
    """Imports the checkpoint into a temporary folder, and compares it with its original.

    Args:
        given: The checkpoint.
        options: Options of the import, whose `out` is not used.
        histories: Number of drawn histories.

    Raises:
        ValueError: If the import refuses the checkpoint.
    """
    draw = np.random.default_rng(0)
    rows = len(given.item_ids)
    most = min(given.max_history, MOST_ITEMS)
    drawn = [draw.integers(0, rows, draw.integers(1, most + 1)).tolist() for _ in range(histories)]
    beams = min(BEAMS, len(set(given.ids)))
    with tempfile.TemporaryDirectory(prefix="recserve-doctor-") as name:
        bundle = Path(name) / "bundle"
        wanted = replace(options, out=bundle, shared_ids="first", events=None)
        import_checkpoint(wanted, lambda line: None)
        ours = _ask(bundle, Path(name), [[given.item_ids[row] for row in h] for h in drawn], beams)
    plain = PlainCheckpoint(load_language_model(options.folder, torch.float32))
    trial = _Trial(given, plain, beams)
    for history, slate in zip(drawn, ours, strict=True):
        trial.add(history, slate)
    return trial.findings()


def _ask(bundle: Path, root: Path, histories: list[list[str]], beams: int) -> list[Slate]:
    """Returns the slates of an imported bundle."""
    from recserve.schemas.items import Exclusions, RecommendRequest
    from recserve.service import Service, ServiceOptions

    options = ServiceOptions(journal=root / "journal")
    found = []
    with Service.open(bundle, f"lmdb:{root / 'store'}", "cpu", options) as service:
        for history in histories:
            request = RecommendRequest(
                history=history, k=beams, beam_width=beams, exclude=Exclusions(seen=False)
            )
            pairs = [
                (one.item_id, one.score)
                for one in service.recommend(request).items
                if one.source == "model" and one.score is not None
            ]
            found.append(Slate([item for item, _ in pairs], [score for _, score in pairs]))
    return found


class _Trial:
    """What the drawn histories have shown so far."""

    def __init__(self, given: MappedCheckpoint, plain: PlainCheckpoint, beams: int) -> None:
        ids = given.ids
        self._given, self._plain, self._ids, self._beams = given, plain, ids, beams
        self._rows = {item: row for row, item in enumerate(given.item_ids)}
        self._valid = set(ids)
        self._levels = given.longest
        self._ends = given.end_tokens()
        self._following: dict[Tokens, set[int]] = {}
        self._sets = [
            sorted({one[level] for one in ids if level < len(one)}) for level in range(self._levels)
        ]
        for one in ids:
            for place, token in enumerate((*one, *self._ends)):
                self._following.setdefault((*one, *self._ends)[:place], set()).add(token)
        self._level_tokens = [given.level_tokens(level) for level in range(self._levels)]
        self._apart: list[tuple[float, str, float, float]] = []
        self._free, self._masked, self._same = 0, 0, 0
        self._free_beams, self._masked_beams = 0, 0
        self._reordered = {"vocabulary": 0, "children": 0, "no end tokens": 0}
        self._histories = 0

    def _is_id(self, tokens: Tokens) -> bool:
        """Returns whether tokens are the id of an item, or begin with one."""
        return any(tokens[:size] in self._valid for size in range(1, len(tokens) + 1))

    def add(self, history: list[int], ours: Slate) -> None:
        """Compares one slate of ours with the original's."""
        prompt = self._given.prompt(history)
        self._histories += 1
        scores = self._scores(prompt, [self._ids[self._rows[item]] for item in ours.items])
        own = scores[self._given.rule]
        for item, score, wanted in zip(ours.items, ours.scores, own, strict=True):
            self._apart.append((abs(score - wanted), item, score, wanted))
        for name in self._reordered:
            self._reordered[name] += _order(scores[name]) != _order(own)
        free = self._plain.search(prompt, self._levels, self._beams, _all, _all)
        self._free += sum(not self._is_id(tokens) for tokens, _ in free)
        self._free_beams += len(free)
        self._compare(prompt, ours)

    def _compare(self, prompt: list[int], ours: Slate) -> None:
        """Compares the original's slate under its own mask with ours."""
        mask = self._given.chosen.original_mask
        if mask == "none":
            return
        whole: list[list[int]] = [*self._sets, *([token] for token in self._ends)]

        def below(tokens: Tokens) -> list[int]:
            return sorted(self._following.get(tokens, ()))

        def of_level(tokens: Tokens) -> list[int]:
            return whole[len(tokens)]

        def level(tokens: Tokens) -> list[int]:
            return self._level_tokens[len(tokens)]

        allowed = below if mask == "trie" else of_level
        rules: dict[str, Allowed] = {"children": below, "level": level, "vocabulary": _all}
        over = rules[self._given.rule]
        found = self._plain.search(prompt, len(whole), self._beams, allowed, over)
        theirs = [tokens[: len(tokens) - len(self._ends)] for tokens, _ in found]
        self._masked += sum(tokens not in self._valid for tokens in theirs)
        self._masked_beams += len(theirs)
        own = {self._ids[self._rows[item]] for item in ours.items}
        self._same += sum(tokens in own for tokens in theirs)

    def _scores(self, prompt: list[int], ids: list[Tokens]) -> dict[str, list[float]]:
        """Returns the scores of ids by rule."""
        found: dict[str, list[float]] = {
            name: [] for name in ("children", "level", "vocabulary", "no end tokens")
        }
        whole = [(*one, *self._ends) for one in ids]
        scored = self._plain.logits(prompt, [tokens[:-1] for tokens in whole])
        for one_id, tokens, logits in zip(ids, whole, scored, strict=True):
            sums = dict.fromkeys(found, 0.0)
            for place, token in enumerate(tokens):
                one = logits[place]
                over = float(one[token] - one.logsumexp(0))
                sums["vocabulary"] += over
                if place >= len(one_id):
                    continue
                below = sorted(self._following[tokens[:place]])
                sums["children"] += float(one[token] - one[below].logsumexp(0))
                sums["level"] += float(one[token] - one[self._level_tokens[place]].logsumexp(0))
                sums["no end tokens"] += over
            divisor = len(tokens) ** self._given.chosen.length_penalty
            for name, value in sums.items():
                found[name].append(value / divisor)
        return found

    def findings(self) -> list[Finding]:
        """Returns what all histories have shown together."""
        return [self._of_scores(), self._of_free_beams(), *self._of_masks(), *self._of_rules()]

    def _of_scores(self) -> Finding:
        if not self._apart:
            return Finding("scores", "fail", "no slate of a drawn history has an item")
        apart, item, score, wanted = max(self._apart)
        detail = (
            f"{len(self._apart)} scores of {self._histories} drawn histories, ours beside the "
            f"original's recomputed plainly: at most {apart:.1e} apart, {score:.4f} and "
            f"{wanted:.4f} for item {item[:80]!r}"
        )
        if apart <= TOLERANCE * max(1.0, abs(wanted)):
            return Finding("scores", "ok", detail)
        return Finding(
            "scores",
            "fail",
            f"{detail}. They must be equal: do not serve this import, and report the folder's "
            "config.json and tokenizer.json",
        )

    def _of_free_beams(self) -> Finding:
        share = self._free / max(self._free_beams, 1)
        return Finding(
            "free beams",
            "warn" if share > 0.01 else "ok",
            f"without a mask, {self._free} of {self._free_beams} beams ({share:.1%}) of "
            f"{self._histories} drawn histories are the id of no item. Each takes a place in a "
            "slate where nothing masks; here none does",
        )

    def _of_masks(self) -> list[Finding]:
        if not self._masked_beams:
            return []
        share, count = self._masked / self._masked_beams, self._masked_beams
        detail = (
            f"with the original's mask, {self._masked} of {count} beams ({share:.1%}) are the id "
            f"of no item; {self._same} of them are in our slates too"
        )
        if self._given.chosen.original_mask == "trie" and self._same < SAME * count:
            detail += ". They must be the same: do not serve this import"
            return [Finding("masked beams", "fail", detail)]
        return [Finding("masked beams", "warn" if share > 0 else "ok", detail)]

    def _of_rules(self) -> list[Finding]:
        rule, found = self._given.rule, []
        other = "children" if rule == "vocabulary" else "vocabulary"
        count = self._reordered[other]
        found.append(
            Finding(
                "order by rule",
                "warn" if count else "ok",
                f"the rule {other} would order {count} of {self._histories} slates otherwise than "
                f"{rule}",
            )
        )
        if self._ends:
            count = self._reordered["no end tokens"]
            found.append(
                Finding(
                    "order by end tokens",
                    "warn" if count else "ok",
                    f"without the tokens after an id, {count} of {self._histories} slates would "
                    "have another order",
                )
            )
        return found


def _all(tokens: Tokens) -> None:
    """Allows all tokens."""


def _order(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda place: -scores[place])

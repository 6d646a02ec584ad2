"""Drafts of constrained texts: what the constraint forbids is left out, what it forces is added.

The matcher of a text is the automaton of its committed tokens. A copy of it walks over the draft
before the forward pass. Each node that stays gets the mask of the tokens that may follow it:

    committed ... a      proposed:  a -+- b --- c      scored:  a -+- b --- e --- f
                                       `- d

Here d may not follow a, and c may not follow b. Only e may follow b, and f is the only token after
it: they are sure, so they are drafted, whatever the drafter has proposed.

The rule `sample` draws from the masked distribution at every node, so the text does not depend on
what is left out or added. A rule that compares the target with the draft needs all drawn nodes that
it may try, whatever their tokens are:

- A drawn node that the mask forbids stays, as a leaf. It is rejected.
- A drawn node behind which the copy meets a limit stays too. If it is accepted, the path ends there
  without a further token, because the mask of that token is not known. The next step draws it.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.core.constraint import (
    WORD_BITS,
    ConstraintError,
    Matcher,
    NoTokenLeft,
    has_token,
    num_words,
)
from recserve.kernels.tree import CANDIDATE
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.sampling_params import SamplingParams

ROOT, ADDED = -1, -1
NO_MASK, UNKNOWN = -1, -2  # in place of a row
NOTHING_FITS = "no token fulfils the constraint and allowed_token_ids together"


@dataclass(frozen=True)
class ConstrainedDraft:
    """The draft of one constrained text.

    Attributes:
        proposed: What the drafter has proposed.
        draft: What is scored.
        origins: Node of `proposed` that each node of `draft` is; ADDED for a forced token.
        bits: [R, W] int32 masks, as `TokenMasks.bits`. The first one is that of node 0.
        rows: Row of `bits` for node 0 and each node of `draft`; NO_MASK if no path continues there,
            UNKNOWN if what may follow is not known.
        late: The matcher, if it fills the mask of node 0 while the forward pass runs.
    """

    proposed: TextDraft
    draft: TextDraft
    origins: tuple[int, ...]
    bits: NDArray[np.int32]
    rows: tuple[int, ...]
    late: Matcher | None = None

    def without_draft(self) -> ConstrainedDraft:
        """Returns only what may follow node 0, for a text that has no pages for its draft."""
        return replace(self, draft=empty_draft(), origins=(), rows=self.rows[:1])

    def accepted(self, path: Seq[int]) -> tuple[int, ...]:
        """Returns the accepted nodes of `proposed`.

        Args:
            path: Accepted nodes of `draft`.
        """
        return tuple([self.origins[node] for node in path if self.origins[node] != ADDED])

    def step_rows(self, first: int) -> tuple[int, ...]:
        """Returns the row of node 0 and of each node of `proposed`, as `TextOutcome.rows`."""
        rows = [first] * (1 + self.proposed.num_nodes)
        for place, node in enumerate(self.origins):
            if node != ADDED:
                rows[1 + node] = first + 1 + place
        return tuple(rows)

    @cached_property
    def is_whole(self) -> bool:
        """Whether the proposed draft is scored as it is."""
        return self.origins == tuple(range(self.proposed.num_nodes))

    def count_allowed(
        self,
        nodes: Seq[int],
        tokens: Seq[int],
        written: Seq[int],
        num_prompt: int,
        params: SamplingParams,
    ) -> int:
        """Returns how many of the drawn tokens were allowed, up to the first that was not.

        A row of logits without a token left still draws one, which means nothing.

        Args:
            nodes: Node that each token was drawn at: 0 for node 0, then 1 + the node of `draft`.
            tokens: The tokens.
            written: The committed tokens before them.
            num_prompt: Number of tokens of the prompt.
            params: The parameters of the text, which ban tokens too.
        """
        text = [*written, *tokens] if params.bad_words else written
        for place, (node, token) in enumerate(zip(nodes, tokens, strict=True)):
            row = self.rows[node]
            banned = row >= 0 and not has_token(self.bits[row], token)
            before = len(written) + place
            if before - num_prompt < params.min_tokens:
                banned |= token in params.stop_token_ids
            if params.bad_words:
                banned |= any(
                    word[-1] == token and tuple(text[before - len(word) + 1 : before]) == word[:-1]
                    for word in params.bad_words
                    if len(word) - 1 <= before
                )
            if banned:
                return place
        return len(tokens)


def constrain(
    matcher: Matcher,
    proposed: TextDraft,
    budget: Budget,
    vocab_size: int,
    stops: Collection[int],
    tries_refused: bool,
    late: bool = False,
) -> ConstrainedDraft:
    """Returns the part of a draft that a constraint allows, with the tokens that it forces.

    Without a draft and a sure token, only the mask of node 0 matters, after the forward pass.

    Args:
        matcher: The automaton of the committed tokens.
        proposed: The draft. It is read on the host.
        budget: Limits of the draft.
        vocab_size: V.
        stops: Tokens that end the text.
        tries_refused: Whether nodes stay, as leaves, that the constraint forbids or that meet a
            limit of the matcher's copy: those of a drawn draft that the rule compares.
        late: Whether such a mask may stay empty. `fill_late` fills it.

    Raises:
        NoTokenLeft: If no token may follow the committed ones.
        ConstraintError: If the matcher meets a limit.
    """
    first = np.zeros(num_words(vocab_size), np.int32)
    if late and not proposed.num_nodes and not (budget.num_nodes and matcher.forces()):
        return ConstrainedDraft(proposed, proposed, (), first[None], (0,), matcher)
    matcher.fill(first)
    num_filled = np.count_nonzero(first)  # words, of which a sure token has one
    if not num_filled:
        raise NoTokenLeft(NOTHING_FITS)
    if not proposed.num_nodes and (num_filled > 1 or not budget.num_nodes):
        return ConstrainedDraft(proposed, proposed, (), first[None], (0,))
    walk = _Walk(matcher, proposed, budget, stops, tries_refused)
    walk.masks.append(first)
    walk.visit(ROOT, ROOT, first, 0)
    return walk.finish()


def fill_late(drafts: Seq[ConstrainedDraft]) -> None:
    """Fills the masks that stayed empty. A mask whose matcher meets a limit allows no token."""
    for draft in drafts:
        assert draft.late is not None
        try:
            draft.late.fill(draft.bits[0])
        except ConstraintError:
            draft.bits[:] = 0


class _Walk:
    """The walk of a matcher's copy over a draft."""

    def __init__(
        self,
        matcher: Matcher,
        proposed: TextDraft,
        budget: Budget,
        stops: Collection[int],
        tries_refused: bool,
    ) -> None:
        self.proposed, self.budget = proposed, budget
        self.stops, self.tries_refused = stops, tries_refused
        self.masks: list[NDArray[np.int32]] = []
        self._committed = matcher
        self._copy: Matcher | None = None
        self._failed = False
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._kinds: list[int] = []
        self._origins: list[int] = []
        self._rows: list[int] = [0]
        self._left = proposed.num_nodes  # nodes of the draft that may still be added
        size = proposed.num_nodes
        self._own_tokens = proposed.tokens.tolist() if size else []
        kinds = proposed.kinds
        self._own_kinds = [CANDIDATE] * size if kinds is None else kinds.tolist()
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(proposed.parents.tolist() if size else ()):
            self._children.setdefault(parent, []).append(node)

    def visit(self, node: int, here: int, mask: NDArray[np.int32], depth: int) -> None:
        """Adds the allowed nodes below one, or the tokens that must follow it.

        Args:
            node: Node of the proposed draft, or ROOT.
            here: The same node of the draft that is scored, or ROOT.
            mask: Tokens that may follow it.
            depth: Its depth; 0 for the last committed token.
        """
        follows = False
        for child in self._children.get(node, ()):
            token = self._own_tokens[child]
            if self._own_kinds[child] != CANDIDATE:
                self._keep(child, here, depth + 1)
            elif not has_token(mask, token):
                if self.tries_refused:
                    self._left -= 1
                    self._add(token, here, depth + 1, child)
                    follows = True
                self._drop_below(child, not self.tries_refused)
            else:
                follows |= self._enter(child, token, here, depth + 1)
        if not follows:
            self._force(here, mask, depth)

    def _enter(self, child: int, token: int, here: int, depth: int) -> bool:
        """Adds an allowed node and what follows it. Returns False if the copy meets a limit."""
        if token in self.stops:  # the text ends here
            self._left -= 1
            self._add(token, here, depth, child)
            self._drop_below(child, False)
            return True
        mask = self._advance(token)
        if mask is None:
            self._drop_below(child, True)
            if self.tries_refused:
                self._add(token, here, depth, child, row=UNKNOWN)
            return self.tries_refused
        self._left -= 1
        place = self._add(token, here, depth, child, mask)
        self.visit(child, place, mask, depth)
        self._roll_back(1)
        return True

    def _force(self, here: int, mask: NDArray[np.int32], depth: int) -> None:
        """Adds the tokens that must follow a leaf."""
        num_entered = 0
        while depth < self.budget.depth and self._has_room():
            token = only_token(mask)
            if token is None:
                break
            if token in self.stops:
                self._add(token, here, depth + 1)
                break
            following = self._advance(token)
            if following is None:
                break
            num_entered, depth, mask = num_entered + 1, depth + 1, following
            here = self._add(token, here, depth, ADDED, mask)
        self._roll_back(num_entered)

    def _has_room(self) -> bool:
        return len(self._tokens) + self._left < self.budget.num_nodes

    def _advance(self, token: int) -> NDArray[np.int32] | None:
        """Advances the copy, and returns the mask behind the token. None if it refuses the node."""
        if self._failed:
            return None
        try:
            if self._copy is None:
                self._copy = self._committed.fork()
            self._copy.advance(token)
            mask = np.zeros_like(self.masks[0])
            self._copy.fill(mask)
            if mask.any():
                return mask
            self._copy.roll_back(1)
        except ConstraintError:
            self._failed = True  # a copy that has met a limit is of no use
        return None

    def _roll_back(self, count: int) -> None:
        if count and not self._failed:
            assert self._copy is not None
            try:
                self._copy.roll_back(count)
            except ConstraintError:
                self._failed = True

    def _keep(self, node: int, here: int, depth: int) -> None:
        """Adds an auxiliary node with all nodes below it."""
        self._left -= 1
        place = self._add(self._own_tokens[node], here, depth, node)
        for child in self._children.get(node, ()):
            self._keep(child, place, depth + 1)

    def _drop_below(self, node: int, itself: bool) -> None:
        """Counts nodes that are left out."""
        self._left -= itself
        for child in self._children.get(node, ()):
            self._drop_below(child, True)

    def _add(
        self,
        token: int,
        here: int,
        depth: int,
        origin: int = ADDED,
        mask: NDArray[np.int32] | None = None,
        row: int = NO_MASK,
    ) -> int:
        """Adds a node to the draft that is scored, and returns its number."""
        self._tokens.append(token)
        self._parents.append(here)
        self._depths.append(depth)
        self._kinds.append(CANDIDATE if origin == ADDED else self._own_kinds[origin])
        self._origins.append(origin)
        self._rows.append(row if mask is None else len(self.masks))
        if mask is not None:
            self.masks.append(mask)
        return len(self._tokens) - 1

    def finish(self) -> ConstrainedDraft:
        """Returns what was found."""
        proposed, size = self.proposed, len(self._tokens)
        draft = empty_draft()
        origins = tuple(self._origins)
        if size:
            draft = TextDraft(
                torch.tensor(self._tokens),
                torch.tensor(self._parents),
                max(self._depths),
                probs=self._probs(),
                kinds=None if proposed.kinds is None else torch.tensor(self._kinds),
                candidate_depth=None
                if proposed.kinds is None
                else _levels(self._depths, self._kinds),
            )
        return ConstrainedDraft(proposed, draft, origins, np.stack(self.masks), tuple(self._rows))

    def _probs(self) -> Tensor | None:
        """Returns the distributions that the nodes were drawn from. A forced token is sure."""
        probs = self.proposed.probs
        if probs is None or max(self._origins) == ADDED:
            return None
        rows = probs[torch.tensor(self._origins, device=probs.device).clamp(min=0)]
        for place, origin in enumerate(self._origins):
            if origin == ADDED:
                rows[place] = 0
                rows[place, self._tokens[place]] = 1
        return rows


def _levels(depths: Seq[int], kinds: Seq[int]) -> int:
    """Returns the greatest depth of a candidate."""
    found = [depth for depth, kind in zip(depths, kinds, strict=False) if kind == CANDIDATE]
    return max(found, default=0)


def only_token(mask: NDArray[np.int32]) -> int | None:
    """Returns the only token that a mask allows; None if it allows several or none."""
    if np.count_nonzero(mask) != 1:
        return None
    place = int(mask.nonzero()[0][0])
    word = int(mask[place]) & (2**WORD_BITS - 1)
    return None if word & (word - 1) else place * WORD_BITS + word.bit_length() - 1

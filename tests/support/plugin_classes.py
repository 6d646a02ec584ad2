"""Small plug-ins of each kind, for tests that make their methods misbehave."""

import torch

from recserve.search.strategies.beam import BeamStrategy
from recserve.speculation.draft import chain_draft, empty_draft
from recserve.speculation.drafter import Drafter
from recserve.speculation.verifiers.sample import SampleRule


class LastToken(Drafter):
    """Drafts the last token again."""

    reads_states = True
    hidden_layers = (-1,)

    def propose(self, contexts, budgets):
        drafts = [chain_draft(torch.tensor(context.tokens[-1:])) for context in contexts]
        return [d if b.num_nodes else empty_draft() for d, b in zip(drafts, budgets, strict=True)]


class OtherRule(SampleRule):
    """The default rule under another name."""

    name = "other"


class OtherStrategy(BeamStrategy):
    """Beam search under another name."""

    name = "other"

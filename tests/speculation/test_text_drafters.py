"""The text is the same with every drafter, good or bad; drafts keep what they promise."""

from functools import cache

import pytest
import torch

from recserve.drafters.draft_model.drafter import ModelDrafter
from recserve.drafters.draft_model.specinfer import specinfer
from recserve.drafters.lookahead import LookaheadDrafter
from recserve.drafters.merged import MergedDrafter
from recserve.drafters.ngram import NgramDrafter
from recserve.drafters.none import NoDrafter
from recserve.drafters.registry import (
    build_drafter,
    check_speculation,
    drafter_classes,
)
from recserve.drafters.suffix.drafter import SuffixDrafter
from recserve.models.loading import UnsupportedModel
from recserve.speculation.draft import TextDraft, chain_draft
from recserve.speculation.drafter import Drafter
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.grids import chosen, sampled
from tests.support.model_folders import drawn as save_drawn
from tests.support.text_loop import VOCABULARY, Written, generate, tiny_model

PROMPTS = [[1, 2, 3, 1, 2, 3, 4], [5], [7, 8, 9, 10] * 3]


@cache
def plain_texts(temperature: float) -> list[Written]:
    """What is written without drafts."""
    params = SamplingParams(temperature, top_p=0.95, seed=3, max_tokens=20)
    return generate(tiny_model(), PROMPTS, params, NoDrafter())


class BadDrafter(Drafter):
    """Wrong in one way, always."""

    def __init__(self, kind: str, target) -> None:
        self.kind, self.oracle = kind, ModelDrafter(target, VOCABULARY, (1,) * 6)
        self.reads_states = True

    def propose(self, contexts, budgets):
        right = self.oracle.propose(contexts, budgets)
        if self.kind == "right":
            return right
        return [self._spoil(d) if len(d) else d for d in right]

    def _spoil(self, right: TextDraft) -> TextDraft:
        wrong = (right.tokens + 1) % VOCABULARY
        if self.kind == "wrong":
            return chain_draft(wrong)
        if self.kind == "late":
            return chain_draft(torch.cat([right.tokens[:-1], wrong[-1:]]))
        assert self.kind == "beside"  # the right chain under the second sibling
        n = len(right)
        if n < 2:
            return right
        parents = torch.cat([torch.tensor([-1, -1]), torch.arange(1, n - 1)])
        return TextDraft(torch.cat([wrong[:1], right.tokens[: n - 1]]), parents, n - 1)

    @property
    def parts(self):
        return self.oracle.parts

    def read(self, spans):
        self.oracle.read(spans)

    def forget(self, context_id):
        self.oracle.forget(context_id)


def noisy(model, spread: float = 0.1):
    """A draft model near the target."""
    near = tiny_model()
    g = torch.Generator().manual_seed(4)
    for weight in near.parameters():
        weight.add_(torch.randn(weight.shape, generator=g) * spread)
    return near


MAKERS = {
    "ngram": lambda m: NgramDrafter(min_match=1),
    "suffix": lambda m: SuffixDrafter(),
    "lookahead": lambda m: LookaheadDrafter(),
    "lookahead-alone": lambda m: LookaheadDrafter(from_text=False),
    "draft_model": lambda m: ModelDrafter(noisy(m), VOCABULARY),
    "specinfer": lambda m: specinfer([noisy(m)], VOCABULARY),
    "specinfer-two": lambda m: specinfer([noisy(m), tiny_model(5)], VOCABULARY, (2, 2, 1)),
    "suffix+model": lambda m: MergedDrafter([SuffixDrafter(), ModelDrafter(noisy(m), VOCABULARY)]),
    "all": lambda m: MergedDrafter(
        [NgramDrafter(), LookaheadDrafter(window=2, ngram=3), specinfer([noisy(m)], VOCABULARY)]
    ),
} | {
    kind: lambda m, kind=kind: BadDrafter(kind, m) for kind in ("right", "wrong", "late", "beside")
}
LENGTHS = {"right": (4.0, 6.0), "wrong": (0.0, 0.0), "beside": (3.0, 6.0)}


@pytest.mark.parametrize(
    "temperature,name",
    sampled(
        (0.7, 0.0),
        tuple(MAKERS),
        default=("0.7-lookahead-alone", "0.7-all", "0.7-wrong"),
    ),
)
def test_the_text_is_the_plain_text(name, temperature):
    model = tiny_model()
    params = SamplingParams(temperature, top_p=0.95, seed=3, max_tokens=20)
    plain = plain_texts(temperature)
    for num_nodes in (5, 40):
        written = generate(model, PROMPTS, params, MAKERS[name](model), num_nodes=num_nodes)
        assert [w.tokens for w in written] == [w.tokens for w in plain]
    again = generate(model, PROMPTS, params, MAKERS[name](model), num_nodes=40)
    assert [w.lengths for w in again] == [w.lengths for w in written], "drafts are not repeatable"
    mean = sum(w.mean_length for w in written) / len(written)
    low, high = LENGTHS.get(name, (0.1, 8.0))
    assert low <= mean <= high


@pytest.mark.parametrize(
    "rule,name",
    sampled(
        ("rejection", "block", "multi_step", "typical"),
        [name for name in MAKERS if name not in ("right", "wrong", "late", "beside")],
        default=(
            "rejection-suffix",
            "rejection-specinfer",
            "multi_step-suffix",
            "multi_step-specinfer",
        ),
    ),
)
def test_every_rule_gets_drafts_that_it_takes(name, rule):
    """multi_step judges drawn drafts only; all others take every drafter's."""
    model = tiny_model(sharp=3.0)
    params = SamplingParams(0.7, seed=3, max_tokens=20)
    chosen = not name.startswith(("draft_model", "specinfer"))
    if rule == "multi_step" and chosen:
        with pytest.raises(ValueError, match="was chosen"):
            generate(model, PROMPTS, params, MAKERS[name](model), rule)
        with pytest.raises(ValueError, match="needs drawn drafts"):
            check_speculation(Speculation(name, rule), MAKERS[name](model), greedy=False)
        return
    check_speculation(Speculation(name, rule), MAKERS[name](model), greedy=False)
    written = generate(model, PROMPTS, params, MAKERS[name](model), rule)
    assert [len(w.tokens) for w in written] == [20] * 3
    greedy = SamplingParams(0.0, max_tokens=20)
    plain = generate(model, PROMPTS, greedy, NoDrafter())
    written = generate(model, PROMPTS, greedy, MAKERS[name](model), rule)
    assert [w.tokens for w in written] == [w.tokens for w in plain]


@pytest.mark.parametrize(
    "name", chosen(("ngram", "suffix", "lookahead", "all"), "suffix", "lookahead")
)
def test_repetitive_text_is_accepted_at_length(name):
    """A model that follows a cycle: nearly whole drafts are kept."""
    model = tiny_model()
    model.head.weight.zero_()
    for weight in model.decoder.layers.parameters():
        weight.zero_()  # hidden is the normed embedding of the last token
    table = torch.randn(VOCABULARY, 16, generator=torch.Generator().manual_seed(0)).double()
    model.tokens.weight.copy_(table)
    hidden = model.decoder.norm(table)
    model.head.weight.copy_(hidden.roll(1, 0) * 4)  # token t is followed by t + 1
    params = SamplingParams(0.0, max_tokens=120)
    plain = generate(model, [[3, 4]], params, NoDrafter())[0]
    assert plain.tokens == [(5 + i) % VOCABULARY for i in range(120)]
    written = generate(model, [[3, 4]], params, MAKERS[name](model), num_nodes=40)[0]
    assert written.tokens == plain.tokens
    late = written.lengths[len(written.lengths) // 2 :]
    assert sum(late) / len(late) > 2.5


def test_registry_builds_what_it_names(tmp_path):
    save_drawn(tmp_path / "small", "llama")
    save_drawn(tmp_path / "other", "qwen3", seed=1)
    target = tiny_model(vocabulary=61)
    weights = [tmp_path / "small"]
    trained = {name for name, cls in drafter_classes().items() if cls.reads_states}
    trained -= {"draft_model", "specinfer"}
    trained |= {"medusa", "mask_tokens", "mask_tokens_linear"}
    for name in sorted(set(drafter_classes()) - trained):
        assert build_drafter(name, target, weights) is not None
    assert isinstance(build_drafter("none", target), NoDrafter)
    joined = build_drafter("suffix+draft_model", target, weights)
    assert isinstance(joined, MergedDrafter)
    two = build_drafter("specinfer", target, [*weights, tmp_path / "other"])
    params = SamplingParams(0.7, seed=1, max_tokens=12)
    plain = generate(target, PROMPTS, params, NoDrafter())
    for drafter in (joined, two):
        written = generate(target, PROMPTS, params, drafter)
        assert [w.tokens for w in written] == [w.tokens for w in plain]


@pytest.mark.parametrize(
    "name,message",
    [
        ("beagle", "drafter is 'beagle'; choose one of"),
        ("suffix+beagle", "drafter is 'beagle'"),
        ("eagle", r"the folder of its network \(eagle=DIR\)"),
        ("block", r"the folder of its network \(block=DIR\)"),
        ("mask_tokens", r"needs one folder \(mask_tokens=DIR\)"),
        ("suffix+suffix", "must differ"),
        ("none+suffix", "exclude 'none'"),
        ("draft_model", r"the folder of one draft model \(draft_model=DIR\), not 0"),
        ("specinfer", r"a draft model \(specinfer=DIR\)"),
        ("medusa", r"the folder of its heads \(medusa=DIR\)"),
    ],
)
def test_names_and_weights_that_do_not_do(name, message):
    with pytest.raises(ValueError, match=message):
        build_drafter(name, tiny_model())


def test_weights_of_another_vocabulary_are_refused_at_load(tmp_path):
    save_drawn(tmp_path, "llama")
    for name in ("draft_model", "specinfer", "suffix+draft_model"):
        with pytest.raises(ValueError, match="has 61 tokens, the target 29"):
            build_drafter(name, tiny_model(), [tmp_path])
    (tmp_path / "config.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        build_drafter("draft_model", tiny_model(vocabulary=61), [tmp_path])


def test_words_that_a_drafter_cannot_follow():
    for drafter in (SuffixDrafter(), MergedDrafter([SuffixDrafter(), NgramDrafter()])):
        check_speculation(Speculation("suffix", num_tokens=4), drafter, True)
        with pytest.raises(ValueError, match="is for the drafter 'medusa' or"):
            check_speculation(Speculation("suffix", tree=((0,),)), drafter, True)

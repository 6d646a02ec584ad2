"""Constrained texts at their edges: no token left, limits, sure tokens, and the other rules."""

import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from recserve.core.constraint import Choices, ConstraintError, Grammar, NoTokenLeft
from recserve.drafters.draft_model.drafter import ModelDrafter
from recserve.drafters.draft_model.specinfer import specinfer
from recserve.engine import text_scheduler
from recserve.engine.constrained_drafts import constrain
from recserve.kernels.tree import AUXILIARY
from recserve.speculation.completion import TextQuery
from recserve.speculation.draft import Budget, TextDraft
from recserve.speculation.drafter import Drafter
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.engine.text.test_constrained_texts import UNDRAFTED, outcome, results
from tests.support.constrained_texts import (
    END,
    GRAMMARS,
    an_object,
    compiler,
    masks,
    read,
    tokenizer,
)
from tests.support.grids import chosen
from tests.support.text_engines import MAKERS, engine_for, shared_model
from tests.support.text_plain import (
    VOCABULARY,
    TableDrafter,
    drawn_model,
    last_logits,
    processed,
)


@pytest.fixture(params=[False, True], ids=["before", "beside"])
def late(request, monkeypatch):
    """Whether a thread fills masks beside the forward pass, as for large vocabularies."""
    if request.param:
        monkeypatch.setattr(text_scheduler, "LATE_VOCABULARY", 0)


AB, CD = Choices(("abcd",)), Grammar("regex", "(ab|cd){2}")


class CopiesFail:
    """A constraint whose matchers meet a limit: copies behind some tokens, others now and then."""

    def __init__(self, inner, tokens, others=False):
        self.inner, self.end_tokens, self.tokens, self.others = inner, (END,), tokens, others
        self.num_restarts = 0

    def start(self):
        return FailingMatcher(self, self.inner.start(), 3 if self.others else None)

    def restart(self, tokens):
        self.num_restarts += 1
        return FailingMatcher(self, self.inner.restart(tokens), 2 if self.others else None)


class FailingMatcher:
    """A matcher of `CopiesFail`, which fails after `left` masks."""

    def __init__(self, constraint, inner, left, copied=False):
        self.constraint, self.inner, self.left, self.copied = constraint, inner, left, copied

    def forces(self):
        return self.inner.forces()

    def fill(self, row):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                row[:] = -1
                raise ConstraintError("too many masks")
        self.inner.fill(row)

    def advance(self, token):
        if self.copied and token in self.constraint.tokens:
            raise ConstraintError("a copy meets a limit")
        self.inner.advance(token)

    def roll_back(self, count):
        self.inner.roll_back(count)

    def fork(self):
        return FailingMatcher(self.constraint, self.inner.fork(), None, True)


def query(wanted, speculation=UNDRAFTED, allowed=None, prompt=(3, 1, 4), **params):
    """Returns a request under a constraint."""
    constraint = compiler().compile("grammar", wanted, allowed)
    usual = {"temperature": 1.0, "max_tokens": 40, "stop_token_ids": (END,)}
    return TextQuery(
        np.array(prompt), SamplingParams(**usual | params), speculation, constraint=constraint
    )


def tokens_of(text):
    return tokenizer().encode_literal(text)


def with_drafts(model, one):
    """Returns the results of a request with every kind of draft, and without any."""
    found = results(engine_for(model), [one])
    text = [] if isinstance(found[0], Exception) else found[0].tokens.tolist()
    table = {tuple(one.prompt.tolist()): [*text, END]}
    drafters = {"table": TableDrafter("mixed", table), "suffix": MAKERS["suffix"](model)}
    engine = engine_for(model, drafters=drafters)
    drafted = [replace(one, speculation=Speculation(name)) for name in ("none", *drafters)]
    return found + results(engine, drafted)


@pytest.mark.parametrize(
    "wanted,allowed,params",
    [
        (AB, None, {"bad_words": ((tokens_of("cd")[0],),)}),
        (CD, None, {"bad_words": tuple((t,) for t in {*tokens_of("c"), *tokens_of("12")})}),
        (AB, None, {"min_tokens": 30}),
        (AB, tokens_of("12"), {}),
        (AB, tokens_of("abcd"), {}),  # the end token is not allowed
        (CD, tokens_of("ab"), {"temperature": 0.0}),
    ],
)
@pytest.mark.usefixtures("late")
def test_a_text_without_a_token_left_ends_by_name(wanted, allowed, params):
    found = with_drafts(shared_model(), query(wanted, allowed=allowed, **params))
    kinds = set(map(outcome, found))
    assert len(kinds) == 1
    if wanted == CD and not allowed:  # the text may still go round the banned words
        return
    assert all(isinstance(one, NoTokenLeft) for one in found)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_bias_bans_no_forced_token(temperature):
    bias = {token: -1e9 for token in {*tokens_of("abcd"), END}}
    found = with_drafts(shared_model(), query(AB, logit_bias=bias, temperature=temperature))
    assert {read(one.tokens) for one in found} == {"abcd"}


def test_allowed_tokens_alone_never_end():
    found = with_drafts(shared_model(), query(None, allowed=tokens_of("12a"), max_tokens=9))
    assert {len(one.tokens) for one in found} == {9}
    assert set(found[0].tokens.tolist()) <= {*tokens_of("12"), *tokens_of("a"), *tokens_of("1")}
    assert len(set(map(outcome, found))) == 1


def test_sure_tokens_need_no_drafter_and_no_steps():
    key = an_object(abcdefil={"type": "boolean"})
    plain, forced = results(
        engine_for(shared_model()), [query(key), query(key, Speculation("none"))]
    )
    assert plain.tokens.tolist() == forced.tokens.tolist()
    assert plain.timing.forwards == len(plain.tokens) + 1
    assert forced.timing.forwards <= 3  # to `t` or `f`, and to the end
    assert forced.counts.num_accepted_tokens > 5
    short = query(key, Speculation("none", num_tokens=2))
    assert results(engine_for(shared_model()), [short])[0].timing.forwards > 4


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("states", chosen([30, 45, 60], "45"))
def test_a_limit_ends_the_text_that_meets_it_and_no_other(states, monkeypatch):
    """Where a text meets it does not depend on drafts, or on texts of the same grammar."""
    limits = "recserve.service.text.constraints.grammar.LIMITS"
    monkeypatch.setitem(
        pytest.importorskip(limits.rpartition(".")[0]).LIMITS, "max_lexer_states", states
    )
    fresh = type(compiler())(tokenizer(), compiler().vocab_size, (END,))
    pattern = {"type": "string", "pattern": "^[a-e]{2,9}(ab|cd)[0-9]+$", "maxLength": 20}
    constraint = fresh.compile("grammar", an_object(a=pattern))
    queries = [
        replace(query(AB, seed=seed, temperature=1.3), constraint=constraint) for seed in range(8)
    ]
    model = shared_model()
    wanted = [outcome(results(engine_for(model), [one])[0]) for one in queries]
    engine = engine_for(model, drafters={"draft_model": MAKERS["draft_model"](model)})
    drafted = [replace(one, speculation=Speculation("draft_model")) for one in queries]
    assert list(map(outcome, results(engine, drafted))) == wanted
    if states == 30:
        assert any(kind[0] is ConstraintError for kind in wanted)


@pytest.mark.usefixtures("late")
def test_no_text_waits_for_a_matcher_that_is_made_anew(monkeypatch):
    """Nor does the engine's thread make it; and the text that waits is as it would be alone."""
    model, go, threads = shared_model(), threading.Event(), set()
    constraint = CopiesFail(compiler().compile("grammar", GRAMMARS["words"]), (), True)
    one = replace(query(AB, seed=3), constraint=constraint)
    engine = engine_for(model)
    wanted = outcome(results(engine, [replace(one, constraint=constraint.inner)])[0])
    restart = constraint.restart

    def waiting(tokens):
        threads.add(threading.get_ident())
        assert go.wait(10)
        return restart(tokens)

    monkeypatch.setattr(constraint, "restart", waiting)
    others = [engine.submit(query(CD, seed=seed)) for seed in range(3)]
    future = engine.submit(one)
    while not all(other.done() for other in others):
        assert engine.step()
    assert not future.done() and threads
    go.set()
    while engine.step():
        pass
    assert outcome(future.result(0)) == wanted
    assert threading.get_ident() not in threads and constraint.num_restarts > 2


@pytest.mark.parametrize(
    "name", [name for name, one in GRAMMARS.items() if isinstance(one, Grammar)]
)
def test_masks_are_those_of_brute_force(name):
    """A token may follow if its bytes may, one after another."""
    one = GRAMMARS[name]
    rule = one.text if one.kind == "lark" else None
    if one.kind == "regex":
        rule = f"start: /{one.text}/"
    elif one.kind == "json_schema":
        options = (
            '"x-guidance": {"whitespace_flexible": false, "json_allowed_escapes": "nrbtf\\\\\\""}'
        )
        rule = f"start: %json {one.text[:-1]}, {options}}}"
    text = Grammar("lark", '%llguidance {"no_forcing": true}\n' + rule)
    constraint, random = compiler().compile("grammar", text), np.random.default_rng(1)
    spelled = [tokenizer().all_bytes[token].decode() for token in range(END - 1)]
    for _ in range(4):
        tokens: list[int] = []
        while len(tokens) < 30:
            mask = masks(constraint, tokens)
            for token, own in enumerate(spelled):
                single, there = [spelled.index(letter) for letter in own], True
                for n in range(len(single)):
                    there = there and masks(constraint, [*tokens, *single[:n]])[single[n]]
                assert mask[token] == there, (read(tokens), own)
            token = int(random.choice(np.flatnonzero(mask)))
            if token == END:
                break
            tokens.append(token)


def test_a_tree_is_cut_and_continued():
    """The wrong child goes with what is below it, and what is forced follows the right one.

    proposed: root -+- a -+- b     scored: root -+- ab --- 1
                    |     `- 2                   `- an auxiliary node and its child
                    +- ab --- 2
                    `- auxiliary --- auxiliary
    """
    a, b, ab, one, two = (tokens_of(text)[0] for text in ("a", "b", "ab", "1", "2"))
    matcher = compiler().compile("grammar", Grammar("lark", 'start: "ab1" /[cd]/')).start()
    kinds = torch.tensor([0, 0, 0, 0, 0, AUXILIARY, AUXILIARY])
    tokens = torch.tensor([a, b, two, ab, two, 0, 0])
    draft = TextDraft(tokens, torch.tensor([-1, 0, 0, -1, 3, -1, 5]), 2, kinds=kinds)
    found = constrain(matcher, draft, Budget(20, 6), VOCABULARY, (END,), False)
    assert found.draft.tokens.tolist() == [ab, one, 0, 0]
    assert found.draft.parents.tolist() == [-1, 0, -1, 2]
    assert found.draft.kinds.tolist() == [0, 0, AUXILIARY, AUXILIARY]
    assert (found.draft.depth, found.draft.levels) == (2, 2)
    assert found.origins == (3, -1, 5, 6) and found.rows == (0, 1, 2, -1, -1)
    assert found.step_rows(10) == (10, 10, 10, 10, 11, 10, 13, 14)
    assert found.accepted([0, 1]) == (3,)
    matcher.advance(ab)  # it has not moved
    tight = constrain(matcher, draft, Budget(7, 6), VOCABULARY, (END,), False)
    assert tight.draft.tokens.tolist() == [0, 0, one]


def law(model, wanted, prompt, params):
    """Returns the probability of each text of a finite constraint."""
    constraint = compiler().compile("grammar", wanted)
    found, waiting = {}, [((), 1.0)]
    while waiting:
        tokens, mass = waiting.pop()
        raw = last_logits(model, [*prompt, *tokens])
        raw[~torch.from_numpy(masks(constraint, tokens))] = -torch.inf
        row = torch.tensor(processed(raw, [*prompt, *tokens], len(prompt), params))
        for token, p in enumerate(row.softmax(0).tolist()):
            if token == END and p:
                found[tokens] = mass * p
            elif p:
                waiting.append(((*tokens, token), mass * p))
    return found


class UnevenDrafter(Drafter):
    """Draws the likeliest first token of the tests, or a forbidden one: two of them in a chain.

    For `multi_step`, the first one also has a sibling.
    """

    always_draws = True
    often = tokens_of("d")
    probs = torch.zeros(VOCABULARY)
    probs[[*often, *tokens_of("x")]] = 0.5

    def propose(self, contexts, budgets):
        found = []
        for context, budget in zip(contexts, budgets, strict=True):
            forks = context.speculation.verifier == "multi_step" and budget.num_nodes > 2
            parents = [-1, 0, -1] if forks else [-1, 0][: min(budget.num_nodes, budget.depth)]
            random = torch.Generator().manual_seed(hash((context.params.seed, context.num_output)))
            drawn = [int(self.probs.multinomial(1, generator=random)) for _ in parents]
            probs = self.probs.expand(len(parents), -1)
            depth = min(len(parents), 2)
            found.append(TextDraft(torch.tensor(drawn), torch.tensor(parents), depth, probs))
        return found


WANTED = Grammar("regex", "(ab|[a-e]){1,2}[12]?")


def keeps_the_law(engine, drafting, constraint, count, **params):
    """Asserts by chi-square that texts have the law of the masked target."""
    prompt = (7, 7, 2)
    queries = [
        replace(query(WANTED, drafting, prompt=prompt, seed=seed, **params), constraint=constraint)
        for seed in range(count)
    ]
    counted = Counter(tuple(one.tokens.tolist()) for one in results(engine, queries))
    expected = law(shared_model(), WANTED, prompt, SamplingParams(**params))
    assert sum(expected.values()) == pytest.approx(1, abs=1e-4)
    assert counted.keys() <= expected.keys()
    often = [text for text in expected if count * expected[text] >= 5]
    seen = [counted[text] for text in often]
    means = [count * expected[text] for text in often]
    seen, means = [*seen, count - sum(seen)], [*means, count - sum(means)]
    assert stats.chisquare(seen, means).pvalue > 1e-4


@pytest.mark.parametrize("rule", chosen(["rejection", "multi_step", "block"], "multi_step"))
def test_other_rules_keep_the_law_of_the_masked_target(rule):
    """Chi-square over all texts of a grammar; drafts are drawn and mostly forbidden."""
    drafting = Speculation("specinfer" if rule == "multi_step" else "draft_model", rule)
    other = drawn_model(3)  # with a draft like the target, a residual is like the target too
    drafters = {
        "draft_model": ModelDrafter(other, VOCABULARY, (1,) * 3),
        "specinfer": specinfer([other, drawn_model(2)], VOCABULARY, (2, 1)),
    }
    engine = engine_for(shared_model(), 2000, drafters)
    keeps_the_law(engine, drafting, compiler().compile("grammar", WANTED), 600)


@pytest.mark.parametrize("case", ["limit", "pages"])
@pytest.mark.parametrize("rule", chosen(["rejection", "multi_step", "block"], "rejection"))
def test_the_law_does_not_depend_on_limits(rule, case):
    """Neither on those of a matcher's copy, behind the likeliest token, nor on those of pages."""
    constraint = compiler().compile("grammar", WANTED)
    pages = 2000 if case == "limit" else 4  # three texts, without their drafts
    if case == "limit":
        constraint = CopiesFail(constraint, UnevenDrafter.often)
    engine = engine_for(shared_model(), pages, {"own": UnevenDrafter()})
    keeps_the_law(engine, Speculation("own", rule), constraint, 400, max_tokens=8)


@pytest.mark.usefixtures("late")
def test_a_draw_behind_a_limit_is_not_counted():
    constraint = CopiesFail(compiler().compile("grammar", WANTED), UnevenDrafter.often)
    engine = engine_for(shared_model(), 2000, {"own": UnevenDrafter()})
    drafting, seen = Speculation("own", "rejection"), 0
    for seed in range(8):
        one = query(WANTED, drafting, prompt=(7, 7, 2), seed=seed, presence_penalty=0.1)
        engine.submit(replace(one, constraint=constraint))
    while engine.step():
        for text in engine.schedulers["text"].running:
            output = text.context.tokens[text.context.num_prompt :]
            counts = engine.schedulers["text"].token_counts.both[1, text.row]
            assert torch.equal(counts, torch.bincount(torch.tensor(output), minlength=VOCABULARY))
            seen += len(output)
    assert seen > 8

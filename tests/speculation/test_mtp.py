"""MTP modules and P-EAGLE: drafts against plain transcriptions of what the files hold.

The transcriptions read the published tensors themselves, so that loader, network and proposer are
tested together.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from recserve.drafters.mtp.drafter import MtpDrafter
from recserve.drafters.mtp.files import load_mtp
from recserve.drafters.mtp.network import Mtp
from recserve.drafters.shared.feature_network import LayerView
from recserve.drafters.shared.noisy import LEAST_SCALE
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.training.text.drafters.eagle import UnrolledAttention
from tests.support.eagle_transcription import (
    PlainEagle,
    assert_as_transcribed,
    plain_layer,
    record_drafts,
    rms,
    target_states,
)
from tests.support.grids import chosen, covering
from tests.support.mtp_drafter import SIZES, mtp, peagle
from tests.support.published_mtp import LAYOUTS, Published, write_folder
from tests.support.text_engines import (
    PARAMETERS,
    assert_forgotten,
    assert_no_leak,
    eagle,
    engine_for,
    prompts,
)
from tests.support.text_plain import drawn_model


@pytest.fixture(scope="module")
def model():
    return drawn_model(1)


class PlainStates(PlainEagle):
    """A dynamic tree from a network that reads the target's states themselves."""

    def first(self, states):
        return states


def plain_class(published: Published):
    class PlainMtp(PlainStates):
        """The published module with a dynamic tree, everything computed again for every node."""

        def children(self, path):
            features, embedded = self.features, self.embedded
            output = published.outputs(features, embedded)[-1:]
            for token in path:
                features = torch.cat([features, output])
                embedded = torch.cat([embedded, self.model.tokens(torch.tensor([token]))])
                output = published.outputs(features, embedded)[-1:]
            logits = published.logits(output, self.model)[0]
            best = (logits / LEAST_SCALE).log_softmax(-1).topk(self.drafter.width)
            return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    return PlainMtp


def greedy(texts, name, length=14) -> list[TextQuery]:
    params = SamplingParams(temperature=0.0, max_tokens=length)
    return [TextQuery(text, params, Speculation(name)) for text in texts]


@pytest.mark.parametrize("name", chosen(list(LAYOUTS), "qwen3-next"))
@torch.inference_mode()
def test_drafts_equal_the_transcription(name, model, tmp_path):
    """Four texts at once, prompts in chunks; then cached prompts."""
    torch.manual_seed(3)
    fields, weights = LAYOUTS[name]()
    loaded = MtpDrafter.from_folders([write_folder(tmp_path, fields, weights)], model)
    drafter = MtpDrafter(loaded.network, model, **SIZES)
    notes = record_drafts(drafter)
    engine = engine_for(model, 300, {"mtp": drafter})
    texts = prompts(4, low=4)
    engine.run_many(greedy(texts, "mtp"))
    again = engine.run_many(greedy(texts[:2], "mtp"))
    assert all(answer.timing.prefix_cached > 0 for answer in again)
    plain = plain_class(Published(name, weights))
    assert_as_transcribed(notes, drafter, model, least=20, plain=plain)


@pytest.mark.parametrize("name", LAYOUTS)
@torch.inference_mode()
def test_features_equal_the_transcription(name, model, tmp_path):
    """What the rows feed back, to 1e-4: DeepSeek's before its norm, the others' after it."""
    torch.manual_seed(4)
    fields, weights = LAYOUTS[name]()
    loaded = MtpDrafter.from_folders([write_folder(tmp_path, fields, weights)], model)
    drafter = MtpDrafter(loaded.network, model, **SIZES)
    engine = engine_for(model, 300, {"mtp": drafter})
    seen = {}
    propose = drafter.propose

    def noted(contexts, budgets):
        for context in contexts:
            if drafter.is_ready(context):
                seen[tuple(context.tokens)] = drafter._last.of(context.table)[context.row].clone()
        return propose(contexts, budgets)

    drafter.propose = noted
    engine.run_many(greedy(prompts(3, low=4), "mtp"))
    published, compared = Published(name, weights), 0
    for tokens, output in seen.items():
        states = target_states(model, list(tokens), drafter.hidden_layers)[:-1]
        embedded = model.tokens(torch.tensor(tokens[1:]))
        expected = published.outputs(states, embedded)[-1]
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        compared += 1
    assert compared > 6


@pytest.mark.parametrize("name", LAYOUTS)
@torch.inference_mode()
def test_feeding_back_the_other_state_shows_below_the_first_level(name, model, tmp_path):
    """The first level's logits are the same, so only the deeper levels tell the two apart."""
    torch.manual_seed(6)
    fields, weights = LAYOUTS[name]()
    network = load_mtp(write_folder(tmp_path, fields, weights), model)
    other = Mtp(replace(network.config, feeds_norm=not network.config.feeds_norm)).eval()
    other.load_state_dict(network.state_dict())
    states, words = torch.randn(1, 6, 32), model.tokens(torch.arange(7)[None])
    levels = []
    for own in (network, other):
        attend = UnrolledAttention()
        first = own.committed(states, words[:, 1:], torch.arange(6), attend)
        second = own(first[:, :5], words[:, 2:], torch.arange(5) + 1, attend)
        levels.append([own.logits(output, model) for output in (first, second)])
    torch.testing.assert_close(levels[0][0], levels[1][0])
    assert (levels[0][1] - levels[1][1]).abs().max() > 0.1


def several_class(modules: list[Published], start: int = 0):
    """Several modules, as in DeepSeek-V3, section 2.2: module k has the rows k, k + 1, ..., and
    reads what the module before it returned at the token before.

    Args:
        modules: The modules.
        start: First row after a cached prefix. The outputs of the row before it are not cached, so
            it reads zeros in all modules but the first.
    """

    class PlainModules(PlainStates):
        def children(self, path):
            count, embedded = len(modules), self.embedded
            features, outputs = [self.features], []
            for number, module in enumerate(modules):
                if number:
                    before = outputs[-1][:-1].clone()
                    if start:
                        before[start - number] = 0.0
                    features.append(before)
                outputs.append(module.outputs(features[-1], embedded[number:], number == 0))
            for token in path:
                embedded = torch.cat([embedded, self.model.tokens(torch.tensor([token]))])
                news = [outputs[number - 1][-1:] for number in range(count)]
                features = [torch.cat(both) for both in zip(features, news, strict=True)]
                outputs = [
                    module.outputs(features[n], embedded[n:], n == 0)
                    for n, module in enumerate(modules)
                ]
            number = len(path) % count
            logits = modules[number].logits(outputs[number][-1:], self.model)
            best = (logits[0] / LEAST_SCALE).log_softmax(-1).topk(self.drafter.width)
            return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    return PlainModules


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@torch.inference_mode()
def test_level_k_reads_module_k_mod_n(count, model, tmp_path):
    """Drafts are deeper than the number of modules. Cached prompts give the same texts."""
    torch.manual_seed(5)
    fields, weights = LAYOUTS["deepseek"]()
    for number in range(1, count):
        weights |= LAYOUTS["deepseek"](2 + number)[1]
    fields["num_nextn_predict_layers"] = count
    folder = write_folder(tmp_path, fields, weights)
    drafter = MtpDrafter(MtpDrafter.from_folders([folder], model).network, model, **SIZES)
    notes = record_drafts(drafter)
    engine = engine_for(model, 300, {"mtp": drafter})
    texts = prompts(4, low=4)
    answers = engine.run_many(greedy(texts, "mtp"))
    plain = several_class([Published("deepseek", weights, k) for k in range(count)])
    assert_as_transcribed(notes, drafter, model, least=10, plain=plain)
    again = engine.run_many(greedy(texts, "mtp"))
    assert all(answer.timing.prefix_cached > 0 for answer in again)
    undrafted = engine.run_many(greedy(texts, "none"))
    for one, *others in zip(undrafted, answers, again, strict=True):
        assert all(one.tokens.tolist() == other.tokens.tolist() for other in others)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@torch.inference_mode()
def test_each_node_of_two_modules_equals_the_transcription(seed, tmp_path):
    """Long and short texts, then texts that continue a cached prefix: 9,486 nodes in six seeds.

    The children of each node are the likeliest tokens after its path. With the paper's rule all
    7,239 nodes of texts from their beginning are equal, and 2,240 of 2,247 after a cached prefix;
    with zeros at one row, as documented, those of seeds 0 and 1 are all equal.
    """
    model = drawn_model(seed, positions=160)
    torch.manual_seed(5 + seed)
    fields, weights = LAYOUTS["deepseek"]()
    weights |= LAYOUTS["deepseek"](3)[1]
    fields["num_nextn_predict_layers"] = 2
    folder = write_folder(tmp_path, fields, weights)
    drafter = MtpDrafter(MtpDrafter.from_folders([folder], model).network, model, **SIZES)
    notes, starts, read = record_drafts(drafter), [], drafter.read
    drafter.read = lambda parts: (starts.extend(part.first for part in parts), read(parts))
    engine = engine_for(model, 300, {"mtp": drafter})
    draws = torch.Generator().manual_seed(seed)
    common, *ends = (torch.randint(0, 40, (size,), generator=draws).tolist() for size in (70, 5, 9))
    long = torch.randint(0, 40, (90,), generator=draws).tolist()
    modules, counts = [Published("deepseek", weights, k) for k in range(2)], {}
    for text in (long[:2], long, common + ends[0], common + ends[1], long):
        notes.clear()
        starts.clear()
        (answer,) = engine.run_many(greedy([np.array(text)], "mtp", 14))
        cached = answer.timing.prefix_cached > 0
        assert cached == (starts[0] > 0)
        plain = several_class(modules, starts[0])
        for tokens, _, draft in notes:
            oracle, paths = plain(drafter, model, tokens), [()]
            children: dict[tuple[int, ...], set[int]] = {}
            for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
                above = paths[parent + 1]
                children.setdefault(above, set()).add(token)
                paths.append((*above, token))
            for path, own in children.items():
                assert own == {token for token, _ in oracle.children(path)[: len(own)]}
                counts[cached] = counts.get(cached, 0) + len(own)
    assert counts[False] > 200 and counts[True] > 200


class PlainPeagle(PlainEagle):
    """P-EAGLE: the rows below the committed ones read the mask, so a slot knows no path."""

    def __init__(self, drafter, model, tokens):
        super().__init__(drafter, model, tokens)
        network, more = self.network, drafter.depth
        mask = model.tokens(torch.tensor([network.config.mask_token]))
        ahead = network.fc(network.mask_states).expand(more, -1)
        features = torch.cat([self.features, ahead])
        x = self.run(features, torch.cat([self.embedded, mask.expand(more, -1)]))
        assert len(network.layers) == 2
        logits = network.head(rms(x[len(self.features) - 1 :], network.norm))
        self.slots = (logits / LEAST_SCALE).log_softmax(-1)

    def run(self, features, embedded):
        """Returns the outputs of all rows."""
        network, x = self.network, features
        normed = rms(features, network.feature_norm)
        inputs = torch.cat([rms(embedded, network.input_norms[0]), normed], dim=-1)
        for number, layer in enumerate(network.layers):
            if number:
                inputs = rms(x, network.input_norms[number])
            x = plain_layer(network, layer, inputs, x)
        return x

    def children(self, path):
        best = self.slots[len(path)].topk(self.drafter.width)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


@torch.inference_mode()
def test_parallel_drafts_equal_the_transcription(model):
    drafter = peagle(model, seed=3)
    notes = record_drafts(drafter)
    engine = engine_for(model, 300, {"eagle": drafter})
    engine.run_many(greedy(prompts(8), "eagle"))
    assert_as_transcribed(notes, drafter, model, least=20, plain=PlainPeagle)


@pytest.mark.parametrize("kind,window", covering(("eagle-3", "p-eagle"), (3, 12)))
@torch.inference_mode()
def test_windows_equal_the_masks_of_speculators(kind, window, model):
    """Texts longer than the window, in layers with and without one."""
    moves = kind == "p-eagle"
    view = LayerView(window=window, moves=moves)
    if moves:
        drafter = peagle(model, seed=3, fields={"views": (view, LayerView())})
    else:
        drafter = eagle(model, fused=True, seed=3, fields={"views": (view,)})
    notes = record_drafts(drafter)
    engine = engine_for(model, 300, {"eagle": drafter})
    asked = greedy(prompts(2, low=9), "eagle")
    undrafted = engine.run_many(greedy(prompts(2, low=9), "none"))
    answers = engine.run_many(asked)
    assert [a.tokens.tolist() for a in answers] == [a.tokens.tolist() for a in undrafted]
    assert_as_transcribed(notes, drafter, model, least=5, plain=windowed_class(window, moves))


def windowed_class(window: int, moves: bool):
    """EAGLE-3 and P-EAGLE with the masks of speculators (models/eagle3 and peagle, attention.py).

    EAGLE-3: a row q sees committed rows > q - window, and drafted rows are added to what the last
    committed row sees. P-EAGLE: a row of depth d sees committed rows > q + d - window and its own
    rollout.
    """

    class PlainWindow(PlainPeagle if moves else PlainEagle):
        def mask(self, count, layer):
            committed = len(self.features)
            query, key = torch.arange(count)[:, None], torch.arange(count)
            causal = key <= query
            if self.network.config.views[layer].window == 0:
                return causal
            anchor = query if moves else query.clamp(max=committed - 1)
            return causal & ((key > anchor - window) | (key >= committed))

        def run(self, features, embedded):
            network = self.network
            normed = rms(features, network.feature_norm)
            x, inputs = features, torch.cat([rms(embedded, network.input_norms[0]), normed], -1)
            for number, layer in enumerate(network.layers):
                inputs = inputs if number == 0 else rms(x, network.input_norms[number])
                mask = self.mask(len(features), number)
                x = plain_layer(network, layer, inputs, x, mask)
            return x

    return PlainWindow


@torch.inference_mode()
def test_a_parallel_draft_takes_one_forward(model):
    drafter = peagle(model, seed=3)
    sizes, network = [], drafter.network
    network.register_forward_hook(lambda module, given, output: sizes.append(len(output)))
    engine = engine_for(model, 300, {"eagle": drafter})
    answer = engine.run(greedy(prompts(1, low=8), "eagle")[0])
    # One pass reads the committed tokens, and one drafts.
    assert answer.counts.num_drafts > 3 and len(sizes) <= 2 * answer.counts.num_drafts + 2


@pytest.mark.parametrize(
    "make",
    chosen(
        {"deepseek": mtp, "qwen3-next": partial(mtp, qwen=True), "p-eagle": peagle},
        "deepseek",
    ),
)
@torch.inference_mode()
def test_texts_are_the_plain_ones(make, model):
    """All sets of parameters, dynamic and static trees, preemption, then cached prompts."""
    drafter = make(model, seed=2)
    rank_paths = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    queries = [
        TextQuery(
            prompt,
            SamplingParams(**{"max_tokens": 16, "seed": 50 + number} | PARAMETERS[name]),
            Speculation("d", tree=rank_paths if number % 3 == 0 else None),
        )
        for number, (name, prompt) in enumerate(
            zip(PARAMETERS, prompts(len(PARAMETERS), low=6), strict=True)
        )
    ]
    plain = engine_for(model).run_many([replace(q, speculation=Speculation()) for q in queries])
    engine = engine_for(model, 26, {"d": drafter})
    preempted, preempt = [], engine.schedulers["text"]._preempt
    engine.schedulers["text"]._preempt = lambda s: (preempted.append(s), preempt(s))
    for start in (0, 7):
        some = engine.run_many(queries[start : start + 8])
        for one, other in zip(plain[start : start + 8], some, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
    assert preempted
    for query, expected in zip(queries[-2:], plain[-2:], strict=True):
        engine.run(query)
        again = engine.run(query)
        assert again.timing.prefix_cached > 0
        assert again.tokens.tolist() == expected.tokens.tolist()
    assert_no_leak(engine)
    assert_forgotten(drafter)

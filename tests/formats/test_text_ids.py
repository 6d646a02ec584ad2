"""Ids that are texts of unequal lengths, and prompts with titles."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from recserve.bundle.bundle import Bundle
from recserve.formats.checkpoint_format import ImportFault, ImportOptions
from recserve.formats.conversion import import_checkpoint
from recserve.schemas.items import InvalidRequest
from tests.support.foreign_recommenders import foreign
from tests.support.imports import opened, quiet

TEMPLATE = "{{ history | reverse | join }}\n" + "Item text ID: "
ITEM_TEXT = "Item text ID: {id} Title: {title}.\n"


def text_import(root, seed, **changes):
    """Imports a recommender whose ids are lists of drawn words; returns its data and its ids."""
    data, draw = foreign(root, "qwen3", seed=seed), np.random.default_rng(seed)
    words = ["a", "ab", "abba", "b", "bc", "cab"]
    ids = {i: [str(w) for w in draw.choice(words, draw.integers(1, 4))] for i in data.ids}
    ids["39"] = ids["7"]
    (root / "ids.json").write_text(json.dumps(ids))
    (root / "prompt.jinja").write_text(TEMPLATE)
    given = {"folder": data.folder, "items": data.items, "events": data.events}
    given |= {"out": root / "bundle", "ids": root / "ids.json", "prompt": root / "prompt.jinja"}
    given |= {"id_format": "[{text}]", "item_text": ITEM_TEXT, "max_history": 4}
    import_checkpoint(ImportOptions(**{**given, **changes}), quiet)
    return data, {item: f"[{', '.join(one)}]" for item, one in ids.items()}


class Exhaustive:
    """Scores of all ids by one history, and beam search over them in which ended ids wait."""

    def __init__(self, data, ids, history, rule, temperature, model=None):
        tokenizer = data.tokenizer
        items = "".join(f"Item text ID: {ids[i]} Title: Item {i}.\n" for i in history[::-1])
        self.prompt = tokenizer.encode(items + "\nItem text ID: ")
        self.tokens = {item: tuple(tokenizer.encode(text)) for item, text in ids.items()}
        self.model, self.rule, self.temperature = model or data.model, rule, temperature
        self.every = sorted({token for one in self.tokens.values() for token in one})
        self.known, self.ends = {}, set(self.tokens.values())

    @torch.inference_mode()
    def score(self, paths):
        """Computes the log-probabilities of the tokens after paths of one length."""
        new = [path for path in paths if path not in self.known and path not in self.ends]
        if not new:
            return
        rows = torch.tensor([[*self.prompt, *path] for path in new])
        every = self.model(rows).logits[:, -1].double() / self.temperature
        for path, logits in zip(new, every, strict=True):
            below = {one[len(path)] for one in self.tokens.values() if one[: len(path)] == path
                     and len(one) > len(path)}  # fmt: skip
            rivals = {"vocabulary": range(len(logits)), "level": self.every}.get(self.rule, below)
            whole = logits[sorted(rivals)].logsumexp(0)
            self.known[path] = {token: float(logits[token] - whole) for token in below}

    def search(self, width, power):
        """Returns the scores of the ids that beam search finds, best first."""
        beams = {(): 0.0}
        for _ in range(max(map(len, self.tokens.values()))):
            longer = {}
            for length in {len(path) for path in beams}:
                self.score([path for path in beams if len(path) == length])
            for path, score in beams.items():
                if path in self.ends:
                    longer[path] = score
                else:
                    longer |= {(*path, t): score + gain for t, gain in self.known[path].items()}
            best = sorted(longer, key=lambda path: -longer[path])[:width]
            beams = {path: longer[path] for path in best}
        return {path: score / len(path) ** power for path, score in beams.items()}


@pytest.mark.parametrize("rule", ["children", "level", "vocabulary"])
def test_slates_are_those_of_beams_in_which_ended_ids_wait(rule, tmp_path):
    data, ids = text_import(tmp_path, len(rule), shared_ids="first", rule=rule)
    draw = np.random.default_rng(len(rule))
    with opened(tmp_path, tmp_path / "bundle") as service:
        # A steep divisor lets long ids win that thresholds of sums would drop.
        for temperature, power, width in (
            *((1.0, 0.0, 5), (1.0, 1.0, 5), (0.5, 0.7, 200)),
            *((1.0, 2.0, 200), (0.3, 3.0, 200)),
        ):
            history = [str(row) for row in draw.integers(0, len(ids), 4)]
            scoring = {"temperature": temperature, "length_penalty": power}
            body = {"history": history, "k": 5, "beam_width": width, "scoring": scoring}
            answer = service.recommend({**body, "exclude": {"seen": False}})
            plain = Exhaustive(data, ids, history, rule, temperature)
            wanted = plain.search(width, power)
            for item in answer.items:
                wanted_score = wanted[plain.tokens[item.item_id]]
                assert item.score == pytest.approx(wanted_score, rel=1e-5, abs=1e-5)
            best = sorted(wanted.values(), reverse=True)[:5]
            np.testing.assert_allclose([item.score for item in answer.items], best, 1e-5, 1e-5)
            # All ids are found by the widest search alone, whose order nothing can change.
            assert answer.exact == (power == 0 or width > len(ids))
            assert ("length_penalty" in answer.degraded) == (not answer.exact)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["children", "level", "vocabulary"])
def test_hundreds_of_slates_are_those_of_plain_beams(rule, tmp_path):
    """334 requests by each rule."""
    data, ids = text_import(tmp_path, 50 + len(rule), shared_ids="first")
    draw, model = np.random.default_rng(4), data.model
    with opened(tmp_path, tmp_path / "bundle") as service:
        for _ in range(334):
            history = [str(row) for row in draw.integers(0, len(ids), draw.integers(1, 6))]
            temperature, power = float(draw.choice([0.3, 1.0])), float(draw.choice([0.0, 1.0]))
            width = int(draw.choice([8, 200]))
            scoring = {"rule": rule, "temperature": temperature, "length_penalty": power}
            body = {"history": history, "k": 8, "beam_width": width, "scoring": scoring}
            answer = service.recommend({**body, "exclude": {"seen": False}})
            plain = Exhaustive(data, ids, history[-4:], rule, temperature, model)
            wanted = plain.search(width, power)
            best = sorted(wanted.values(), reverse=True)[:8]
            np.testing.assert_allclose([item.score for item in answer.items], best, 1e-5, 1e-5)
            for item in answer.items:
                wanted_score = wanted[plain.tokens[item.item_id]]
                assert item.score == pytest.approx(wanted_score, rel=1e-5, abs=1e-5)


def test_texts_are_ranked_filtered_and_capped(tmp_path):
    data, ids = text_import(tmp_path, 3, shared_ids="all")
    history = ["4", "7", "0"]
    plain = Exhaustive(data, ids, history, "children", 1.0)
    sums = plain.search(200, 0.0)
    with opened(tmp_path, tmp_path / "bundle") as service:
        listed = [i.item_id for i in service.recommend({"history": history, "k": 9}).items]
        for item in service.rank({"candidates": listed, "history": history}).items:
            tokens = plain.tokens[item.item_id]
            holders = sum(one == tokens for one in plain.tokens.values())
            wanted = sums[tokens] - np.log(holders)
            assert item.scores["likelihood"] == pytest.approx(wanted, abs=1e-5)
        odd = service.recommend({"history": history, "filter": {"eq": ["kind", "odd"]}})
        assert odd.items and all(int(item.item_id) % 2 for item in odd.items)
        changed = service.put_items({"items": [{"item_id": "new", "title": "New"}]})
        assert "imported" in changed.rejected[0].reason
        with pytest.raises(InvalidRequest, match="generates nothing after an id"):
            service.recommend(
                {"history": history, "scoring": {"rule": "vocabulary", "end_tokens": True}}
            )


def test_titles_stand_beside_ids_of_one_token_per_code(tmp_path):
    data = foreign(tmp_path, seed=8)
    (tmp_path / "ids.json").write_text(json.dumps({i: "".join(one) for i, one in data.ids.items()}))
    (tmp_path / "prompt.jinja").write_text("Bought: {{ history | join }}Next: ")
    import_checkpoint(
        ImportOptions(
            data.folder, data.items, tmp_path / "bundle", ids=tmp_path / "ids.json",
            id_format="<a_{}><b_{}><c_{}>", prompt=tmp_path / "prompt.jinja",
            item_text="{title} {id}; ", max_history=3,
        ),
        quiet,
    )  # fmt: skip
    bundle = Bundle.open(tmp_path / "bundle")
    with opened(tmp_path, bundle) as service:
        prefix = service.recommender.prefixes
        tokens = prefix.template.tokens(np.array([3, 5]), bundle.catalog().semantic_ids.codes)
    texts = "".join(f"Item {i} {''.join(data.ids[i])}; " for i in ("3", "5"))
    wanted = data.tokenizer.encode(f"Bought: {texts}Next: ")
    assert len(tokens) == len(wanted)
    same = {(int(a), b) for a, b in zip(tokens, wanted, strict=True)}
    assert len(same) == len(set(wanted)) == len(set(tokens.tolist()))


def test_tokens_that_reach_over_the_end_of_an_item_are_refused(tmp_path):
    with pytest.raises(ImportFault, match="reach over the end of an item"):
        _with_merge(tmp_path, "!I")


def test_a_merge_inside_an_item_is_no_fault(tmp_path):
    _with_merge(tmp_path, "Title: ")


def _with_merge(root, merged):
    data = foreign(root, "qwen3")
    tokenizer = Tokenizer.from_file(str(data.folder / "tokenizer.json"))
    tokenizer.add_tokens([merged])
    tokenizer.save(str(data.folder / "tokenizer.json"))
    (root / "ids.json").write_text(json.dumps({item: f"x{item}" for item in data.ids}))
    (root / "prompt.jinja").write_text("{{ history | join('!') }} Next: ")
    import_checkpoint(
        ImportOptions(
            data.folder, data.items, root / "bundle", ids=root / "ids.json", id_format="[{text}]",
            prompt=root / "prompt.jinja", item_text="Item {id} Title: {title}", max_history=3,
        ),
        quiet,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id_format": "{text}"}, "is the beginning of"),
        ({"id_format": "[{text}{text}]"}, "expected one"),
        ({"item_text": "Item {price}"}, "expected fields of"),
        ({"item_text": "Item"}, "expected fields of"),
    ],
)
def test_texts_that_do_not_fit_are_refused(changes, words, tmp_path):
    with pytest.raises(ImportFault, match=words):
        text_import(tmp_path, 1, **changes)

"""`recserve bundle import`: what a checkpoint scores where it was trained is what we serve."""

import dataclasses
import json
import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file
from typer.testing import CliRunner

from recserve.batch import Defaults, SlateRecipe
from recserve.bundle.bundle import Bundle, BundleError
from recserve.cli.app import app
from recserve.doctor.checkpoint_checks import examine_checkpoint
from recserve.engine.engine_config import EngineConfig
from recserve.evaluation.evaluation import EvaluationOptions, evaluate_bundle
from recserve.formats import registry
from recserve.formats.checkpoint_format import ImportFault
from recserve.formats.conversion import import_checkpoint
from recserve.schemas.items import ItemsRequest, RecommendRequest
from recserve.service import Service, ServiceOptions
from recserve.training.recommender.frozen_recommender import FrozenRecommender
from tests.support.foreign_recommenders import foreign, share
from tests.support.imports import (
    KEEP,
    expected,
    opened,
    options,
    packed,
    prompt_of,
    quiet,
)
from tests.support.input_parts import write_parts
from tests.support.live_server import live

CASES = [
    ("generic", "qwen2", "children", "popular", True),
    ("generic", "llama", "level", "all", False),
    ("generic", "qwen3", "vocabulary", "first", True),
    ("generic", "qwen3", "children", "all", False),
    ("minionerec", "qwen2", "vocabulary", "all", False),
    ("minionerec", "llama", "vocabulary", "popular", False),
    ("minionerec", "qwen2", "children", "first", True),
    ("lc-rec", "llama", "vocabulary", "popular", False),
    ("openonerec", "qwen3", "vocabulary", "popular", False),
]


@pytest.mark.parametrize(("name", "family", "rule", "shared", "tied"), CASES)
def test_slates_are_an_exhaustive_search_of_the_original(
    name, family, rule, shared, tied, tmp_path
):
    before = "<s_" if name == "openonerec" else "<"
    data = foreign(tmp_path, family, tied=tied, seed=len(family) + len(rule), before=before)
    own = ("children" if name == "generic" else "vocabulary") == rule
    import_checkpoint(
        options(data, tmp_path, name, shared_ids=shared, rule=None if own else rule), quiet
    )
    bundle, model = Bundle.open(tmp_path / "bundle"), data.model
    popularity = dict(zip(data.ids, bundle.catalog().popularity.tolist(), strict=True))
    if name == "openonerec":  # its map has counts
        popularity = {item: int(item) % 7 for item in data.ids}
    holders = Counter(tuple(one) for one in data.ids.values())
    draw = np.random.default_rng(1)
    with opened(tmp_path, bundle) as service:
        for size in (1, 2, 8, 11):
            history = [str(row) for row in draw.integers(0, len(data.ids), size)]
            body = {"history": history, "k": 40, "beam_width": 200, "exclude": KEEP}
            answer = service.recommend(RecommendRequest(**body))
            scores = expected(data, name, rule, history[-8:], model)
            offered = list(data.ids)
            if shared == "all" and rule == "children":
                scores = {i: s - share(holders[tuple(data.ids[i])]) for i, s in scores.items()}
            elif shared != "all":
                order = {} if shared == "first" else popularity
                first = {}
                for item in sorted(data.ids, key=lambda i: (-order.get(i, 0), int(i))):
                    first.setdefault(tuple(data.ids[item]), item)
                offered = list(first.values())
            got = {item.item_id: item.score for item in answer.items if item.source == "model"}
            assert got.keys() == set(offered)
            ranked = sorted((scores[item] for item in offered), reverse=True)
            np.testing.assert_allclose(list(got.values()), ranked, rtol=1e-6, atol=1e-5)
            for item, score in got.items():
                assert score == pytest.approx(scores[item], rel=1e-6, abs=1e-5)


def test_a_folder_of_items_is_one_file(tmp_path):
    """For an import, and for the doctor before it."""
    data, draw = foreign(tmp_path, "llama"), random.Random(3)
    found, findings = [], []
    folder = write_parts(tmp_path / "parts", "parquet", pq.read_table(data.items), draw)
    for name, items in (("one", data.items), ("two", folder)):
        given = options(data, tmp_path, "generic", items=items, out=tmp_path / name)
        findings.append(examine_checkpoint(data.folder, given, 0))
        found.append(import_checkpoint(given, quiet).manifest.files)
    assert dict(found[0]) == dict(found[1]) and findings[0] == findings[1]


def test_beams_are_those_of_generate(tmp_path):
    """MiniOneRec's own search: as many beams, its mask, its newline and its end token."""
    data, width = foreign(tmp_path, seed=5), 6
    import_checkpoint(options(data, tmp_path, "minionerec", shared_ids="first"), quiet)
    tokenizer, model = data.tokenizer, data.model
    ending = [*tokenizer.encode("\n"), tokenizer.eos_token_id]
    following: dict[tuple[int, ...], set[int]] = {}
    names = {}
    for item, texts in reversed(data.ids.items()):
        tokens = [*tokenizer.convert_tokens_to_ids(texts), *ending]
        names[tuple(tokens)] = item
        for place, token in enumerate(tokens):
            following.setdefault(tuple(tokens[:place]), set()).add(token)
    draw = np.random.default_rng(2)
    with opened(tmp_path, tmp_path / "bundle") as service:
        for size in (1, 3, 8):
            history = [str(row) for row in draw.integers(0, len(data.ids), size)]
            prompt = prompt_of(data, "minionerec", history)
            count = len(prompt)
            with torch.inference_mode():
                out = model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    num_beams=width,
                    num_return_sequences=width,
                    max_new_tokens=8,
                    do_sample=False,
                    length_penalty=0.0,
                    pad_token_id=tokenizer.eos_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                    prefix_allowed_tokens_fn=lambda _, row, n=count: sorted(
                        following.get(tuple(row[n:].tolist()), {tokenizer.eos_token_id})
                    ),
                    return_dict_in_generate=True,
                    output_scores=True,
                )
            body = {"history": history, "k": width, "beam_width": width, "exclude": KEEP}
            answer = service.recommend(RecommendRequest(**body))
            theirs = [names[tuple(row[len(prompt) :].tolist()[:5])] for row in out.sequences]
            assert [item.item_id for item in answer.items] == theirs
            np.testing.assert_allclose(
                [item.score for item in answer.items], out.sequences_scores, atol=1e-4
            )


@pytest.mark.parametrize("name", ["generic", "minionerec", "lc-rec", "openonerec"])
def test_an_import_is_served_like_an_own_bundle(name, tmp_path):
    """Filters, caps, seen items, ranking, changes of items, HTTP, batch jobs and evaluation."""
    own = name == "openonerec"
    data = foreign(tmp_path, "qwen3" if own else "llama", seed=9, before="<s_" if own else "<")
    import_checkpoint(options(data, tmp_path, name), quiet)
    rule = "children" if name == "generic" else "vocabulary"
    bundle = Bundle.open(tmp_path / "bundle")
    bundle.verify()
    bundle.check_parts()
    history = ["38", "4", "7", "0"]  # 38 shares its id with 1
    scores = expected(data, name, rule, history, data.model, length_penalty=0.0)
    with opened(tmp_path, bundle) as service:
        body = {"history": history, "k": 10, "beam_width": 200}
        plain = service.recommend(RecommendRequest(**body))
        assert not {"4", "7", "0"} & {item.item_id for item in plain.items}
        odd = service.recommend({**body, "filter": {"eq": ["kind", "odd"]}})
        assert odd.items and all(int(item.item_id) % 2 for item in odd.items)
        capped = service.recommend({**body, "diversity": {"category": 2}})
        assert len([item for item in capped.items if item.source == "model"]) == 4
        listed = [item.item_id for item in plain.items]
        ranked = service.rank({"candidates": listed[::-1], "history": history})
        for item in ranked.items:
            assert item.scores["likelihood"] == pytest.approx(scores[item.item_id], abs=1e-5)
        changed = service.put_items(
            ItemsRequest(
                items=[
                    {"item_id": "5", "title": "New"},
                    {"item_id": "new", "title": "New"},
                    {"item_id": "6", "embedding": [1.0]},
                ]
            )
        )
        assert (changed.updated, changed.inserted) == (1, 0)
        assert [one.index for one in changed.rejected] == [1, 2]
        assert "imported" in changed.rejected[0].reason
        assert service.item("5").title == "New"
        service.hide_item(listed[0])
        left = service.recommend(RecommendRequest(**body))
        assert [item.item_id for item in left.items][:8] == listed[1:9]
        before = service.versions()
        facts = service.model("recommender")["recserve"]
        assert (facts["imported"], facts["rule"]) == (name, rule)
        with live(service) as client:
            answer = client.post("/v1/recommend", json=body).json()
            assert [one["item_id"] for one in answer["items"]] == [i.item_id for i in left.items]
            assert answer["model_version"] == before["model_version"]
    recipe = SlateRecipe(str(bundle.root), Defaults(10, beam_width=200), f"lmdb:{tmp_path}/batch")
    with recipe.open() as task:
        task.begin_part()
        users = {"user_id": ["a", "b"], "history": [history, history[:2]]}
        found = task(pa.table(users), 0).answers.to_pydict()
        own = zip(found["user_id"], found["item_id"], strict=True)
        assert [item for user, item in own if user == "a"] == listed
    report = evaluate_bundle(bundle, EvaluationOptions(strategy="beam", k=(5,)))
    assert report.to_dict()["users"] == 12
    with pytest.raises(ValueError, match="holds an imported recommender"):
        FrozenRecommender.open(bundle, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "given", "far"),
    [
        ("minionerec", ServiceOptions(weights="int8"), 0.5),
        ("openonerec", ServiceOptions(dtype="bfloat16"), 0.5),
        ("generic", ServiceOptions(engine=EngineConfig(kv_dtype="fp8")), 1.5),
        ("minionerec", ServiceOptions(engine=EngineConfig(kv_bytes=2**20)), 0.0),
        ("minionerec", ServiceOptions(engine=EngineConfig(invariant=True)), 0.0),
        ("generic", ServiceOptions(engine=EngineConfig(invariant=True)), 0.0),
    ],
)
def test_an_import_takes_the_settings_of_own_bundles(name, given, far, tmp_path):
    """Search and ranking read the same numbers under each setting, near those of float32."""
    family, before = ("qwen3", "<s_") if name == "openonerec" else ("llama", "<")
    data = foreign(tmp_path, family, seed=3, before=before)
    import_checkpoint(options(data, tmp_path, name), quiet)
    body = {"history": ["38", "4", "7", "0"], "k": 40, "beam_width": 200, "exclude": KEEP}
    found = []
    for number, each in enumerate((ServiceOptions(), given)):
        chosen = dataclasses.replace(each, journal=tmp_path / f"journal{number}")
        store = f"lmdb:{tmp_path}/store{number}"
        with Service.open(tmp_path / "bundle", store, "cpu", chosen) as service:
            answers = [service.recommend(body) for _ in range(2)]  # cold, then from the cache
            slates = [{i.item_id: i.score for i in a.items if i.source == "model"} for a in answers]
            ranked = service.rank({"candidates": [*slates[0]], "history": body["history"]}).items
        likelihoods = {item.item_id: item.scores["likelihood"] for item in ranked}
        for slate in slates:
            assert slate == pytest.approx(likelihoods, abs=2e-5)
        found.append(slates[0])
    plain, other = found
    assert plain.keys() == other.keys()
    apart = max(abs(plain[item] - other[item]) for item in plain)
    assert (1e-4 < apart < far) if far else apart < 1e-5


def test_the_command_imports_without_events(tmp_path):
    data = foreign(tmp_path)
    given = options(data, tmp_path, "generic")
    command = ["bundle", "import", str(data.folder), "--items", str(data.items)]
    command += ["--ids", str(given.ids), "--id-format", given.id_format]
    command += ["--prompt", str(given.prompt), "--out", str(given.out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    with opened(tmp_path, given.out) as service:
        assert len(service.recommend(RecommendRequest(history=["1"], k=5)).items) == 5
    with pytest.raises(BundleError, match="--events"):
        Bundle.open(given.out).events()


def _id_file(data, root, kind):
    """Writes the ids in one kind of file."""
    texts = ["".join(one) for one in data.ids.values()]
    numbers = [[int(text[3:-1]) for text in one] for one in data.ids.values()]
    path = root / f"map.{kind.split('-')[0]}"
    table = {"item_id": list(data.ids), "semantic_id": numbers}
    if kind == "json":
        path.write_text(json.dumps(dict(zip(data.ids, texts, strict=True))))
    elif kind == "json-numbers":
        path.write_text(json.dumps(dict(zip(data.ids, numbers, strict=True))))
    elif kind == "npy":
        np.save(path, np.array(numbers, np.int32))
    elif kind == "safetensors":
        save_file({"codes": np.array(numbers, np.uint16)}, path)
    elif kind == "parquet":
        pq.write_table(pa.table(table), path)
    elif kind == "parquet-texts":
        pq.write_table(pa.table({**table, "semantic_id": list(data.ids.values())}), path)
    elif kind == "csv":
        rows = zip(data.ids, texts, strict=True)
        path.write_text("item_id,semantic_id\n" + "".join(f"{i},{t}\n" for i, t in rows))
    else:
        rows = zip(data.ids, numbers, strict=True)
        lines = [json.dumps({"item_id": i, "semantic_id": one}) for i, one in rows]
        path.write_text("\n".join(lines) + "\n")
    return path


KINDS = ("json", "json-numbers", "npy", "safetensors", "parquet", "parquet-texts", "csv", "jsonl")


def test_every_kind_of_id_file_gives_the_same_ids(tmp_path):
    data = foreign(tmp_path)
    wanted = None
    for kind in KINDS:
        out = tmp_path / kind
        path = _id_file(data, tmp_path, kind)
        import_checkpoint(
            options(data, tmp_path, "generic", ids=path, out=out, max_history=1), quiet
        )
        codes = Bundle.open(out).catalog().semantic_ids.codes
        wanted = codes if wanted is None else wanted
        np.testing.assert_array_equal(codes, wanted, kind)


def _spoil(data, root, how):
    """Damages one input; returns the changed options and words of the refusal."""
    folder = data.folder
    config = json.loads((folder / "config.json").read_text())
    if how == "encoder-decoder":
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "t5"}))
        return {}, "encoder-decoder"
    if how == "another family":
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
        return {}, "model_type is 'gpt2'"
    if how == "adapter":
        (folder / "config.json").rename(folder / "adapter_config.json")
        return {}, "LoRA.*merge"
    if how == "pickled":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        return {}, "pickled.*safe_serialization"
    if how == "slow tokenizer":
        (folder / "tokenizer.json").rename(folder / "tokenizer.model")
        return {}, "no tokenizer.json.*use_fast"
    if how == "item without id":
        del data.ids["3"]
        return {}, "no id for 1 of 40 items.*'3'"
    if how == "unequal lengths":
        data.ids["3"] = data.ids["3"][:2]
        return {}, "item '3'.*expected 3 codes"
    if how == "code without token":
        data.ids["3"] = ["<a_1>", *data.ids["3"][1:]]
        return {}, "item '3' has the code <a_1>, which is no token"
    if how == "template changes ids":
        (root / "other.jinja").write_text("{{ history | join(' ') | replace('a', 'b') }}")
        return {"prompt": root / "other.jinja"}, "empty|none of their ids|other tokens"
    if how == "template without ids":
        (root / "other.jinja").write_text("Hello")
        return {"prompt": root / "other.jinja"}, "none of their ids"
    if how == "template that never ends":
        (root / "other.jinja").write_text("{% for i in range(9**5) %}{{ history * i }}{% endfor %}")
        return {"prompt": root / "other.jinja"}, "template"
    if how == "template that fails":
        (root / "other.jinja").write_text("x{{ history[0].__class__.__mro__ }}{{ 1 // 0 }}")
        return {"prompt": root / "other.jinja"}, "template cannot be applied"
    if how == "long prompts":
        return {"max_history": 400}, "the model has 1024 positions"
    if how == "id format":
        return {"id_format": "<a_{}>b{}]"}, "id format"
    if how == "no id format":
        return {"id_format": None}, "needs --id-format"
    if how == "pickled ids":
        np.save(root / "ids.npy", np.array([{"a": 1}], object), allow_pickle=True)
        return {"ids": root / "ids.npy"}, "no plain .npy"
    if how == "array of another size":
        np.save(root / "ids.npy", np.zeros((40, 2), np.int64))
        return {"ids": root / "ids.npy"}, r"expected integers of shape \(40, 3\)"
    raise AssertionError(how)


REFUSALS = (
    *("encoder-decoder", "another family", "adapter", "pickled", "slow tokenizer"),
    *("item without id", "unequal lengths", "code without token", "template changes ids"),
    *("template without ids", "template that never ends", "template that fails", "long prompts"),
    *("id format", "no id format", "pickled ids", "array of another size"),
)


@pytest.mark.parametrize("how", REFUSALS)
def test_what_cannot_be_imported_is_refused_by_name(how, tmp_path):
    data = foreign(tmp_path)
    changes, words = _spoil(data, tmp_path, how)
    with pytest.raises(ValueError, match=f"(?s){words}"):
        import_checkpoint(options(data, tmp_path, "generic", **changes), quiet)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("generic", "children"),
        ("minionerec", "vocabulary"),
        ("lc-rec", "vocabulary"),
        ("openonerec", "vocabulary"),
    ],
)
def test_a_thousand_slates_are_exhaustive_searches(name, rule, tmp_path):
    own = name == "openonerec"
    family, before = ("qwen3", "<s_") if own else ("llama", "<")
    data = foreign(tmp_path, family, seed=21, before=before)
    import_checkpoint(options(data, tmp_path, name, shared_ids="first"), quiet)
    model, draw = data.model, np.random.default_rng(3)
    with opened(tmp_path, tmp_path / "bundle") as service:
        for _ in range(1000):
            size = int(draw.integers(1, 10))
            history = [str(row) for row in draw.integers(0, len(data.ids), size)]
            body = {"history": history, "k": 12, "beam_width": 200, "exclude": KEEP}
            answer = service.recommend(RecommendRequest(**body))
            scores = expected(data, name, rule, history[-8:], model)
            best = sorted(set(scores.values()), reverse=True)[:12]
            got = [item.score for item in answer.items]
            np.testing.assert_allclose(got, best, rtol=1e-6, atol=1e-5)
            for item in answer.items:
                assert item.score == pytest.approx(scores[item.item_id], rel=1e-6, abs=1e-5)


def test_a_package_adds_a_format(tmp_path, monkeypatch):
    (tmp_path / "other_format.py").write_text(
        "from recserve.formats.lc_rec import LcRec\n\n\n"
        "class Other(LcRec):\n    name = 'other'\n\n"
        "    def prompt(self, history):\n        return ('Next after ' + ' '.join(history),)\n"
    )
    info = tmp_path / "other_format-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-format\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[recserve.formats]\nother = other_format:Other\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.formats.cache_clear()
    try:
        data = foreign(tmp_path)
        import_checkpoint(options(data, tmp_path, "other"), quiet)
    finally:
        registry.formats.cache_clear()
    with opened(tmp_path, tmp_path / "bundle") as service:
        assert len(service.recommend(RecommendRequest(history=["1"], k=5)).items) == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"format": "tiger"},
            "'tiger'; choose --format generic or minionerec or lc-rec or openonerec",
        ),
        ({"format": None}, "no format is given"),
        ({"ids": None}, "needs --ids"),
        ({"id_format": "<a_{}>"}, "no effect with format minionerec"),
    ],
)
def test_options_that_do_not_fit_a_format_are_refused(changes, words, tmp_path):
    data = foreign(tmp_path)
    with pytest.raises(ImportFault, match=words):
        import_checkpoint(options(data, tmp_path, "minionerec", **changes), quiet)


def _spoil_openonerec(data, root, how):
    """Damages one input; returns the changed options and words of the refusal."""
    given = packed(data, root)
    messages = json.loads(given["prompt"].read_text())
    found = json.loads(given["ids"].read_text())
    if how == "template of Qwen3":
        other = data.folder / "chat_template.jinja"
        other.write_text(other.read_text().replace("/no_think", ""))
        return {}, "adds /no_think.*qwen3_soft_switch"
    if how == "template without an empty thought":
        other = data.folder / "chat_template.jinja"
        other.write_text(other.read_text().replace("</think>", ""))
        return {}, "ends with an empty thought"
    if how == "no template":
        (data.folder / "chat_template.jinja").unlink()
        return {}, "no chat template.*qwen3_soft_switch"
    if how == "two domains":
        found["0"] = [{"pid": 3, "count": 1, "count_after_downsample": 1}]
        words = "item '3' has two ids; take the map of one domain"
    if how == "key that is too large":
        found[str(8192**3)] = []
        words = "no packed id"
    if how == "picture":
        messages[1]["content"].append({"type": "image_url", "image_url": "x"})
        words = "part of type 'image_url'"
    if how == "no place of the ids":
        messages[1]["content"] = "Next?"
        words = "in 0 places"
    given["ids"].write_text(json.dumps(found))
    given["prompt"].write_text(json.dumps(messages))
    return given, words


OPENONEREC_REFUSALS = (
    *("template of Qwen3", "template without an empty thought", "no template", "two domains"),
    *("key that is too large", "picture", "no place of the ids"),
)


@pytest.mark.parametrize("how", OPENONEREC_REFUSALS)
def test_what_is_not_openonerec_is_refused_by_name(how, tmp_path):
    data = foreign(tmp_path, "qwen3", before="<s_")
    given = options(data, tmp_path, "openonerec")
    changes, words = _spoil_openonerec(data, tmp_path, how)
    with pytest.raises(ImportFault, match=f"(?s){words}"):
        import_checkpoint(dataclasses.replace(given, **changes), quiet)


def test_openonerec_reads_tables_of_pid_and_sid(tmp_path):
    data = foreign(tmp_path, "qwen3", before="<s_")
    codes = [[int(text.rpartition("_")[2][:-1]) for text in one] for one in data.ids.values()]
    table = pa.table({"pid": [int(item) for item in data.ids], "sid": codes})
    pq.write_table(table, tmp_path / "map.parquet")
    given = options(data, tmp_path, "openonerec", ids=tmp_path / "map.parquet", max_history=1)
    bundle = import_checkpoint(given, quiet)
    np.testing.assert_array_equal(bundle.catalog().semantic_ids.codes[:, :3], codes)

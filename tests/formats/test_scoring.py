"""A request may name another scoring rule than that of its checkpoint, at every door."""

import json

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from recserve.batch import Defaults, SlateRecipe
from recserve.bundle.bundle import Bundle
from recserve.cli.app import app
from recserve.config import ServerConfig
from recserve.evaluation.cases import leave_one_out_cases
from recserve.evaluation.evaluation import EvaluationOptions, evaluate_bundle
from recserve.experiments.settings import ArmFields
from recserve.formats.conversion import import_checkpoint
from recserve.schemas.items import InvalidRequest, RecommendRequest
from recserve.server.loader import ServiceLoader
from recserve.service.slate_log.reader import shown_items
from tests.support.foreign_recommenders import foreign
from tests.support.imports import KEEP, expected, opened, options, quiet
from tests.support.live_server import live, run_server

OWN = dict.fromkeys(["minionerec", "lc-rec", "openonerec"], "vocabulary")
OWN["generic"] = "children"
WITHOUT_ENDS = ("generic", "openonerec")
DOORS = ("python", "/v1", "/v2", "batch", "batch default", "command", "experiment")


def drawn_scoring(draw, name):
    """Returns a drawn scoring that is not the own one, and all of it as the answer has it."""
    rule = str(draw.choice(["children", "level", "vocabulary"]))
    has_ends = name not in WITHOUT_ENDS and rule == "vocabulary"
    whole = {
        "rule": rule,
        "temperature": float(draw.choice([0.2, 1.0, 1.7])),
        "end_tokens": bool(has_ends and draw.integers(2)),
        "length_penalty": float(draw.choice([0.0, 0.7, 1.0])),
    }
    own = {"rule": OWN[name], "temperature": 1.0, "length_penalty": float(name == "lc-rec")}
    given = {n: v for n, v in whole.items() if v != own.get(n) or draw.integers(2)}
    if whole["end_tokens"] and draw.integers(2):
        given.pop("end_tokens", None)  # what the rule scores if nothing else is said
    changed = any(own.get(n, has_ends) != v for n, v in whole.items())
    return (given, whole) if changed else drawn_scoring(draw, name)


def answer_of(door, service, client, root, body):
    """Returns ids, scores and the scoring of a slate, by one door."""
    scoring = json.dumps(body["scoring"])
    if door == "python":
        answer = service.recommend(RecommendRequest(**{**body, "exclude": KEEP}))
    elif door == "experiment":
        fields = ArmFields.parse("recommend", {"scoring": body["scoring"]})
        request = {name: value for name, value in body.items() if name != "scoring"}
        answer = service.recommend(fields.apply(RecommendRequest(**{**request, "exclude": KEEP})))
    elif door == "/v1":
        answer = client.post("/v1/recommend", json=body).json()
        items = answer["items"]
        return [i["item_id"] for i in items], [i["score"] for i in items], answer["scoring"]
    elif door == "/v2":
        inputs = [
            {"name": "history", "shape": [1, len(body["history"])], "datatype": "BYTES"},
            {"name": "k", "shape": [1], "datatype": "INT64", "data": [body["k"]]},
        ]
        inputs[0]["data"] = body["history"]
        given = {"scoring": scoring, "exclude_seen": False, "beam_width": body["beam_width"]}
        request = {"inputs": inputs, "parameters": given}
        answer = client.post("/v2/models/recommend/infer", json=request).json()
        found = {one["name"]: one["data"] for one in answer["outputs"]}
        return found["item_id"], found["score"], json.loads(found["scoring"][0])
    elif door == "command":
        command = ["recommend", "--bundle", str(root / "bundle"), "-k", str(body["k"])]
        command += ["--history", ",".join(body["history"]), "--beam-width", "200", "--seen"]
        command += ["--scoring", scoring, "--store", f"lmdb:{root}/command", "--json"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        answer = json.loads(done.stdout)
        items = answer["items"]
        return [i["item_id"] for i in items], [i["score"] for i in items], answer["scoring"]
    else:
        default = scoring if door == "batch default" else None
        defaults = Defaults(
            body["k"], beam_width=body["beam_width"], exclude_seen=False, scoring=default
        )
        recipe = SlateRecipe(str(root / "bundle"), defaults, f"lmdb:{root}/batch")
        with recipe.open() as task:
            task.begin_part()
            users = {"user_id": ["a"], "history": [body["history"]]}
            users |= {} if default else {"scoring": [scoring]}
            found = task(pa.table(users), 0).answers.to_pydict()
        return found["item_id"], found["score"], json.loads(found["scoring"][0])
    ids, scores = zip(*((item.item_id, item.score) for item in answer.items), strict=True)
    used = answer.scoring
    names = ("rule", "temperature", "end_tokens", "length_penalty")
    return list(ids), list(scores), {name: getattr(used, name) for name in names}


@pytest.mark.parametrize("name", OWN)
def test_a_drawn_scoring_is_an_exhaustive_search_by_it_at_every_door(name, tmp_path):
    own = name == "openonerec"
    family, before = ("qwen3", "<s_") if own else ("llama", "<")
    data = foreign(tmp_path, family, seed=31, before=before)
    import_checkpoint(options(data, tmp_path, name, shared_ids="first"), quiet)
    model, draw = data.model, np.random.default_rng(len(name))
    with opened(tmp_path, tmp_path / "bundle") as service, live(service) as client:
        for door in (*DOORS, *["python"] * 8):
            given, whole = drawn_scoring(draw, name)
            history = [str(row) for row in draw.integers(0, len(data.ids), 3)]
            body = {"history": history, "k": 12, "beam_width": 200, "scoring": given}
            body["exclude"] = {"seen": False}
            ids, scores, used = answer_of(door, service, client, tmp_path, body)
            assert used == whole, door
            wanted = expected(
                data, name, whole["rule"], history, model,
                whole["temperature"], whole["length_penalty"], whole["end_tokens"],
            )  # fmt: skip
            best = sorted(set(wanted.values()), reverse=True)[:12]
            np.testing.assert_allclose(scores, best, rtol=1e-5, atol=1e-5)
            own = [wanted[item] for item in ids]
            np.testing.assert_allclose(scores, own, rtol=1e-5, atol=1e-5)


def test_the_slate_log_has_the_scoring_of_each_answer(tmp_path):
    data, draw = foreign(tmp_path, seed=35), np.random.default_rng(4)
    import_checkpoint(options(data, tmp_path, "minionerec"), quiet)
    config = ServerConfig.load(
        {"bundle": tmp_path / "bundle", "store": f"lmdb:{tmp_path}/store", "device": "cpu"}
        | {"journal": tmp_path / "items", "slate_log": tmp_path / "slates", "port": 0}
    )
    wanted = {}
    with run_server(config, ServiceLoader(config).first()) as client:
        for number in range(6):
            body = {"history": ["3"], "k": 2, "request_id": str(number)}
            scored = [
                {"scoring": drawn_scoring(draw, "minionerec")[0]},
                {},
                {"strategy": "popular"},
            ]
            answer = client.post("/v1/recommend", json=body | scored[number % 3])
            wanted[str(number)] = answer.json().get("scoring")
    assert any(wanted.values()) and not all(wanted.values())
    for row in shown_items(tmp_path / "slates").to_pylist():
        found = row["scoring"]
        assert (None if found is None else json.loads(found)) == wanted[row["request_id"]]


def test_evaluation_uses_the_named_scoring(tmp_path):
    data = foreign(tmp_path, seed=33)
    import_checkpoint(options(data, tmp_path, "minionerec"), quiet)
    bundle = Bundle.open(tmp_path / "bundle")
    plain = evaluate_bundle(bundle, EvaluationOptions(k=(5,)))
    other = evaluate_bundle(bundle, EvaluationOptions(k=(5,), scoring={"rule": "level"}))
    assert plain.to_dict()["scoring"]["rule"] == "vocabulary"
    assert other.to_dict()["scoring"]["rule"] == "level"
    with opened(tmp_path, bundle) as service:
        cases, names = leave_one_out_cases(bundle.events(), "test"), bundle.catalog().items.ids
        for evaluated, scoring in ((plain, None), (other, {"rule": "level"})):
            for user in range(len(cases)):
                history = [names[row] for row in cases.history(user)[-8:]]
                body = {"history": history, "k": 5, "exclude": {"seen": False}}
                items = service.recommend({**body, "scoring": scoring}).items
                rows = [names.index(item.item_id) for item in items]
                assert evaluated.slates["kept"][user].tolist() == rows


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"scoring": {"rule": "tokens"}}, "scoring.rule"),
        ({"scoring": {"temperature": 0}}, "scoring.temperature"),
        ({"scoring": {"temperature": 101}}, "scoring.temperature"),
        ({"scoring": {"length_penalty": -1}}, "scoring.length_penalty"),
        ({"scoring": {"end_tokens": True}}, "scoring.end_tokens.*generates nothing after"),
        ({"scoring": {"rule": "children", "end_tokens": True}}, "does not score them"),
        ({"scoring": {"rule": "level"}, "strategy": "popular"}, "only strategy 'beam'"),
        ({"scoring": {"rule": "vocabulary"}}, "--only-rule"),
        ({"scoring": {"rules": "level"}}, "rules"),
    ],
)
def test_a_scoring_that_cannot_be_is_refused(body, words, tmp_path):
    data = foreign(tmp_path, seed=35)
    only = "--only-rule" in words
    import_checkpoint(options(data, tmp_path, "generic", only_rule=only), quiet)
    with opened(tmp_path, tmp_path / "bundle") as service:
        if words == "scoring.end_tokens.*generates nothing after":
            body = {"scoring": {"rule": "vocabulary", "end_tokens": True}}
        with pytest.raises(InvalidRequest, match=words):
            service.recommend({"history": ["1"], **body})
        assert service.recommend({"history": ["1"], "k": 3}).scoring.rule == "children"


def test_an_arm_of_a_live_experiment_names_a_scoring(tmp_path):
    data = foreign(tmp_path, seed=37)
    import_checkpoint(options(data, tmp_path, "minionerec"), quiet)
    other = {"scoring": {"rule": "level", "temperature": 2.0}}
    arms = [{"name": "own"}, {"name": "other", "fields": other}]
    experiment = {"name": "rules", "use": "recommend", "arms": arms}
    with (
        opened(tmp_path, tmp_path / "bundle") as service,
        live(service, experiments=[experiment]) as client,
    ):
        met = set()
        for user in range(20):
            body = {"history": ["1", "2"], "k": 3, "user": {"id": f"u{user}"}}
            answer = client.post("/v1/recommend", json=body).json()
            arm = answer["experiment"]["arm"]
            met.add(arm)
            rule, temperature = ("level", 2.0) if arm == "other" else ("vocabulary", 1.0)
            assert answer["scoring"]["rule"] == rule
            assert answer["scoring"]["temperature"] == temperature
            asked = {**body, "scoring": {"rule": "level"}}  # sets the field of the experiment
            assert client.post("/v1/recommend", json=asked).json()["experiment"]["arm"] is None
        assert met == {"own", "other"}

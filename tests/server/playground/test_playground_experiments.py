"""The tab Experiments on a server that runs experiments: running, stopped and fallen back."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import pytest

from recserve.service import Service
from recserve.service.recommend import RecommendService
from tests.support.grids import covering
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

pytestmark = pytest.mark.slow  # a browser walks through the page

ADMIN = "an-admin-key-of-24-chars"
BEARER = {"Authorization": f"Bearer {ADMIN}"}
SCORERS = [{"name": "ranker"}, {"name": "likelihood", "fields": {"scorer": "likelihood"}}]
# The windows are long, so that the answers stay in them on a slow machine.
GUARD = {"window_s": 3600, "min_requests": 10, "p99_factor": 1000}
BUSY = {
    "name": "busy",
    "use": "rank",
    "mode": "paired",
    "arms": SCORERS,
    "coverage": 0.9,
    "guard": GUARD,
}
QUIET = {"name": "quiet", "use": "rank", "arms": SCORERS, "seed": "7", "guard": GUARD}
FAULTY = {
    "name": "faulty",
    "use": "recommend",
    "guard": GUARD,
    "arms": [
        {"name": "beam", "weight": 0.4, "fields": {"strategy": "beam"}},
        {"name": "nezha", "weight": 0.6, "fields": {"strategy": "nezha"}},
    ],
}
# An interval of p99 has an upper end from about 570 answers on.
NUM_RANKINGS = 720
MIN_BUSY = 600
FITS = "document.documentElement.scrollWidth <= innerWidth"
CARDS = "document.querySelectorAll('.experiment').length === 3"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    store = f"lmdb:{tmp_path_factory.mktemp('store')}"
    settings = [BUSY, QUIET, FAULTY]
    service = Service.open(shared_bundle(), store, "cpu")
    with live(service, experiments=settings, admin_keys=ADMIN) as running:
        yield running


def listed(client):
    """The state of each experiment by name."""
    found = client.get("/v1/experiments").json()["experiments"]
    return {one["name"]: one for one in found}


def ranked(client, items, user):
    """Ranks items for a user and returns the experiment of the answer."""
    body = {"user": {"id": user}, "candidates": [{"item_id": item} for item in items]}
    answer = client.post("/v1/rank", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["experiment"]


@pytest.fixture(scope="module")
def traffic(client):
    """Sends requests to all experiments, lets one fail and stops one."""
    samples = client.get("/playground/samples").json()
    items = samples["items"][:2]
    with ThreadPoolExecutor(4) as pool:
        names = (f"someone-{number}" for number in range(NUM_RANKINGS))
        drawn = list(pool.map(lambda name: ranked(client, items, name)["name"], names))
    assert drawn.count("busy") > MIN_BUSY and drawn.count("quiet") > 40
    client.post("/admin/experiments/quiet:stop", headers=BEARER)
    real = RecommendService.begin

    def begin(self, body, request_id, deadline_s):
        if body.strategy == "nezha":
            raise RuntimeError("injected")
        return real(self, body, request_id, deadline_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecommendService, "begin", begin)
        users = cycle(samples["users"])
        end = time.monotonic() + 60
        while listed(client)["faulty"]["status"] == "running" and time.monotonic() < end:
            client.post("/v1/recommend", json={"user": {"id": next(users)}, "k": 3})


@pytest.fixture
def page(tab, client, traffic):
    """The tab of the real server; fails if the page had a problem."""
    tab.size(1400, 900)
    tab.open(f"{client.base_url}/#experiments")
    tab.until(CARDS)
    yield tab
    tab.check()


def cells(page):
    """The texts of all rows by experiment."""
    script = """Object.fromEntries([...document.querySelectorAll('.experiment')].map((card) => [
        card.querySelector('h2').firstChild.textContent,
        [...card.querySelectorAll('.arms tbody tr')].map((row) =>
            [...row.cells].map((cell) => cell.textContent))]))"""
    return page.run(script)


def badges(page):
    script = """[...document.querySelectorAll('.experiment')].map((card) =>
        [...card.querySelectorAll('h2 .badge')].map((one) => one.textContent))"""
    return page.run(script)


def ms(value):
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} ms"


def settled(page, client):
    """The server's state, and the cells of a page that has read the same state."""
    answers = "performance.getEntriesByType('resource').map((one) => one.name)"
    seen = f"{answers}.filter((url) => url.endsWith('/v1/experiments')).length"
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found, before = listed(client), page.run(seen)
        page.click("#experiments-again")
        page.until(f"{seen} > {before}")
        rows = cells(page)
        if listed(client) == found:
            return found, rows
    raise AssertionError("the state of the server kept changing")


@pytest.mark.slow
def test_the_arms_of_the_server_stand_in_the_table(page, client):
    found, rows = settled(page, client)
    for name, one in found.items():
        assert len(rows[name]) == len(one["arms"]) == 2
        for row, arm in zip(rows[name], one["arms"], strict=True):
            assert row[0] == arm["name"]
            users = "–" if arm["users"] is None else str(arm["users"])
            assert row[2] == users and (users == "–") == (one["mode"] != "split")
            assert [float(text) for text in (row[1], *row[3:6])] == [
                *(arm["weight"], arm["requests"], arm["errors"], arm["empty"])
            ]
            known = [arm["p50_ms"], arm["p99_ms"]]
            assert row[6:8] == ["–" if value is None else ms(value) for value in known]


def test_intervals_have_two_ends_one_end_or_none(page, client):
    found, rows = settled(page, client)
    for row, arm in zip(rows["busy"], found["busy"]["arms"], strict=True):
        assert row[8] == f"{ms(arm['p99_low_ms'])} to {ms(arm['p99_high_ms'])}"
    for row, arm in zip(rows["quiet"], found["quiet"]["arms"], strict=True):
        assert arm["p99_high_ms"] is None
        assert row[8] == f"{ms(arm['p99_low_ms'])} or more"
    failing = found["faulty"]["arms"][1]
    assert failing["errors"] == failing["requests"] > 0 and failing["p99_ms"] is None
    assert rows["faulty"][1][6:] == ["–", "–", "–"]
    charts = [
        [
            len(
                page.run(
                    f"[...document.querySelectorAll('.experiment')[{n}].querySelectorAll({kind!r})]"
                )
            )
            for kind in (".point", ".whisker")
        ]
        for n in range(3)
    ]
    assert charts == [[2, 6], [2, 4], [1, 2]]
    assert page.run("document.querySelector('.chart .none').textContent") == "no recent answers"


def test_each_state_has_its_badge_and_its_reason(page, client):
    busy, quiet, faulty = badges(page)
    assert busy[:3] == ["running", "paired", "90 % of the traffic"]
    assert quiet[:3] == ["stopped", "split", "100 % of the traffic"]
    assert faulty[:2] == ["fallen back", "split"]
    assert quiet[3] == "users split as planned"
    assert busy[3].startswith("since 20") and quiet[4].startswith("since 20")
    notes = page.run("[...document.querySelectorAll('.experiment .notes')].map((n) => n.innerText)")
    found = listed(client)
    assert notes == [found["quiet"]["reason"], found["faulty"]["reason"]]
    assert "error share 1.0000" in notes[1]


def test_the_tab_follows_the_server(page, client):
    first = "document.querySelectorAll('.experiment h2 .badge:first-child')"
    states = f"[...{first}].map((badge) => badge.innerText)"
    client.post("/admin/experiments/faulty:start", headers=BEARER)  # with an empty window
    page.until(f"{states}.join() === 'running,stopped,running'")  # it reads again by itself
    assert "No arm has recent answers." in page.run("document.querySelector('main').innerText")
    client.post("/admin/experiments/busy:stop", headers=BEARER)
    page.click("#experiments-again")
    page.until(f"{states}.join() === 'stopped,stopped,running'")
    assert page.run("document.getElementById('error').hidden")


@pytest.mark.parametrize("width, dark", covering((400, 1400), {"light": False, "dark": True}))
def test_the_tab_fits_the_screen(page, width, dark):
    page.size(width, 900, dark)
    assert page.run(FITS)
    tables = "[...document.querySelectorAll('.experiment .scroll')]"
    whole = page.run(f"{tables}.every((table) => table.scrollWidth <= table.clientWidth)")
    assert whole or width == 400  # a small screen scrolls within the table

"""The playground of a bundle in a real browser: the main use of each tab."""

from urllib.parse import quote

import pytest

from recserve.features.history.type_names import EVENT_TYPES
from recserve.service import Service, ServiceOptions
from tests.support.experiment_answers import experiments
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

pytestmark = pytest.mark.slow  # a browser walks through the page

TABS = {
    "recommend": "document.querySelectorAll('ol.slate li').length === 10",
    "rank": "document.querySelectorAll('#rank-results tbody tr').length === 20",
    "browse": "document.querySelectorAll('#user-found button').length === 30",
    "experiments": "document.querySelectorAll('.experiment .point').length === 3",
    "health": "document.querySelector('#routes tr') && document.querySelector('#charts path')",
}
HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'
FITS = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("items")
    options = ServiceOptions(journal=folder / "journal")
    with live(Service.open(shared_bundle(), f"lmdb:{folder}/store", "cpu", options)) as running:
        yield running


@pytest.fixture(scope="module")
def users(client):
    return client.get("/v1/users", params={"limit": 40}).json()["users"]


@pytest.fixture
def page(tab, client):
    """The browser with the experiments of a fixture; fails if the page had a problem."""
    tab.intercept("*/v1/experiments*", lambda url: (200, experiments()))
    tab.size(1400, 900)
    tab.home, tab.expected = str(client.base_url), ()
    yield tab
    tab.check()


def no_error(page):
    assert page.run("document.getElementById('error').hidden")


def test_recommend(page, users):
    page.open(page.home)
    page.until(TABS["recommend"])
    assert page.run("document.getElementById('user').value") == users[0]
    text = page.run("document.getElementById('recommend').innerText")
    assert "oldest to newest" in text and "round" in text
    assert page.run("document.querySelectorAll('.stages i').length") >= 3
    page.click("#dice")
    page.until(f"document.getElementById('user').value !== {users[0]!r}")
    page.until("location.hash.includes('user=')")
    strategies = page.run("[...document.getElementById('strategy').options].map((o) => o.value)")
    models = page.run("fetch('/v1/models').then((a) => a.json())")["data"]
    assert strategies == ["auto", *models[0]["recserve"]["strategies"], "similar"]
    page.type("#user", users[3])
    page.press("Enter")
    page.until(f"location.hash === '#recommend?user={users[3]}'")
    page.click("#recommend-go")
    page.until(TABS["recommend"])
    page.until("/%/.test(document.querySelector('ol.slate .score span').textContent)")
    title = page.run("document.querySelector('ol.slate .score span').title")
    assert "log_prob" in title and "dense" in title
    no_error(page)


def test_the_page_writes_no_events(page, users):
    """Trying the page must not change what is learnt from; an event needs a type of the bundle."""
    posted = "performance.getEntriesByType('resource').filter((r) => r.name.endsWith('/v1/events'))"
    page.open(f"{page.home}#recommend?user={users[4]}")
    page.until(TABS["recommend"])
    assert page.run(f"{posted}.length") == 0
    page.open(f"{page.home}#browse?user={users[4]}")
    page.until("document.querySelector('#browse-detail .found .under')")
    types = page.run(
        "[...document.querySelectorAll('#browse-detail .found .under')].map((t) => t.textContent)"
    )
    assert set(types) <= set(EVENT_TYPES)


def test_rank(page, users):
    page.open(f"{page.home}#recommend?user={users[2]}")
    page.until(TABS["recommend"])
    page.click("#tab-rank")
    page.until(TABS["rank"])
    heads = page.run("[...document.querySelectorAll('#rank-results th')].map((h) => h.textContent)")
    assert heads[:2] == ["#", "Item"] and len(heads) >= 3
    page.click("#take-slate")
    page.until("document.querySelectorAll('#rank-results tbody tr').length === 10")
    page.click("#take-none")
    assert page.run("document.getElementById('candidates').value") == ""
    page.click("#rank-go")
    page.until("document.querySelector('#rank-results .empty')")
    word = page.run("fetch('/v1/items?limit=1').then((a) => a.json())")["items"][0]["title"]
    page.type("#candidate-search", word.split()[0])
    page.until("document.querySelector('#candidate-found button')")
    page.click("#candidate-found button")
    assert page.run("document.getElementById('candidate-count').textContent") == "1"
    page.run("document.getElementById('candidates').value += '\\nunknown-item'")
    page.click("#rank-go")
    page.until("document.querySelector('#rank-results p.notes')")
    assert "unknown-item" in page.run("document.querySelector('#rank-results p.notes').textContent")
    page.click("#take-popular")
    page.until(TABS["rank"])
    page.click("#rank-request-open")
    assert "/v1/rank" in page.run("document.querySelector('#rank-request pre').innerText")
    no_error(page)


def test_browse(page, users):
    page.open(f"{page.home}#browse")
    page.until(TABS["browse"])
    page.click("#user-more")
    page.until("document.querySelectorAll('#user-found button').length === 40")
    assert page.run("document.getElementById('user-more').hidden")
    page.click("#item-more")
    page.until("document.querySelectorAll('#item-found button').length === 60")
    page.click("#item-found button")
    page.until("document.querySelector('#browse-detail dl')")
    detail = page.run("document.getElementById('browse-detail').innerText")
    assert "semantic id" in detail and "popularity" in detail
    page.click("#rank-this")
    page.until("document.getElementById('rank-results').querySelector('tbody tr')")
    page.back()
    page.until("!document.getElementById('browse').hidden")
    page.type("#user-query", users[7])
    page.until("document.querySelectorAll('#user-found button').length === 1")
    page.click("#user-found button")
    page.until("document.querySelector('#browse-detail .found button')")
    page.click("#recommend-this")
    page.until(f"document.getElementById('user').value === {users[7]!r}")
    page.until(TABS["recommend"])
    page.open(f"{page.home}#browse?items=zzzzzz&users=zzz")
    page.until("document.querySelectorAll('#browse .found .empty').length === 2")


def test_experiments(page):
    page.expected = ("404", "503")
    page.open(f"{page.home}#experiments")
    page.until(TABS["experiments"])
    text = page.run("document.getElementById('experiments').innerText")
    for words in ("nezha-or-beam", "running", "fallen back", "50 % of the traffic", "above the"):
        assert words in text
    assert "8.90 ms to 10.1 ms" in text and "641, 559 users, p = 0.00042" in text
    assert "keep control clicks fell by 51 % (31 % to 72 %)" in " ".join(text.split())
    goals = "[...document.querySelectorAll('.goals tbody tr')].map((row) => row.innerText)"
    control, treated = ([" ".join(row.split())] for row in page.run(goals))
    assert control == ["click control – – 0.177 212 1200"]
    assert treated == ["nezha-or-beam −51.0 % −72.0 % to −31.0 % 0.0858 103 1200"]
    page.answer = lambda url: (200, {"experiments": []})
    page.click("#experiments-again")
    page.until("document.querySelector('#experiments .empty')")
    page.answer = lambda url: (404, {"error": {"message": "no such route", "code": "x"}})
    page.click("#experiments-again")
    page.until("document.querySelector('#experiments .empty')")
    no_error(page)
    page.answer = lambda url: (503, {"error": {"message": "the server is loading", "code": "x"}})
    page.click("#experiments-again")
    page.until("document.getElementById('error').textContent === 'the server is loading'")


def test_health(page, client, users):
    page.expected = ("favicon.ico",)  # the browser asks for it beside a page that is no HTML
    page.open(f"{page.home}#health")
    page.until(TABS["health"])
    client.post("/v1/recommend", json={"user": {"id": users[0]}})
    page.until("document.querySelector('#charts .line-1')")
    page.until("document.getElementById('routes').innerText.includes('/v1/recommend')")
    text = page.run("document.getElementById('health').innerText")
    for words in ("Queue", "Prefix cache", "Cache memory", "p50", "p99", "attention", "10 min ago"):
        assert words in text
    assert "[object" not in text
    for link, words in (("metrics", "recserve_"), ("openapi", '"openapi"'), ("version", "version")):
        page.click(f"#link-{link}")
        page.until(f"location.hash === '' && document.body.innerText.includes({words!r})")
        page.back()
        page.until(TABS["health"])


@pytest.fixture
def hostile(client):
    """The id of an item with markup as title and category, which a user with such an id saw."""
    item = client.get("/v1/items", params={"limit": 1}).json()["items"][0]
    change = {"item_id": item["item_id"], "title": HOSTILE, "categories": [HOSTILE]}
    assert client.put("/v1/items", json={"items": [change]}).json()["updated"] == 1
    event = {"user_id": HOSTILE, "item_id": item["item_id"]}
    assert client.post("/v1/events", json={"events": [event]}).json()["accepted"] == 1
    yield item["item_id"]
    client.delete(f"/v1/users/{quote(HOSTILE, safe='')}")
    change = {name: item[name] for name in ("item_id", "title", "categories")}
    client.put("/v1/items", json={"items": [change]})


def test_hostile_titles_and_ids_never_become_markup(page, hostile):
    page.answer = lambda url: (200, experiments(HOSTILE))
    address, user = quote(hostile), quote(HOSTILE)
    for path, condition in (
        (
            f"#recommend?user={user}&seen=false&compare=beam",
            "document.querySelector('#history .name')",
        ),
        (f"#rank?candidates={address}%0A{user}&user={user}", "document.querySelector('p.notes')"),
        (f"#browse?item={address}", "document.querySelector('#browse-detail dl')"),
        (f"#browse?user={user}", "document.querySelector('#browse-detail .found')"),
        ("#experiments", TABS["experiments"]),
        ("#health", TABS["health"]),
    ):
        page.open(f"{page.home}{path}")
        page.until(condition)
        if "health" not in path:
            page.until(f"document.querySelector('main').textContent.includes({HOSTILE!r})")
        assert page.run("document.querySelectorAll('main img, main script').length") == 0
        assert page.run("window.broken") is None
        assert page.run(FITS), path

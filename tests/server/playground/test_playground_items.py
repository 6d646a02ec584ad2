"""The playground of a bundle in a real browser: every tab, every button, every link."""

import re
from urllib.parse import quote

import pytest

from recserve.features.history.type_names import EVENT_TYPES
from recserve.service import Service, ServiceOptions
from tests.support.experiment_answers import experiments
from tests.support.grids import covering
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


def shown(page):
    return page.run("document.querySelector('[role=tabpanel]:not([hidden])').id")


def no_error(page):
    assert page.run("document.getElementById('error').hidden")


@pytest.mark.parametrize("width, dark", covering((400, 1400), {"light": False, "dark": True}))
def test_every_tab_fits_the_screen_in_light_and_dark(page, width, dark):
    page.size(width, 800, dark)
    page.open(f"{page.home}#recommend?compare=nezha")
    page.until("document.querySelectorAll('ol.slate li').length === 20")
    assert page.run(FITS)
    for name, condition in TABS.items():
        page.open(f"{page.home}#{name}")
        page.until(condition)
        assert page.run(FITS), name
        assert shown(page) == name
        no_error(page)
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(15, 18, 22)") == dark


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
    assert strategies == ["auto", *models[0]["recserve"]["strategies"]]
    page.type("#user", users[3])
    page.press("Enter")
    page.until(f"location.hash === '#recommend?user={users[3]}'")
    page.click("#recommend-go")
    page.until(TABS["recommend"])
    no_error(page)


def test_the_tree_is_coloured_and_follows_the_arrow_keys(page, users):
    page.open(f"{page.home}#recommend?user={users[5]}&strategy=speculative&k=9")
    page.until("document.querySelectorAll('.tree .node-verified').length")
    legend = page.run("document.querySelector('#tree .legend').innerText")
    assert "drafted, verified, in the slate" in legend and "drafted, not in the slate" in legend
    assert page.run("document.querySelectorAll('.tree .leaf').length") == 9
    page.run("document.querySelector('.tree').focus()")
    levels = []
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp"):
        page.press(key)
        levels.append(page.run("document.querySelector('#tree .detail').textContent"))
    assert [re.match(r"level (\d), code \d+: ", line)[1] for line in levels] == list("0110")
    assert "leads to #1" in levels[0] and "log-probability" in levels[0]
    page.click(".tree .node-draft")
    assert "drafted, not in the slate" in page.run(
        "document.querySelector('#tree .detail').textContent"
    )
    page.open(f"{page.home}#recommend?user={users[6]}&strategy=beam")
    page.until("document.querySelectorAll('.tree .node-search').length")


def test_two_strategies_side_by_side(page, users):
    page.open(f"{page.home}#recommend?user={users[4]}&strategy=beam&compare=nezha&k=7")
    page.until("document.querySelectorAll('ol.slate li').length === 14")
    marks = page.run("[...document.querySelectorAll('.slate .badge')].map((b) => b.textContent)")
    verdict = page.run("document.querySelector('.verdict').textContent")
    shared = 14 - marks.count("only here")
    assert verdict.startswith(f"{shared // 2} of 7 items are in both slates")
    names = r"(beam|nezha) took ([\d.]+) ms, (beam|nezha) ([\d.]+) ms for prefill, draft and verify"
    fast, fast_ms, slow, slow_ms = re.search(names, verdict).groups()
    assert {fast, slow} == {"beam", "nezha"} and float(fast_ms) <= float(slow_ms)
    assert verdict.endswith("Both found the history in the cache.")
    cards = page.run("[...document.querySelectorAll('#slates .card')].map((c) => c.innerText)")
    for card, strategy in zip(cards, ("beam", "nezha"), strict=True):
        assert " for the explanation that this page asks for" in card
        spent = {name: float(ms) for name, ms in re.findall(r"(\w+)\s+([\d.]+) ms", card)}
        compared = float(fast_ms if strategy == fast else slow_ms)
        assert spent["Slate"] == compared
        stages = spent["prefill"] + spent["draft"] + spent["verify"]
        assert compared == pytest.approx(stages, abs=0.1)
    page.run("document.getElementById('tree-choice').value = '1'")
    page.run("document.getElementById('tree-choice').dispatchEvent(new Event('change'))")
    page.until("document.querySelectorAll('.tree .node-unscored').length > 7")
    page.click("#recommend-request-open")
    commands = page.run("[...document.querySelectorAll('#recommend pre')].map((p) => p.innerText)")
    assert len(commands) == 2 and commands[0].startswith("curl -s 'http://127.0.0.1:")
    assert '"strategy":"nezha"' in commands[1]
    page.click("#recommend-request .curl button")
    page.until(
        "document.querySelector('#recommend-request .curl button').textContent !== 'Copy as curl'"
    )
    selected = page.run("getSelection().toString()")
    assert selected == commands[0]


def test_titles_come_with_the_answer_or_several_at_once(page, client, users):
    """A request of the page shows titles, and no item is read alone."""
    calls = "performance.getEntriesByType('resource').map((r) => decodeURIComponent(r.name))"
    titles = (
        "[...document.querySelectorAll('.slate .title, .named .title')].map((t) => t.innerText)"
    )
    page.open("about:blank")
    page.open(f"{page.home}#recommend?user={users[8]}&compare=nezha")
    page.until("document.querySelectorAll('ol.slate li').length === 20")
    ids = page.run("[...document.querySelectorAll('.slate .under code')].map((t) => t.innerText)")
    named = {one: client.get(f"/v1/items/{one}").json()["title"] for one in ids}
    assert page.run(titles) == [named[one] for one in ids]
    read = [name.partition("/v1/items")[2] for name in page.run(calls) if "/v1/items" in name]
    assert read and all(name.startswith(("?limit=", "?ids=")) for name in read), read
    events = client.get(f"/v1/users/{users[8]}/history").json()["events"]
    wanted = list(dict.fromkeys(event["item_id"] for event in events))
    asked = [name[5:].split(",") for name in read if name.startswith("?ids=")]
    assert [one for part in asked for one in part] == [i for i in wanted if i in sum(asked, [])]
    page.open("about:blank")
    page.open(f"{page.home}#rank?user={users[8]}&candidates={ids[0]}%0A{ids[1]}")
    page.until("document.querySelectorAll('#rank-results tbody tr').length === 2")
    assert set(page.run(titles)) == {named[ids[0]], named[ids[1]]}
    assert not [name for name in page.run(calls) if "?ids=" in name]


def test_filters_exclusions_and_their_errors(page, users):
    page.expected = ("422",)
    page.open(f"{page.home}#recommend?user={users[4]}")
    page.until(TABS["recommend"])
    first = page.run("document.querySelector('.slate code').textContent")
    category = page.run("document.querySelector('#category-list option').value")
    page.click("#more-options")
    page.type("#exclude", first)
    page.type("#category", category)
    page.press("Enter")
    page.until("location.hash.includes('category=') && document.querySelector('.slate li')")
    page.until(f"document.querySelector('.slate code').textContent !== {first!r}")
    page.type("#filter", "{nonsense")
    page.click("#recommend-go")
    page.until("document.getElementById('error').textContent === 'The filter is not JSON.'")
    page.type("#filter", '{"equals": ["category", "x"]}')
    page.click("#recommend-go")
    page.until("document.getElementById('error').textContent.startsWith('filter')")
    page.type("#filter", '{"in": ["category", ["no such category"]]}')
    page.click("#recommend-go")
    page.until("document.querySelector('#slates .empty')")
    # In one line, and not one word a line in the column of the ranks.
    lines = "document.querySelector('#slates .empty').getClientRects()[0].height"
    assert page.run(lines) < 70
    assert page.run("document.querySelector('#slates .empty').offsetWidth") > 300


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


def test_a_cold_user_gets_a_note(page):
    page.open(f"{page.home}#recommend?user=nobody")
    page.until("document.querySelector('#slates .notes')")
    assert "popular items" in page.run("document.querySelector('#slates .notes').textContent")
    assert "No events yet" in page.run("document.getElementById('history').textContent")


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


def test_health_shows_the_past_of_the_server_at_once(page, client, users):
    """The page is opened only after requests and errors; nothing happens afterwards."""
    page.open("about:blank")
    recent = client.app.state.recent
    for number in range(3):
        client.post("/v1/recommend", json={"user": {"id": users[number]}})
        client.post("/v1/recommend", json={"user": {"id": users[number]}, "k": 0})
        client.get("/v1/items/nothing-of-this-name")
        recent.take()
    page.open(f"{page.home}#health")
    page.until("document.querySelector('#charts path')")
    lines = page.run("[...document.querySelectorAll('#charts path')].map((one) => one.outerHTML)")
    assert len(lines) >= 6 and all("L" in line for line in lines[:4])
    rows = page.run("[...document.querySelectorAll('#errors tr')].map((one) => one.innerText)")
    counts = {row.split("\t")[0]: int(row.split("\t")[1]) for row in rows}
    assert counts["out_of_range"] >= 3 and counts["unknown_item"] >= 3
    no_error(page)


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


def test_tabs_move_with_the_arrow_keys_and_the_address_restores_them(page):
    page.open(page.home)
    page.until(TABS["recommend"])
    page.click("#tab-recommend")
    for key, name in (
        ("ArrowRight", "rank"),
        ("ArrowRight", "browse"),  # there is no language model, so the tab Text is not shown
        ("End", "health"),
        ("ArrowRight", "recommend"),
        ("ArrowLeft", "health"),
        ("Home", "recommend"),
    ):
        page.press(key)
        page.until(f"document.activeElement.id === 'tab-{name}'")
        assert shown(page) == name
        assert page.run("document.querySelectorAll('[role=tab][tabindex=\"0\"]').length") == 1
    assert page.run("document.getElementById('tab-text').hidden")
    for name in ("browse", "experiments", "health"):
        page.click(f"#tab-{name}")
        page.until(f"location.hash === '#{name}'")
    page.back()
    page.until(f"!document.getElementById('experiments').hidden && {TABS['experiments']}")
    page.run("document.getElementById('tab-experiments').focus()")
    page.press("Tab")
    assert page.run("document.activeElement.closest('#experiments') !== null")
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_theme_and_key(page):
    page.open(page.home)
    page.until(TABS["recommend"])
    light = page.run("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    dark = page.run("getComputedStyle(document.body).backgroundColor")
    assert light != dark
    page.open(page.home)
    page.until(TABS["recommend"])
    assert page.run("getComputedStyle(document.body).backgroundColor") == dark
    page.click("#theme")
    page.run("localStorage.clear()")
    page.click("#key-button")
    page.press("Escape")
    assert page.run("document.getElementById('key-box').hidden")
    page.click("#key-button")
    page.type("#key", "a secret")
    page.click("#key-save")
    page.until(TABS["recommend"])
    stored = page.run("[sessionStorage.getItem('recserve-api-key'), JSON.stringify(localStorage)]")
    assert stored == ["a secret", "{}"]
    command = "document.querySelector('#recommend-request pre').textContent"
    page.until(f"{command}.includes('$RECSERVE_KEY')")
    assert "a secret" not in page.run(command)
    assert "secret" not in page.run("location.href + document.cookie")
    page.run("sessionStorage.clear()")


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

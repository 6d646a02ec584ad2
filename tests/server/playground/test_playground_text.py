"""The text tab of the playground in a real browser, with a language model and no bundle."""

import pytest

from tests.support.grids import covering
from tests.support.live_server import live
from tests.support.scripted_text import scripted

pytestmark = pytest.mark.slow  # a browser walks through the page

STORY = ' in a <b> land — é <img src=x onerror="window.broken=1"> they lived on.'
DONE = (
    "!document.getElementById('text-go').disabled && document.querySelector('#text-facts .badge')"
)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    with live(scripted(folder, lambda prompt, seed: STORY)) as running:
        yield running


@pytest.fixture
def page(tab, client):
    tab.intercept("*/v1/experiments*", lambda url: (200, {"experiments": []}))
    tab.home, tab.expected = str(client.base_url), ()
    client.app.state.lifecycle.service.engine.hold.clear()
    yield tab
    tab.check()


def written(page):
    return page.run("document.getElementById('written').textContent")


def test_a_text_is_written_and_accepted_tokens_are_marked(page):
    page.open(page.home)
    page.until(DONE)
    assert (
        page.run("[...document.querySelectorAll('[role=tab]')].filter((t) => t.hidden).length") == 3
    )
    assert written(page) == f"Once upon a time{STORY}"
    page.click("#tab-text")
    page.run("document.getElementById('drafter').value = 'none'")
    page.click("#text-go")
    page.until(DONE)
    assert page.run("document.querySelectorAll('#written .drafted').length") == 0
    page.run("document.getElementById('drafter').value = 'ngram'")
    page.click("#text-go")
    page.until(f"{DONE} && document.querySelectorAll('#written .drafted').length")
    # The scripted model commits 1, 3, 2, 1, 3, … tokens, of which the draft proposed 0, 2, 1.
    first = page.run(
        "[...document.querySelectorAll('#written .drafted')].slice(0, 3).map((n) => n.textContent)"
    )
    assert first == ["i", "n", "a"]
    facts = page.run("document.getElementById('text-facts').innerText")
    assert "tokens/s" in facts and "accepted" in facts
    assert page.run("document.querySelectorAll('#acceptance .bar').length") == 2
    assert page.run("document.querySelectorAll('main img').length") == 0
    assert page.run("window.broken") is None
    page.click("#text-request-open")
    assert '"include_token_sources":true' in page.run(
        "document.querySelector('#text-request pre').innerText"
    )


def test_a_stream_can_be_stopped_by_button_and_by_escape(page, client):
    engine = client.app.state.lifecycle.service.engine
    page.open(f"{page.home}#text?drafter=ngram&length=64")
    page.until(DONE)
    assert page.run("document.getElementById('length').value") == "64"
    for number, stop in enumerate((lambda: page.click("#text-stop"), lambda: page.press("Escape"))):
        engine.hold.set()
        page.click("#text-go")
        page.until("!document.getElementById('text-stop').disabled")
        page.until("document.querySelector('#written span + span span')")
        before = engine.cancelled
        stop()
        page.until("document.getElementById('text-stop').disabled")
        page.run(f"void {number}")
        assert len(written(page)) < len("Once upon a time" + STORY)
        deadline = 500
        while engine.cancelled == before and deadline:
            deadline -= 1
            page.run("new Promise((done) => setTimeout(done, 10))")
        assert engine.cancelled == before + 1
        engine.hold.clear()
    assert page.run("document.getElementById('error').hidden")
    page.click("#text-clear")
    assert written(page) == ""


def test_a_chat_grows_turn_by_turn(page):
    page.open(f"{page.home}#text?mode=chat&length=16")
    page.until("document.getElementById('text-go').textContent === 'Send'")
    page.type("#prompt", "Tell me more")
    page.press("Enter")
    page.until(DONE)
    page.type("#prompt", "And then?")
    page.press("Enter")
    page.until("document.querySelectorAll('#written .turn').length === 4 && " + DONE)
    turns = page.run("[...document.querySelectorAll('#written .turn')].map((t) => t.innerText)")
    assert turns[0].splitlines() == ["you", "Tell me more"]
    assert turns[1].startswith("toy\n") and STORY[1:13] in turns[1]
    page.click("#mode-completion")
    assert page.run("document.getElementById('text-go').textContent") == "Write"
    page.click("#mode-chat")
    assert page.run("document.querySelectorAll('#written .turn').length") == 4
    page.press("Escape")


def test_an_error_shows_the_servers_message(page, client):
    page.expected = ("400", "500")
    page.open(f"{page.home}#text?nodes=5000&drafter=ngram")
    page.until("document.getElementById('error').textContent.includes('speculation.num_tokens')")
    engine = client.app.state.lifecycle.service.engine
    engine.failure = ValueError("broken on purpose")
    page.open(f"{page.home}#text?seed=1")
    page.until("document.getElementById('error').textContent === 'internal error'")
    engine.failure = None


@pytest.mark.slow
@pytest.mark.parametrize("width, dark", covering((400, 1400), {"light": False, "dark": True}))
def test_the_tab_fits_the_screen_in_light_and_dark(page, width, dark):
    page.size(width, 800, dark)
    for path in ("", "#text?mode=chat", "#health", "#experiments"):
        page.open(f"{page.home}{path}")
        page.until("!document.getElementById('main').hidden")
        page.until("document.querySelector('[role=tabpanel]:not([hidden])')")
        assert page.run("document.documentElement.scrollWidth <= innerWidth")

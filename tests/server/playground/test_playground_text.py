"""The text tab of the playground in a real browser, with a language model and no bundle."""

import json

import pytest

from tests.support.chat_templates import TEMPLATES, THINKS
from tests.support.live_server import live
from tests.support.scripted_text import scripted

pytestmark = pytest.mark.slow  # a browser walks through the page

STORY = ' in a <b> land — é <img src=x onerror="window.broken=1"> they lived on.'
DONE = (
    "!document.getElementById('text-go').disabled && document.querySelector('#text-facts .badge')"
)


TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'


def script(prompt, seed):
    if "Is it late" not in prompt:
        return STORY
    if "noon" in prompt:
        return "It is noon."
    return f"<think>\nI should look. <b>\n</think>\n\n{CALL}"


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


def test_a_chat_shows_thoughts_and_calls_and_takes_results(tab, tmp_path):
    tab.intercept("*/v1/experiments*", lambda url: (200, {"experiments": []}))
    template = TEMPLATES["hermes"] + THINKS
    with live(scripted(tmp_path, script, source=template, context=4000)) as client:
        tab.home = str(client.base_url)
        tab.open(f"{tab.home}/#text")
        tab.until(DONE)
        tab.run("document.getElementById('mode-chat').click()")
        tab.run("document.querySelector('#text-form details').open = true")
        tab.run(f"document.getElementById('tools').value = {json.dumps(json.dumps(TOOLS))}")
        say(tab, "Is it late?")
        shown = "[...document.querySelectorAll('#written {}')].map((n) => n.textContent)"
        assert tab.run(shown.format(".thoughts")) == ["I should look. <b>"]
        assert tab.run(shown.format(".call")) == ['now({"zone": "UTC"})']
        assert tab.run("document.getElementById('prompt').placeholder") == "The result of now"
        say(tab, "noon")
        assert tab.run(shown.format(".who"))[2] == "result of now"
        assert tab.run(shown.format(".turn"))[-1].endswith("It is noon.")
        tab.run("document.getElementById('tools').value = '['")
        say(tab, "and now?")
        assert tab.run("document.getElementById('error').textContent").startswith("Tools: ")
        tab.check()


def say(tab, text):
    tab.run(f"document.getElementById('prompt').value = {json.dumps(text)}")
    tab.click("#text-go")
    tab.until("!document.getElementById('text-go').disabled")

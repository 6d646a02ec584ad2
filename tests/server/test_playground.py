"""The playground page: self-contained, under a policy that lets only its own code run, alive."""

import base64
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from recserve.server import playground
from recserve.service import Service
from tests.support.live_server import live
from tests.support.scripted_text import scripted
from tests.support.tiny_bundle import shared_bundle

PAGE = (Path(playground.__file__).parent / "index.html").read_text(encoding="utf-8")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


def test_the_page_loads_nothing_from_elsewhere():
    assert not re.search(r"https?://|//cdn|@import|url\(", PAGE)
    assert not re.search(r"<(?:link|iframe|img|object|embed)\b|\son\w+=|\sstyle=", PAGE)
    assert "innerHTML" not in PAGE and "eval(" not in PAGE and "document.write" not in PAGE


def test_the_policy_names_the_pages_own_script_and_style_and_nothing_else():
    policy = playground.policy(PAGE)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and rules["frame-ancestors"] == "'none'"
    for tag in ("script", "style"):
        (block,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in policy


def test_every_element_that_the_script_asks_for_is_there():
    ids = set(re.findall(r'\bid="([\w-]+)"', PAGE))
    asked = set(re.findall(r'\$\("([\w-]+)"\)', PAGE))
    assert asked and asked <= ids


def dom(client, tab, profile):
    """The page as a browser shows it after its scripts have run."""
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    flags += " --disable-background-networking --disable-component-update --disable-sync"
    flags += f" --user-data-dir={profile} --virtual-time-budget=4000 --dump-dom"
    return subprocess.run(
        [str(BROWSER), *flags.split(), f"{client.base_url}/{tab}"],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize(
    "tab, shown", [("", "root tokens cached"), ("#rank", "20 ranked"), ("#health", "/v1/recommend")]
)
def test_a_browser_shows_the_tabs(tmp_path, tab, shown):
    service = Service.open(shared_bundle(), f"lmdb:{tmp_path}/store", "cpu")
    user = service.samples(1, 1)["users"][0]
    with live(service) as client:
        client.post("/v1/recommend", json={"user": {"id": user}})
        page = dom(client, tab, tmp_path / "profile")
    assert user in page or tab
    assert shown in page
    assert re.search(r"<option>auto</option><option>beam</option>.*<option>speculative<", page)
    assert re.search(r'id="error"[^>]*hidden', page)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_shows_a_text_where_there_is_no_bundle(tmp_path):
    with live(scripted(tmp_path, lambda prompt, seed: " in a <b> land — é")) as client:
        page = dom(client, "", tmp_path / "profile")
    assert re.search(r'id="written"[^>]*> in a &lt;b&gt; land — é<', page)
    assert "tokens</span>" in page and re.search(r'data-tab="recommend"[^>]*hidden', page)
    assert re.search(r'id="error"[^>]*hidden', page)

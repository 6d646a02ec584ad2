"""The examples of docs/guides/client.md run against a server with a bundle and a language model."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import torch

from recserve.engine.engine_config import EngineConfig
from recserve.service import Service, ServiceOptions
from recserve.service.text.loader import TextSettings, load_text
from tests.support.bundle_shelf import shelf
from tests.support.live_server import live
from tests.support.paths import ROOT, reference

PAGE = ROOT / "docs" / "guides" / "client.md"
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = PYTHON.findall(PAGE.read_text(encoding="utf-8"))
ADDRESS = "http://127.0.0.1:8080"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    text = load_text(TextSettings(reference("stories260k")), torch.device("cpu"))
    bundles = shelf(folder)
    (bundles / "two").rename(bundles / "monday")
    options = ServiceOptions(
        engine=EngineConfig(kv_bytes=2**24), journal=bundles / ".items", text=text
    )
    service = Service.open(bundles / "one", f"lmdb:{folder}/history", "cpu", options)
    keys = ["an-admin-key-of-some-length"]
    with live(service, bundles_dir=bundles, admin_keys=keys, kv_bytes=2**24) as server:
        yield str(server.base_url).rstrip("/")


@pytest.mark.parametrize("number", range(6))
def test_examples_run(address, number):
    printed = io.StringIO()
    code = EXAMPLES[number].replace(ADDRESS, address)
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"{PAGE.name}:{number}", "exec"), {"__name__": "example"})
    assert printed.getvalue().strip()

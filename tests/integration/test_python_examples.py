"""The Python examples of pages that need no server of their own run as they are printed."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recserve.service import Service
from recserve.service.text.loader import TextSettings, load_text
from tests.support.bundle_shelf import shelf
from tests.support.live_server import live
from tests.support.paths import ROOT, reference
from tests.support.tiny_bundle import shared_bundle

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
USERS = [f"user{number:06d}" for number in range(8)]


def read_examples(page: str) -> list[str]:
    """Returns the Python blocks of a page. Those of Spark need a cluster."""
    blocks = PYTHON.findall((ROOT / page).read_text(encoding="utf-8"))
    return [block for block in blocks if "pyspark" not in block]


def run(code: str) -> str:
    """Runs an example in this process and returns what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "example", "exec"), {"__name__": "example"})
    return printed.getvalue()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a bundle, a folder of bundles and a file of users."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECSERVE_KERNELS", "torch")
    shutil.copytree(shared_bundle(), tmp_path / "shop.bundle")
    pq.write_table(pa.table({"user_id": USERS}), tmp_path / "users.parquet")
    return tmp_path


@pytest.mark.parametrize(
    "page", ["README.md", "docs/guides/slate-log.md", "docs/reference/python-api.md"]
)
def test_examples_run(folder, page):
    for example in read_examples(page):
        run(example)


@pytest.mark.slow  # two processes open the models
def test_the_job_of_the_guide_to_batches_runs(folder):
    (example,) = read_examples("docs/guides/batch.md")
    assert run(example).splitlines()[-1] == f"{len(USERS)} {50 * len(USERS)} 0"


def test_a_service_is_handed_over(folder):
    bundles = shelf(folder / "shelf")
    (bundles / "one").rename(bundles / "sunday")
    (bundles / "two").rename(bundles / "monday")
    (folder / "bundles").symlink_to(bundles)
    (example,) = read_examples("docs/guides/retraining.md")
    run(example)


@pytest.mark.parametrize("page", ["docs/guides/text.md", "docs/reference/http-text.md"])
def test_the_openai_client_gets_texts(page):
    pytest.importorskip("openai")
    text = load_text(TextSettings(reference("stories260k"), name="llm"), torch.device("cpu"))
    with Service.of_text(text) as service, live(service) as server:
        address = str(server.base_url).rstrip("/")
        (example,) = read_examples(page)
        assert run(example.replace("http://127.0.0.1:8080", address)).strip()

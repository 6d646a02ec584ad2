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

from tests.support.bundle_shelf import shelf
from tests.support.page_examples import page_server, read_page, serve_before
from tests.support.paths import ROOT
from tests.support.tiny_bundle import shared_bundle

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
USERS = [f"user{number:06d}" for number in range(8)]


def read_examples(page: str) -> list[str]:
    """Returns the Python blocks of a page. Those of Spark need a cluster.

    Behind the mark of generated text stand signatures.
    """
    written = (ROOT / page).read_text(encoding="utf-8").partition("<!-- generated")[0]
    blocks = PYTHON.findall(written)
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
def test_the_openai_client_gets_texts(tmp_path, monkeypatch, page):
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    parts = read_page(page)
    (index,) = (n for n, part in enumerate(parts) if getattr(part, "language", "") == "python")
    with page_server(page, serve_before(parts, index)) as server:
        address = str(server.base_url).rstrip("/")
        assert run(parts[index].text.replace("http://127.0.0.1:8080", address))

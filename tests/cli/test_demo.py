"""The demo on a small scale: made once, reused, printed, served."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from recserve.bundle.bundle import Bundle
from recserve.cli import demo
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.features.tables.parquet import SchemaError
from recserve.kernels.native import native
from tests.support.redis_server import free_port


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The demo with 500 items, 120 users and seconds instead of minutes; its cache folder."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(demo, "SYNTHETIC", SyntheticOptions(500, 120, 12))
        patch.setattr(demo, "NUM_CODES", 16)
        patch.setattr(demo, "EPOCHS", {"recommender": 1, "ranker": 1, "llm": 1})
        patch.setattr(demo, "SOURCES_BYTES", 200_000)
        patch.setattr(demo, "LANGUAGE", replace(demo.LANGUAGE, hidden_size=32, steps=5))
        patch.setattr(
            demo,
            "RECOMMENDER",
            replace(
                demo.RECOMMENDER,
                hidden_size=32,
                num_heads=2,
                validation_users=20,
                validation_width=10,
                choice_users=20,
            ),
        )
        yield cache


@pytest.mark.parametrize("recipe", [demo.RECOMMENDER, demo.RANKER, demo.LANGUAGE])
def test_the_c_kernels_attend_with_the_heads_of_each_model(recipe):
    assert recipe.hidden_size % recipe.num_heads == 0
    assert recipe.hidden_size // recipe.num_heads % native.LANES == 0


def test_once_prints_a_slate_and_a_ranking_with_times(small, capsys):
    shutil.rmtree(small / "recserve", ignore_errors=True)  # of the other tests
    assert demo.run_demo(None, 8080, once=True) == 0
    out = capsys.readouterr().out
    for words in (
        "500 items, 120 users",
        "recommender, 1 epoch",
        "ranker, 1 epoch",
        "user user000000",
        "recommend: exact ",
        "rank: ranker",
        "again, prefix cached",
        "llm, 1 epoch",
        "completion, drafted by suffix",
        demo.PROMPT,
        f"{demo.NUM_TOKENS} tokens in ",
        "first time: the same text in ",
        "asked again: the same text in ",
    ):
        assert words in out
    assert out.index("recommend: exact ") < out.index("llm, 1 epoch")
    assert out.count("item0") >= demo.SLATE_SIZE + demo.ROWS_SHOWN
    assert out.count(" ms (queue ") == 4
    (folder,) = (small / "recserve" / "demo").iterdir()
    bundle = Bundle.open(folder / "bundle")
    bundle.verify()
    assert bundle.has("recommender")
    assert bundle.has("ranker")


@pytest.mark.slow
def test_a_second_run_takes_the_finished_bundle(small, capsys, monkeypatch):
    demo.run_demo(None, 8080, once=True)
    capsys.readouterr()
    monkeypatch.setattr(demo, "make_bundle", lambda *_: pytest.fail("made again"))
    assert demo.run_demo(None, 8080, once=True) == 0
    out = capsys.readouterr().out
    assert "using the bundle of an earlier run" in out
    assert "recommend: exact " in out


def test_a_run_that_fails_leaves_nothing(small, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail(*_):
        raise ValueError("no")

    monkeypatch.setattr(demo, "make_bundle", fail)
    with pytest.raises(ValueError, match="no"):
        demo.run_demo(None, 8080, once=True)
    assert list((tmp_path / "recserve" / "demo").iterdir()) == []


def test_real_parquet_has_a_name_of_its_own(tmp_path):
    """Other events, other name; the same files elsewhere, the same name."""
    one, two, three = tmp_path / "one", tmp_path / "two", tmp_path / "three"
    write_synthetic(one, SyntheticOptions(500, 20, 8, seed=1))
    write_synthetic(two, SyntheticOptions(500, 20, 8, seed=1))
    write_synthetic(three, SyntheticOptions(500, 20, 8, seed=2))
    assert demo.fingerprint(one) == demo.fingerprint(two)
    assert len({demo.fingerprint(None), demo.fingerprint(one), demo.fingerprint(three)}) == 3


def test_a_folder_without_the_files_is_refused(tmp_path):
    pq.write_table(pq.read_table(write_synthetic(tmp_path).items), tmp_path / "items.parquet")
    (tmp_path / "events.parquet").unlink()
    with pytest.raises(SchemaError, match=r"events\.parquet: no such file"):
        demo.run_demo(tmp_path, 8080, once=True)


def test_a_taken_port_moves_to_the_next():
    with socket.socket() as taken:
        taken.bind((demo.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert demo.free_port(port) > port
        with pytest.raises(OSError, match=f"ports {port} to {port} of 127.0.0.1 are taken"):
            demo.free_port(port, tries=1)


SCRIPT = """
import sys
from pathlib import Path
from recserve.cli import demo
demo.cache_folder = lambda: Path(sys.argv[1])
demo.fingerprint = lambda data: sys.argv[2]
raise SystemExit(demo.run_demo(None, int(sys.argv[3]), once=False))
"""


@pytest.mark.slow
def test_it_serves_until_it_is_told_to_stop(small):
    """The address it prints answers with the same catalogue; SIGINT ends it with status 0."""
    folder = demo.prepare(None, demo.Console(quiet=True))
    port = free_port()
    arguments = [str(folder.parent), folder.name, str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    try:
        address = next(line.split()[3] for line in process.stdout if "playground and API" in line)
        body = json.dumps({"user": {"id": "user000000"}, "k": 3}).encode()
        request = urllib.request.Request(address + "v1/recommend", body)
        answer = json.load(urllib.request.urlopen(wait_ready(address, request), timeout=30))
        assert len(answer["items"]) == 3
        expected = Bundle.open(folder / "bundle").manifest.catalog_version
        assert answer["catalog_version"] == expected
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_ready(address, request):
    """The request, once the server is ready. Raises TimeoutError after a minute."""
    for _ in range(600):
        try:
            urllib.request.urlopen(address + "health/ready", timeout=5).close()
            return request
        except urllib.error.URLError:
            time.sleep(0.1)
    raise TimeoutError(address)

"""`serve` finds cheap mistakes before it imports torch or binds its port."""

import json
import os
import socket
import subprocess
import sys

import pytest

from recserve.config import ConfigError, ServerConfig
from recserve.drafters.names import drafter_names
from recserve.drafters.registry import drafter_classes, weightless_drafters
from tests.support.tiny_bundle import shared_bundle

RUN = """
import json, sys
from recserve.cli import main
for flags in json.load(sys.stdin):
    sys.argv = ["recserve", "serve", *flags]
    try:
        main()
    except SystemExit as end:
        print("status", end.code, file=sys.stderr)
assert "torch" not in sys.modules and "uvicorn" not in sys.modules
"""


def test_a_mistake_is_one_line(tmp_path):
    """One process makes them all, and has imported nothing heavy at its end."""
    llm, bundle = tmp_path / "llm", str(shared_bundle())
    llm.mkdir()
    (llm / "config.json").write_text("{}")
    mistakes = [
        (["--bundle", f"{tmp_path}/none"], "there is no such folder"),
        (["--bundle", str(tmp_path)], "has no manifest.json"),
        (["--llm", str(tmp_path)], "has no config.json"),
        (["--bundle", bundle, "--store", "mysql://x"], "store scheme is 'mysql'"),
        (["--bundle", bundle, "--store", "lmdb:x?ttl_s=soon"], "ttl_s is 'soon'"),
        (["--llm", str(llm), "--drafter", "ngramm"], "drafter is 'ngramm'; choose one of"),
        (["--llm", str(llm), "--drafter", "ngram+egle"], "drafter is 'egle'"),
        (["--bundle", bundle, "--device", "cuda"], "device is cuda, but"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps([[*flags, "--port", "0"] for flags, _ in mistakes]),
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * len(mistakes), done.stderr
    for (_, message), line, status in zip(mistakes, lines[::2], lines[1::2], strict=True):
        assert line.startswith("error: ") and message in line
        assert status == "status 1"


def test_the_names_of_drafters_are_known_without_importing_them():
    assert drafter_names() == set(drafter_classes())
    for name, cls in drafter_classes().items():
        assert cls.name == name
        assert cls.needs_weights == (name not in weightless_drafters())


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ServerConfig(bundle=shared_bundle(), port=port)
        with pytest.raises(ConfigError, match=f"port {port}: .* choose another --port"):
            config.check_files()
    config.check_files()


def test_missing_files_of_a_language_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    ServerConfig(llm=tmp_path, port=0, drafters=("ngram",)).check_files()
    for field, value in (
        ("chat_template", tmp_path / "no.jinja"),
        ("drafters", (f"eagle={tmp_path}/none",)),
    ):
        with pytest.raises(ConfigError, match=f"{field}.* there is no such"):
            ServerConfig(llm=tmp_path, port=0, **{field: value}).check_files()

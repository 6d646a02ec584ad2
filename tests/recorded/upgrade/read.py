"""What a reader makes of a recorded folder: every format is opened as its users open it."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import sys
import tempfile
from base64 import b64decode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pyarrow.parquet as pq
import redis

from recserve.bundle.bundle import Bundle
from recserve.cli import main
from recserve.config import ServerConfig
from recserve.features.tables.event_files import read_event_files
from recserve.kernels import backend
from recserve.service.slate_log.reader import read_log
from recserve.training.recommender.recommender import recorded_recipe
from tests.recorded.compare import stable
from tests.support.live_server import run_server
from tests.support.redis_server import servers, start_redis

LATER = ("scoring",)
STATE = ("history", "items", "slates", "events", "experiments")
STRATEGIES = ("beam", "speculative", "nezha", "rpg", "dense", "specgr", "popular")
BATCH = (
    *("recserve", "batch", "--bundle", "bundle", "--input", "batch/users.parquet"),
    *("--output", "batch/slates", "-k", "3", "--rows-per-part", "2", "--device", "cpu"),
)


class SETTINGS:
    """Settings of the servers that write and read a recorded folder."""

    SHARED = {
        "device": "cpu",
        "kv_bytes": 1 << 24,
        "signing_key": "recorded-signing-key",
        "experiments": [
            {
                "name": "shelf",
                "use": "recommend",
                "guard": None,
                "arms": [{"name": "one"}, {"name": "two", "fields": {"strategy": "beam"}}],
            }
        ],
    }

    @classmethod
    def of_files(cls, folder: Path) -> dict[str, Any]:
        """Returns the settings of a server whose state is in files."""
        return {
            **cls.SHARED,
            "bundle": str(folder / "bundle"),
            "store": f"lmdb:{folder / 'history'}",
            "journal": str(folder / "items"),
            "slate_log": str(folder / "slates"),
            "event_log": str(folder / "events"),
            "experiments_dir": str(folder / "experiments"),
        }

    @classmethod
    def of_redis(cls, folder: Path, port: int) -> dict[str, Any]:
        """Returns the settings of a server whose state is in Redis."""
        store = f"redis://127.0.0.1:{port}/0"
        return {
            **cls.SHARED,
            "bundle": str(folder / "bundle"),
            "store": store,
            "catalog_log": "redis",
        }


@contextlib.contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """Yields a copy of a recorded folder, which a server may change."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "copy"
        shutil.copytree(folder, copy)
        for path in copy.rglob("*.gz"):
            path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
            path.unlink()
        yield copy


def answers(folder: Path) -> dict[str, Any]:
    """Returns what servers, commands and readers make of the files of a recorded folder."""
    with copied(folder) as copy:
        return {
            "slates": rows(read_log(copy / "slates", "slates")),
            "outcomes": rows(read_log(copy / "slates", "outcomes")),
            "events": rows(read_event_files(copy / "events")),
            "recipe": recipe(copy),
            "batch": batch(copy),
            "server": server(SETTINGS.of_files(copy)),
            "server with redis": server_with_redis(copy),
        }


def rows(table: Any) -> list[Any]:
    """Returns the rows of a log, in order of their texts, without columns of later versions."""
    table = table.drop_columns([name for name in LATER if name in table.column_names])
    listed = [stable(json.loads(json.dumps(row, default=str)), {}) for row in table.to_pylist()]
    return sorted(listed, key=lambda row: json.dumps(row, sort_keys=True))


def recipe(folder: Path) -> dict[str, Any]:
    """Returns sizes of the recipe that `evaluate --time-split` reads from a manifest."""
    found = recorded_recipe(Bundle.open(folder / "bundle"))
    return {"hidden_size": found.hidden_size, "epochs": found.schedule.epochs}


def batch(folder: Path) -> list[Any]:
    """Returns the rows of the recorded batch job, which is continued."""
    output = folder / "batch" / "slates"
    before = {path.name: path.read_bytes() for path in output.glob("part-*")}
    run_command(folder, BATCH)
    assert all((output / name).read_bytes() == content for name, content in before.items())
    assert (output / "_SUCCESS").is_file() and len(before) < len(list(output.glob("part-*")))
    paths = sorted(output.glob("part-*"))
    return [rows(pq.read_table(path)) for path in paths]


def run_command(folder: Path, words: Sequence[str]) -> None:
    """Runs a command in a folder. Raises RuntimeError if it fails."""
    one = mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "RECSERVE_KERNELS": "torch"})
    forced = mock.patch.object(backend, "FORCED", "torch")
    with contextlib.chdir(folder), mock.patch.object(sys, "argv", list(words)), one, forced:
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"{words} ended with {ended.code}") from None


def server(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the answers of a server."""
    with run_server(ServerConfig(**settings)) as client:
        return ask(client)


def ask(client: httpx.Client) -> dict[str, Any]:
    """Returns what a server knows of its files."""
    found: dict[str, Any] = {}
    (shelf,) = client.get("/v1/experiments").json()["experiments"]
    found["experiment"] = [[arm["name"], arm["requests"]] for arm in shelf["arms"]]
    for user in ("user1", "user2", "new"):
        found[f"history {user}"] = client.get(f"/v1/users/{user}/history").json()
    for item in ("item01", "item02", "item90"):
        answer = client.get(f"/v1/items/{item}")
        found[item] = answer.json() if answer.is_success else answer.status_code
    for strategy in STRATEGIES:
        body = {"history": ["item03", "item08"], "k": 5, "strategy": strategy}
        answer = client.post("/v1/recommend", json=body)
        slate = answer.json()
        found[strategy] = (
            [[each["item_id"], each["score"]] for each in slate["items"]]
            if answer.is_success
            else slate["error"]["code"]
        )
    candidates = [{"item_id": f"item{number:02d}"} for number in (3, 7, 11)]
    ranking = client.post("/v1/rank", json={"user": {"id": "user1"}, "candidates": candidates})
    found["rank"] = [[each["item_id"], each["scores"]] for each in ranking.json()["items"]]
    alike = client.post("/v1/similar", json={"item_ids": ["item03"], "k": 3})
    found["similar"] = [each["item_id"] for each in alike.json()["items"]]
    return dict(stable(found, {}))


def server_with_redis(folder: Path) -> dict[str, Any]:
    """Returns the answers of a server whose state is in a Redis with the recorded keys."""
    with servers() as started:
        process, port = start_redis(folder)
        started.append(process)
        restore(redis.Redis(port=port), json.loads((folder / "redis.json").read_text("utf-8")))
        return server(SETTINGS.of_redis(folder, port))


def restore(client: Any, dumped: dict[str, Any]) -> None:
    """Writes what `dump` returned."""
    for key, (kind, text) in dumped.items():
        value = _bytes(text)
        if kind == "string":
            client.set(key, value)
        elif kind == "list":
            client.rpush(key, *value)
        elif kind == "hash":
            client.hset(key, mapping=dict(value))
        elif kind == "set":
            client.sadd(key, *value)
        elif kind == "zset":
            client.zadd(key, {member: score for member, score in value})
        else:
            for entry, fields in value:
                client.xadd(key, dict(fields), id=entry)


def _bytes(text: Any) -> Any:
    if isinstance(text, str):
        return b64decode(text)
    return [_bytes(each) for each in text] if isinstance(text, list) else text

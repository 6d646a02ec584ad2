"""Records a small file of each format that recserve stores, and what a reader makes of it.

    python -m tests.recorded.upgrade.record

It writes the folder of the present version beside this file, once for each release that changes a
format. A recorded folder is never written again: `test_upgrade.py` opens all of them for ever.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
from base64 import b64encode
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import redis
from rich.console import Console

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.config import ServerConfig
from recserve.features.history.lmdb_store import copy_store
from recserve.training.item_drafters.draft_head import RECIPES, train_drafter
from recserve.training.options import TrainOptions
from recserve.training.ranker.ranker import RankerRecipe, train_ranker
from recserve.training.recommender.recommender import ITEMS_MASKED, train_recommender
from recserve.training.recommender.retriever import RetrieverRecipe, train_retriever
from recserve.training.recommender.sasrec import VECTORS, train_sasrec
from recserve.training.similar import train_similar
from tests.recorded.upgrade.read import BATCH, SETTINGS, answers, run_command
from tests.support.live_server import run_server
from tests.support.redis_server import servers, start_redis

HERE = Path(__file__).parent
NUM_ITEMS, NUM_USERS, NUM_EVENTS = 24, 12, 8
WORDS = ("tent", "stove", "rope", "cup", "lamp", "shelf")
START = 1_760_000_000
QUIET = Console(quiet=True)


def write_data(folder: Path) -> None:
    """Writes items.jsonl and events.jsonl."""
    items = [
        {
            "item_id": f"item{number:02d}",
            "title": f"{WORDS[number % 6]} {WORDS[number // 6]}",
            "categories": [f"Camp > {WORDS[number % 6]}"],
            "price": 1.5 * number,
        }
        for number in range(NUM_ITEMS)
    ]
    events = [
        {
            "user_id": f"user{user}",
            "item_id": f"item{(5 * user + step * (1 + user % 3)) % NUM_ITEMS:02d}",
            "timestamp": START + 10_000 * step + user,
            "type": "purchase" if step % 4 == 3 else "click",
        }
        for user in range(NUM_USERS)
        for step in range(NUM_EVENTS)
    ]
    folder.mkdir()
    for name, rows in (("items", items), ("events", events)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def make_bundle(data: Path, out: Path) -> None:
    """Builds a bundle and trains each of its models for an epoch."""
    sizes = {"levels": 2, "codes": 4, "text_dim": 4, "collaborative_dim": 4}
    files = data / "items.jsonl", data / "events.jsonl"
    build_bundle(BuildOptions(*files, out, **sizes), lambda _: None)
    bundle, options = Bundle.open(out), TrainOptions(epochs=1, device="cpu")
    small = {"hidden_size": 8, "num_layers": 1}
    recipe = replace(
        ITEMS_MASKED, **small, num_heads=2, intermediate_size=8, validation_width=4, max_nodes=256
    )
    train_recommender(bundle, options, recipe, QUIET)
    ranker = RankerRecipe(**small, num_heads=2, long_items=8, recent_items=4, block=2)
    train_ranker(bundle, options, ranker, QUIET)
    train_retriever(bundle, options, RetrieverRecipe(sketch_width=64), QUIET)
    for name, drafter in RECIPES.items():
        own = replace(drafter, validation_users=4, validation_width=4)
        train_drafter(bundle, replace(options, name=name), own, QUIET)
    train_similar(bundle)
    train_sasrec(bundle, options, replace(VECTORS, **small, num_heads=2), QUIET)
    for left in (*out.rglob("checkpoint*"), *out.rglob("*.png")):
        left.unlink()
    bundle.commit("build", bundle.manifest.build)


def write_state(settings: dict[str, Any]) -> None:
    """Lets a server write its histories, changes of items, logs and counts."""
    with run_server(ServerConfig(**settings)) as client:

        def post(method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = client.request(method, path, json=body)
            found: dict[str, Any] = answer.json()
            assert answer.is_success and not found.get("rejected"), found
            return found

        for user in ("user1", "user2", "new"):
            slate = post("POST", "/v1/recommend", {"user": {"id": user}, "k": 3})
            event = {
                "user_id": user,
                "item_id": slate["items"][0]["item_id"],
                "type": "purchase",
                "timestamp": "2026-11-29T12:00:00Z",
                "event_id": f"event-{user}",
                "attribution_token": slate["attribution_token"],
            }
            post("POST", "/v1/events", {"events": [event]})
        item = {"item_id": "item90", "title": "rope lamp", "attributes": {"price": 3.5}}
        post("PUT", "/v1/items", {"items": [item]})
        later = {"item_id": "item01", "title": "stove", "expires_at": "2100-01-01T00:00:00Z"}
        post("PUT", "/v1/items", {"items": [later]})
        client.delete("/v1/items/item02").raise_for_status()


def run_batch(folder: Path) -> None:
    """Runs a batch job, and leaves it as if it had been killed before its last part."""
    users = folder / "batch" / "users.parquet"
    users.parent.mkdir()
    rows = [{"user_id": f"user{n}", "history": [f"item{n:02d}", "item05"]} for n in range(6)]
    pq.write_table(pa.Table.from_pylist(rows), users)
    output = folder / "batch" / "slates"
    run_command(folder, BATCH)
    (output / "_SUCCESS").unlink()
    manifest = output / "_manifest.jsonl"
    lines = manifest.read_text(encoding="utf-8").splitlines(keepends=True)
    manifest.write_text("".join(lines[:-1]), encoding="utf-8")
    last = json.loads(lines[-1])["part"]
    for path in output.rglob(last):
        path.unlink()


def dump(client: Any) -> dict[str, Any]:
    """Returns the keys of a Redis with their types and values, bytes in base64."""
    found: dict[str, Any] = {}
    for key in sorted(client.keys("*")):
        kind = client.type(key).decode()
        value: Any = {
            "string": lambda key: client.get(key),
            "list": lambda key: client.lrange(key, 0, -1),
            "hash": lambda key: client.hgetall(key),
            "set": lambda key: sorted(client.smembers(key)),
            "zset": lambda key: client.zrange(key, 0, -1, withscores=True),
            "stream": lambda key: client.xrange(key),
        }[kind](key)
        found[key.decode()] = [kind, _text(value)]
    return found


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, dict):
        return [[_text(name), _text(each)] for name, each in value.items()]
    return [_text(each) for each in value] if isinstance(value, list | tuple) else value


def record(out: Path) -> None:
    """Writes a folder with a file of each format, and the answers."""
    out.mkdir()
    write_data(out / "data")
    make_bundle(out / "data", out / "bundle")
    run_batch(out)
    shutil.rmtree(out / "bundle.history", ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        shutil.copytree(out / "bundle", state / "bundle")
        write_state(SETTINGS.of_files(state))
        (out / "history").mkdir()
        copy_store(state / "history", out / "history")
        (out / "history" / "lock.mdb").unlink(missing_ok=True)
        shutil.copy(state / "history" / "popularity.safetensors", out / "history")
        for name in ("items", "slates", "events", "experiments"):
            shutil.copytree(state / name, out / name, ignore=shutil.ignore_patterns(".lock"))
        with servers() as started:
            process, port = start_redis(state)
            started.append(process)
            write_state(SETTINGS.of_redis(state, port))
            text = json.dumps(dump(redis.Redis(port=port)))
            (out / "redis.json").write_text(text + "\n", encoding="utf-8")
    for path in (out / "redis.json", out / "experiments" / "shelf.counts"):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()
    text = json.dumps(answers(out), indent=1)
    (out / "answers.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    target = HERE / version("recserve")
    if target.exists():
        sys.exit(f"{target} is recorded; it is never written again")
    record(target)

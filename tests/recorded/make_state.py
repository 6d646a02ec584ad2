"""Makes what servers and batch jobs leave on the disk: histories, item changes, slates, output.

    python -m tests.recorded.make_state FOLDER

It ran once, after `make_models`; the files in `tests/recorded/files` are the truth.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.recorded import make_requests
from tests.recorded.cases import Case
from tests.recorded.files_check import SLATES_JOB, TEXTS_JOB, run_job
from tests.recorded.ways import HttpWay
from tests.recorded.worlds import WORLDS


def make_state(out: Path) -> None:
    """Lets a server write a history store, a journal of items and a slate log."""
    draw = random.Random("recorded state")
    to = make_requests.Writer(draw)
    to.add("PUT", "/v1/items", {"items": [made_item(n) for n in range(8)]})
    to.add("PUT", "/v1/items", {"items": [{"item_id": "item003", "price": 4.25, "title": None}]})
    to.add("PUT", "/v1/items", {"items": [{"item_id": "item004", "embedding": [0.25] * 32}]})
    for gone in ("item011", "old-2", "old-5"):
        to.add("DELETE", f"/v1/items/{gone}")
    to.post("/v1/items:rollback", {"catalog_version": "$catalog.4"})
    to.add("DELETE", "/v1/items/old-6")
    make_requests.attribution_cases(to)
    make_requests.event_cases(to, 40)
    to.add("DELETE", "/v1/users/user017")
    with tempfile.TemporaryDirectory() as folder, HttpWay(WORLDS["items"], Path(folder)) as way:
        way.wait()
        for case in to.cases:
            status = way.ask(case)["status"]
            if status >= 400 and case.route != "post-v1-events" and "history" not in case.route:
                raise RuntimeError(f"{case}: {status}")
        way.close()
        for name in ("history", "journal", "slates"):
            shutil.copytree(Path(folder) / "state" / name, out / "state" / "items" / name)
    for lock in out.rglob("lock.mdb"):
        lock.unlink()


def made_item(number: int) -> dict[str, object]:
    """Returns an item that the bundle does not have."""
    topic = list(make_requests.TOPICS)[number % 4]
    thing = make_requests.TOPICS[topic][number % 3]
    return {
        "item_id": f"old-{number}",
        "title": f"quiet {thing} no {number}",
        "categories": [f"{topic} > Gifts"],
        "price": 3.5 + number,
        "attributes": {"stock": number, "fresh": number % 2 == 0, "tags": ["eco"]},
    }


def make_batches(out: Path) -> None:
    """Runs two jobs and removes what they wrote last, as if they had been killed."""
    folder = out / "batch"
    folder.mkdir(exist_ok=True)
    draw = random.Random("recorded batch")
    rows = []
    for number in range(40):
        row = {
            "user_id": make_requests.user(draw) if number % 9 else f"stranger{number}",
            "history": make_requests.history(draw) if number % 3 == 0 else None,
            "k": draw.choice([2, 3, 5]) if number % 11 else 0,
            "strategy": draw.choice(["auto", "beam", "speculative", "nezha", "rpg"]),
            "exclude_seen": number % 4 != 0,
            "filter": json.dumps(make_requests.condition(draw)) if number % 5 == 0 else None,
        }
        rows.append(row)
    types = {"history": pa.list_(pa.string()), "filter": pa.string()}
    columns = {name: pa.array([row[name] for row in rows], types.get(name)) for name in rows[0]}
    pq.write_table(pa.table(columns), folder / "users.parquet")
    to = make_requests.Writer(draw)
    make_requests.completion_cases(to, 24, ())
    make_requests.chat_cases(to, 12, ())
    make_requests.score_cases(to, 5)
    lines = [batch_line(case) for case in to.cases if answers_in_batch(case)][:48]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for job in (SLATES_JOB, TEXTS_JOB):
        with tempfile.TemporaryDirectory() as copy:
            run_job(job, out, Path(copy))
            shutil.copytree(Path(copy) / "output", folder / job.output)
        interrupt(folder / job.output)


def answers_in_batch(case: Case) -> bool:
    """Returns whether a batch job takes the request."""
    body = case.body
    valid = isinstance(body, dict) and case.path != "/rerank" and not body.get("stream")
    return valid and body.get("model", "tiny") == "tiny"


def batch_line(case: Case) -> dict[str, object]:
    """Returns a request as a line of OpenAI's batch files."""
    return {"custom_id": f"c{case.at}", "method": "POST", "url": case.path, "body": case.body}


def interrupt(folder: Path) -> None:
    """Leaves what a kill leaves: two parts, one that nobody lists, and half a line."""
    manifest = folder / "_manifest.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(lines[:2]) + lines[2][: len(lines[2]) // 2])
    (folder / "_SUCCESS").unlink()
    for line in lines[3:]:
        for path in folder.rglob(json.loads(line)["part"]):
            path.unlink()


if __name__ == "__main__":
    make_state(Path(sys.argv[1]))
    make_batches(Path(sys.argv[1]))

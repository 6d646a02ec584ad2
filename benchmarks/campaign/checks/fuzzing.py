"""R10 and R11: drawn requests, and drawn bytes for every parser."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import httpx
import msgspec
import numpy as np

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.filter_oracle import (
    Record,
    count_misfits,
    draw_wide_filter,
    read_items,
)
from benchmarks.campaign.openapi_bodies import RequestSource
from benchmarks.campaign.site import ADMIN_KEY, LLM_NAME, ServerProcess, Site
from benchmarks.campaign.traffic import history, item
from recserve.bundle.bundle import Bundle, BundleError, Manifest
from recserve.features.catalog.filters import FilterError
from recserve.features.history.history import EVENT_DTYPE, CorruptHistory, pack, read_stored
from recserve.schemas.events import EventsRequest
from recserve.schemas.items import InvalidRequest, RecommendRequest
from recserve.server.body_decoder import MalformedBody, decode
from tests.support.paths import ROOT

FILTERED = 10  # every so many own requests a filtered slate is asked for
LEAST_TOOL_S, START_S = 60, 6  # schemathesis and atheris take seconds to start
# What schemathesis checks, and the statuses from 500 on that openapi.json describes.
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance", "unsupported_method"),
)
SCHEMATHESIS = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "501", "504"]
"""
ENVELOPE = {"message", "type", "param", "code"}


@check(
    "R10", "API fuzzing", "requests drawn from openapi.json", cases=200_000, minimum_s=12, weight=2
)
def api(site: Site, budget: Budget) -> Finding:
    """Sends valid, damaged and senseless requests to every operation."""
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    why = "" if program else "schemathesis is not installed"
    if budget.seconds < LEAST_TOOL_S:
        why = f"schemathesis needs {LEAST_TOOL_S} s"
    with (
        site.server(llm=site.llm, admin_keys=[ADMIN_KEY], default_timeout_ms=60_000) as server,
        server.client(headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        found = by_own_requests(client, site, budget, 0.95 if why else 0.4)
        sent, told, outside = found.sent, f"not run: {why}", ()
        if program and not why:
            seconds = int(0.9 * budget.left_s) - START_S
            number, failures = by_schemathesis(program, server, site, Path(folder), seconds)
            told = "; ".join([f"{sent:,} own requests, {number:,} of schemathesis", *failures])
            sent += number
            outside = (Figure("failures of schemathesis' checks", len(failures), 0),)
        alive = client.get("/health/ready").status_code == 200
    return Finding(
        sent,
        (
            Figure("5xx but 501 and 504, or no answer", len(found.broken), 0),
            Figure("errors of another form", len(found.formless), 0),
            Figure("statuses that openapi.json lacks", len(found.undocumented), 0),
            Figure("items in filtered slates that the filter does not allow", found.misfits, 0),
            *outside,
            Figure("not ready afterwards", not alive, 0),
        ),
        "; ".join(
            [
                f"{found.accepted} own requests accepted, {found.filtered} filtered slates between "
                "them",
                told,
                *found.shown,
            ]
        ),
    )


@dataclass
class Answers:
    """What the server answered to own requests: how often, and what was wrong.

    Between them come requests for filtered slates: their number, and the items in them that the
    filter does not allow.
    """

    sent: int = 0
    accepted: int = 0
    filtered: int = 0
    misfits: int = 0
    broken: list[str] = field(default_factory=list)
    formless: list[str] = field(default_factory=list)
    undocumented: list[str] = field(default_factory=list)

    @property
    def shown(self) -> list[str]:
        """Some of what was wrong."""
        return [*self.broken[:2], *self.formless[:2], *self.undocumented[:2]]


def by_own_requests(client: httpx.Client, site: Site, budget: Budget, part: float) -> Answers:
    """Sends drawn requests to every operation in turn, and some for filtered slates."""
    document, found = client.get("/openapi.json").json(), Answers()
    pool = (*(item(n) for n in range(4)), "user000001", LLM_NAME, "recommender", "beam")
    # Drawn requests change items of the pool only, so the catalogue tells what the others are.
    items = {name: row for name, row in read_items(site.bundle).items() if name not in pool}
    draw = np.random.default_rng(site.seed)
    source = RequestSource(document, pool, site.seed)
    headers = {"Content-Type": "application/json", "X-Deadline-Ms": "2000"}
    for number in budget.cases(200_000, part, 400):
        if number % FILTERED == 0:
            ask_filtered(client, items, draw, found)
        drawn = source.request(source.operations[number % len(source.operations)])
        method, path = drawn.operation.method, drawn.operation.path
        said = document["paths"][path][method.lower()]
        try:
            answer = client.request(method, drawn.path, content=drawn.content, headers=headers)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            found.broken.append(f"{path}: {error!r} {drawn.content!r}"[:300])
            continue
        found.sent += 1
        status, shown = answer.status_code, f"{path} {drawn.content!r}"[:300]
        found.accepted += drawn.valid and status < 300
        if status >= 500 and status not in (501, 504):
            found.broken.append(f"{status} {shown}")
        if status < 400 and str(status) not in said["responses"]:
            found.undocumented.append(f"{status} {shown}")
        if status >= 400 and not enveloped(answer):
            found.formless.append(f"{status} {shown}")
    return found


def ask_filtered(
    client: httpx.Client,
    items: Mapping[str, Record],
    draw: np.random.Generator,
    found: Answers,
) -> None:
    """Asks for a filtered slate, and judges the items whose rows are known."""
    tree = draw_wide_filter(items, draw, 20)
    body = {"history": history(draw), "k": 10, "filter": tree}
    answer = client.post("/v1/recommend", json=body)
    found.filtered += 1
    if answer.status_code != 200:
        found.broken.append(f"{answer.status_code} to a filtered slate: {answer.text[:200]}")
        return
    shown = [one["item_id"] for one in answer.json()["items"]]
    found.misfits += count_misfits(items, [name for name in shown if name in items], tree)


def by_schemathesis(
    program: str, server: ServerProcess, site: Site, folder: Path, seconds: int
) -> tuple[int, list[str]]:
    """Lets schemathesis test the server; returns how many requests it sent, and what failed."""
    settings, report = folder / "schemathesis.toml", folder / "report.json"
    settings.write_text(SCHEMATHESIS, encoding="utf-8")
    command = [program, "--config-file", str(settings), "run", f"{server.url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {ADMIN_KEY}", "--checks", ",".join(CHECKS)]
    command += ["--phases", "examples,coverage,fuzzing", "--max-time", str(max(seconds, 1))]
    command += ["--no-shrink", "--continue-on-failure", "--no-color", "--seed", str(site.seed)]
    command += ["--generation-database", "none", "--report-json-path", str(report)]
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=seconds + 120
    )
    if not report.is_file():
        return 0, [f"schemathesis: {(ended.stdout + ended.stderr).strip()[-300:]}"]
    said = json.loads(report.read_text(encoding="utf-8"))
    failures = [f"{one['title']}: {', '.join(one['operations'])}" for one in said["failures"]]
    return said["test_cases"]["generated"], failures + [str(one) for one in said["errors"]]


def enveloped(answer: httpx.Response) -> bool:
    """Returns whether an error has the documented form: a text below /v2, except rerank's."""
    path = answer.request.url.path
    try:
        error = answer.json()["error"]
        if path.startswith("/v2") and path != "/v2/rerank":
            return isinstance(error, str)
        return set(error) == ENVELOPE
    except (ValueError, KeyError, TypeError):
        return False


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        name: Name.
        seeds: Inputs that it accepts.
        parse: Parses bytes.
        expected: Errors that say that the input is wrong.
    """

    name: str
    seeds: tuple[bytes, ...]
    parse: Callable[[bytes], object]
    expected: tuple[type[Exception], ...]


def targets(bundle: Path) -> list[Target]:
    """Returns the parsers of bytes that come from outside.

    Args:
        bundle: A sound bundle. It is only read.
    """
    weights = bundle / "vectors.safetensors"
    sound = weights.read_bytes()
    records = np.zeros(3, EVENT_DTYPE)
    events = msgspec.json.Decoder(EventsRequest)
    slates = msgspec.json.Decoder(RecommendRequest)
    event = {"events": [{"user_id": "u", "item_id": item(1), "event_id": "e", "value": 1.5}]}
    tree = {"history": [item(1)], "k": 1, "filter": {"not": {"in": ["item_id", ["a", "b"]]}}}

    def tensors(data: bytes) -> object:
        from safetensors.numpy import load

        return load(data)

    from safetensors import SafetensorError

    bad_body = (MalformedBody, InvalidRequest, FilterError)
    return [
        Target("manifest", ((bundle / "manifest.json").read_bytes(),), Manifest.from_json,
               (BundleError,)),
        Target("weights header", (sound[:4096],), tensors, (SafetensorError, ValueError)),
        Target("stored history", (pack(records),), read_stored, (CorruptHistory,)),
        Target("events", (json.dumps(event).encode(),), lambda raw: decode(events, raw), bad_body),
        Target("filter", (json.dumps(tree).encode(),), lambda raw: decode(slates, raw), bad_body),
    ]  # fmt: skip


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Returns bytes with one to four changes."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(found) + 1)
        match draw.randrange(4):
            case 0:
                found[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                del found[place : place + draw.randint(1, 8)]
            case 2:
                found[place:place] = draw.randbytes(draw.randint(1, 8))
            case 3:
                other = draw.randrange(len(found) + 1)
                found[place:place] = found[other : other + draw.randint(1, 16)]
    return bytes(found)


@check("R11", "parser fuzzing", "changed bytes for five parsers", cases=5 * 10**7, minimum_s=4)
def parsers(site: Site, budget: Budget) -> Finding:
    """Parses bytes that are near to valid ones; only the documented errors may come out."""
    assert Bundle.open(site.bundle)
    every = targets(site.bundle)
    why = "atheris is not installed" if find_spec("atheris") is None else ""
    if budget.seconds < LEAST_TOOL_S:
        why = f"it needs {LEAST_TOOL_S} s"
    ran, wrong = by_mutation(every, budget, 0.9 if why else 0.3, random.Random(site.seed))
    told = f"not run: coverage-guided fuzzing, {why}"
    if not why:
        runs = 0
        with tempfile.TemporaryDirectory() as folder:
            for left, target in zip(range(len(every), 0, -1), every, strict=True):
                seconds = int(0.9 * budget.left_s / left) - START_S
                number, failure = by_coverage(target, site, Path(folder), seconds)
                runs, wrong = runs + number, wrong + failure
        told = f"{ran:,} drawn mutations, {runs:,} inputs of atheris, guided by coverage"
        ran += runs
    return Finding(
        ran,
        (Figure("errors of another kind", len(wrong), 0),),
        "; ".join([told, *wrong[:3]]),
    )


def by_mutation(
    every: list[Target], budget: Budget, part: float, draw: random.Random
) -> tuple[int, list[str]]:
    """Parses mutated inputs; returns their number and what failed."""
    ran, wrong = 0, []
    corpora = {one.name: list(one.seeds) for one in every}
    for number in budget.cases(5 * 10**7, part):
        target = every[number % len(every)]
        corpus = corpora[target.name]
        data = mutated(draw.choice(corpus), draw)
        ran += 1
        try:
            target.parse(data)
            if len(corpus) < 200:
                corpus.append(data)  # what is accepted is a new starting point
        except target.expected:
            pass
        except Exception as error:
            wrong.append(f"{target.name}: {error!r} {data[:80]!r}")
    return ran, wrong


def by_coverage(target: Target, site: Site, folder: Path, seconds: int) -> tuple[int, list[str]]:
    """Lets atheris look for inputs that fail; returns how many it tried, and what failed."""
    corpus = folder / target.name
    corpus.mkdir()
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(seed)
    command = [sys.executable, "-m", "benchmarks.campaign.guided_fuzzing", target.name]
    command += [str(site.bundle), str(corpus), str(max(seconds, 1)), str(site.seed + 1)]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=seconds + 120
    )
    counts = re.findall(r"^#(\d+)\b|^Done (\d+) runs", ended.stderr, re.MULTILINE)
    tried = max((int(one or other) for one, other in counts), default=0)
    if ended.returncode == 0 and tried:
        return tried, []
    inputs = [path.read_bytes() for path in corpus.glob("*-*")]
    shown = (ended.stdout + ended.stderr).strip()[-300:]
    return tried, [f"{target.name}: {shown} {[data[:80] for data in inputs]}"]

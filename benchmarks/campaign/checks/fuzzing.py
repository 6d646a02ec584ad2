"""R10 and R11: drawn requests, and drawn bytes for every parser."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import numpy as np

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.openapi_bodies import RequestSource
from benchmarks.campaign.site import ADMIN_KEY, LLM_NAME, Site
from benchmarks.campaign.traffic import item
from recserve.bundle.bundle import Bundle, BundleError, Manifest
from recserve.features.catalog.filters import FilterError
from recserve.features.history.history import EVENT_DTYPE, CorruptHistory, pack, read_stored
from recserve.schemas.events import EventsRequest
from recserve.schemas.items import InvalidRequest, RecommendRequest
from recserve.server.body_decoder import MalformedBody, decode

ENVELOPE = {"message", "type", "param", "code"}


@check(
    "R10", "API fuzzing", "requests drawn from openapi.json", cases=200_000, minimum_s=12, weight=2
)
def api(site: Site, budget: Budget) -> Finding:
    """Sends valid, damaged and senseless requests to every operation."""
    with (
        site.server(llm=site.llm, admin_keys=[ADMIN_KEY], default_timeout_ms=60_000) as server,
        server.client(headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as client,
    ):
        document = client.get("/openapi.json").json()
        pool = (*(item(n) for n in range(4)), "user000001", LLM_NAME, "recommender", "beam")
        source = RequestSource(document, pool, site.seed)
        sent, accepted, wrong = 0, 0, {"5xx": [], "no envelope": [], "undocumented": []}
        count = len(source.operations)
        for number in budget.cases(200_000, 0.95, 400):
            drawn = source.request(source.operations[number % count])
            said = document["paths"][drawn.operation.path][drawn.operation.method.lower()]
            headers = {"Content-Type": "application/json", "X-Deadline-Ms": "2000"}
            try:
                answer = client.request(
                    drawn.operation.method, drawn.path, content=drawn.content, headers=headers
                )
            except (httpx.TransportError, httpx.InvalidURL) as error:
                wrong["5xx"].append(f"{drawn.operation.path}: {error!r} {drawn.content!r}"[:300])
                continue
            sent += 1
            status, shown = answer.status_code, f"{drawn.operation.path} {drawn.content!r}"[:300]
            accepted += drawn.valid and status < 300
            if status >= 500 and status not in (501, 504):
                wrong["5xx"].append(f"{status} {shown}")
            if status < 400 and str(status) not in said["responses"]:
                wrong["undocumented"].append(f"{status} {shown}")
            if status >= 400 and not enveloped(answer):
                wrong["no envelope"].append(f"{status} {shown}")
        alive = client.get("/health/ready").status_code == 200
    return Finding(
        sent,
        (
            Figure("5xx but 501 and 504, or no answer", len(wrong["5xx"]), 0),
            Figure("errors of another form", len(wrong["no envelope"]), 0),
            Figure("statuses that openapi.json lacks", len(wrong["undocumented"]), 0),
            Figure("not ready afterwards", not alive, 0),
        ),
        f"{count} operations, {accepted} requests accepted; own generator, not schemathesis; "
        + "; ".join(text for texts in wrong.values() for text in texts[:2]),
    )


def enveloped(answer: httpx.Response) -> bool:
    """Returns whether an error has the documented form."""
    try:
        return set(answer.json()["error"]) == ENVELOPE
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


def targets(site: Site, folder: Path) -> list[Target]:
    """Returns the parsers of bytes that come from outside."""
    bundle = Path(shutil.copytree(site.bundle, folder / "bundle"))
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


@check("R11", "parser fuzzing", "mutated bytes for five parsers", cases=5 * 10**7, minimum_s=4)
def parsers(site: Site, budget: Budget) -> Finding:
    """Parses bytes that are near to valid ones; only the documented errors may come out."""
    draw = random.Random(site.seed)
    ran, wrong = 0, []
    with tempfile.TemporaryDirectory() as folder:
        every = targets(site, Path(folder))
        corpora = {one.name: list(one.seeds) for one in every}
        assert Bundle.open(site.bundle)
        for number in budget.cases(5 * 10**7, 0.9):
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
    guided = importlib.util.find_spec("atheris") is not None
    return Finding(
        ran,
        (Figure("errors of another kind", len(wrong), 0),),
        f"drawn mutations{'' if guided else '; not run: coverage guidance, atheris is missing'}; "
        + "; ".join(wrong[:3]),
    )

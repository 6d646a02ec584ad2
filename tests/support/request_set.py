"""Requests whose answers are the same bytes on every path, and how answers are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from recserve.schemas.items import (
    Candidate,
    ColumnCap,
    Diversity,
    Exclusions,
    Quota,
    RankRequest,
    RankResponse,
    RecommendRequest,
    RecommendResponse,
    UserRef,
)

Request = RecommendRequest | RankRequest
BRANDS = {"not": {"in": ["brand", ["brand01", "brand02", "brand03"]]}}
RULES = Diversity(
    caps=[ColumnCap(field="brand", most=2), ColumnCap(field="categories", level=0, most=4)],
    at_least=[
        Quota(count=3, filter={"range": ["price", 20, None]}),
        Quota(count=2, filter=BRANDS),
    ],
)
VOLATILE = ("request_id", "attribution_token", "timing_ms", "explanation")
STRATEGIES = ("beam", "speculative", "nezha", "rpg", "dense", "specgr")
HISTORY = [f"item{number:06d}" for number in (11, 4, 30)]
CANDIDATES = [f"item{number:06d}" for number in (40, 7, 3, 40, 99)] + ["nothing"]


def slates() -> dict[str, RecommendRequest]:
    """Requests for slates, by name."""
    known, cold = UserRef(id="user000003"), UserRef(id="nobody")
    requests = {
        "user": RecommendRequest(user=known, strategy="beam"),
        "history": RecommendRequest(history=HISTORY, strategy="beam", k=5),
        "cold": RecommendRequest(user=cold, k=7),
        "many": RecommendRequest(user=known, k=200, beam_width=250, strategy="speculative"),
        "repeats": RecommendRequest(
            history=HISTORY, strategy="beam", exclude=Exclusions(seen=False), k=20
        ),
        "excluded": RecommendRequest(
            history=HISTORY,
            strategy="speculative",
            exclude=Exclusions(item_ids=[f"item{n:06d}" for n in range(50, 90)]),
        ),
        "filtered": RecommendRequest(
            history=HISTORY, strategy="beam", filter={"range": ["price", None, 12]}
        ),
        "diverse": RecommendRequest(
            history=HISTORY, strategy="beam", diversity=Diversity(category=2)
        ),
        "ruled": RecommendRequest(
            history=HISTORY, strategy="beam", diversity=RULES, on_deadline="popular"
        ),
        "similar": RecommendRequest(history=HISTORY, strategy="similar", k=9),
        "unknown": RecommendRequest(history=[*HISTORY, "nothing"], strategy="nezha"),
    }
    for name in STRATEGIES:
        requests[name] = RecommendRequest(user=known, strategy=name, k=12)
    return requests


def rankings() -> dict[str, RankRequest]:
    """Requests for rankings, by name."""
    candidates = [Candidate(item_id=item_id) for item_id in CANDIDATES]
    known, cold = UserRef(id="user000003"), UserRef(id="nobody")
    return {
        "ranker": RankRequest(user=known, candidates=candidates, scorer="ranker"),
        "likelihood": RankRequest(user=known, candidates=candidates, scorer="likelihood"),
        "auto": RankRequest(history=HISTORY, candidates=candidates),
        "cold ranking": RankRequest(user=cold, candidates=candidates),
        "features": RankRequest(
            history=HISTORY, candidates=[Candidate(item_id=HISTORY[0], features={"price": 3.5})]
        ),
    }


REQUESTS: dict[str, Request] = {**slates(), **rankings()}


def stable(answer: RecommendResponse | RankResponse) -> bytes:
    """An answer as JSON without what differs between two equal answers."""
    return without_volatile(msgspec.to_builtins(answer))


def without_volatile(fields: dict[str, Any]) -> bytes:
    """The decoded JSON of an answer, encoded again without what differs between equal answers."""
    return msgspec.json.encode({k: v for k, v in fields.items() if k not in VOLATILE})


def user_row(request: Request) -> dict[str, Any] | None:
    """A row of a batch job that asks the same; None for requests that a row cannot express."""
    if isinstance(request, RankRequest) or request.exclude.item_ids:
        return None
    if request.beam_width is not None:
        return None
    return {
        "user_id": request.user.id if request.user else "somebody",
        "history": request.history,
        "k": request.k,
        "strategy": request.strategy,
        "exclude_seen": request.exclude.seen,
        "filter": json.dumps(request.filter) if request.filter else None,
        "diversity": diversity_text(request),
    }


def diversity_text(request: RecommendRequest) -> str | None:
    """The caps and quotas of a request as JSON."""
    return None if request.diversity is None else msgspec.json.encode(request.diversity).decode()


def write_user_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows of `user_row` as the input of a batch job."""
    types = {"history": pa.list_(pa.string()), "filter": pa.string(), "diversity": pa.string()}
    columns = {name: pa.array([row[name] for row in rows], types.get(name)) for name in rows[0]}
    pq.write_table(pa.table(columns), path)


def read_slates(folder: Path) -> list[dict[str, Any]]:
    """The slates that a batch job has written, in the order of its rows, as parts of answers."""
    found: list[dict[str, Any]] = []
    for row in pq.read_table(folder).to_pylist():
        if row["rank"] == 1:
            versions = {n: row[n] for n in ("strategy", "model_version", "catalog_version")}
            found.append({"items": [], **versions})
        found[-1]["items"].append({name: row[name] for name in ("item_id", "score", "rank")})
    return found


def same_part(given: dict[str, Any], wanted: dict[str, Any]) -> tuple[bytes, bytes]:
    """What an answer says, and what a whole answer says of that, both as sorted JSON.

    Args:
        given: Some fields of an answer. Its items may lack fields: a row of a batch has no source.
        wanted: All fields of an answer.
    """
    part = {name: wanted[name] for name in given}
    if given["items"]:
        names = list(given["items"][0])
        part["items"] = [{name: item[name] for name in names} for item in wanted["items"]]
    return msgspec.json.encode(given, order="sorted"), msgspec.json.encode(part, order="sorted")

"""Measures the overhead of serving: /v1/rank over a keep-alive connection against the engine.

    python -m benchmarks.server.overhead [--candidates 500] [--requests 400] [--json F]

Everything runs in one process over loopback, one request at a time, with random weights, because
the cost of a request does not depend on training. Prints p50 and p99 of each part in milliseconds.
`overhead` is the time at the client minus the engine's own `total` of the same request. It covers
parsing, history, candidate features, the response and both ends of the socket. `features`, the
model's input columns, is also shown separately. Users return in turns, so their prefixes are
cached, as for users who page through a shop.
"""

import argparse
import json
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import uvicorn

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.config import ServerConfig
from recserve.core.request import Result
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.kernels.native.processor import processor
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.ranker import save_ranker
from recserve.models.recommender import Recommender, save_recommender
from recserve.schemas.events import EventInput, EventsRequest
from recserve.server.app import create_app
from recserve.server.transport.connection import connection_class
from recserve.server.transport.connection_limits import ConnectionLimits
from recserve.service import Service
from recserve.training.ranker.ranker import RankerRecipe, make_ranker

WARM_UP = 50


@dataclass(frozen=True)
class Sample:
    """Times of one request in milliseconds."""

    client: float
    engine: float
    service: float
    features: float


def make_bundle(folder: Path, num_items: int) -> Path:
    """Builds a catalogue with events, an untrained ranker and an untrained recommender."""
    data = write_synthetic(folder / "data", SyntheticOptions(num_items, 2000, 30))
    out = folder / "bundle"
    build_bundle(BuildOptions(data.items, data.events, out), log=lambda _: None)
    bundle = Bundle.open(out)
    catalog = bundle.catalog()
    recipe = RankerRecipe()
    train = bundle.events().leave_one_out().train
    tables = RankingTables.fit(
        train, catalog.items, catalog.vectors, recipe.long_items, recipe.recent_items, recipe.block
    )
    folder = bundle.directory("ranker")
    save_ranker(make_ranker(tables, catalog.vectors, recipe, 0), folder)
    tables.save(folder)
    bundle.commit("ranker", {})
    config = RecommenderConfig(
        DecoderConfig(128, 2, 4, 4, 32, 512),
        catalog.semantic_ids.codebook_sizes,
        num_items=num_items,
    )
    save_recommender(Recommender(config), bundle.directory("recommender"))
    bundle.commit("recommender", {})
    return out


def serve(service: Service) -> tuple[uvicorn.Server, threading.Thread, int]:
    """Returns a running server and its port."""
    app = create_app(ServerConfig(bundle=service.bundle.root), service)
    http = connection_class(ConnectionLimits(), app.state.metrics)
    config = uvicorn.Config(app, http=http, port=0, log_level="warning", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    lifecycle = app.state.lifecycle
    while not server.started or not lifecycle.loaded.is_set():
        time.sleep(0.01)
    return server, thread, server.servers[0].sockets[0].getsockname()[1]


def exchange(connection: socket.socket, path: str, body: bytes) -> bytes:
    """Sends one request and reads its response, with almost no cost of its own."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    answer = connection.recv(1 << 20)
    head_end = answer.index(b"\r\n\r\n") + 4
    assert answer.startswith(b"HTTP/1.1 200"), answer
    length = int(answer[:head_end].lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(answer) < head_end + length:
        answer += connection.recv(1 << 20)
    return answer[head_end:]


def measure(service: Service, port: int, path: str, bodies: list[bytes]) -> list[Sample]:
    """Sends the requests one after the other."""
    engine_ms: list[float] = []
    submit_all = service.engine.submit_all

    def noted(queries, client):
        futures = submit_all(queries, client)

        def note(done) -> None:
            result: Result = done.result()
            engine_ms.append(result.timing.total_ms)

        for future in futures:
            future.add_done_callback(note)
        return futures

    service.engine.submit_all = noted
    samples = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for body in bodies:
            began = time.perf_counter()
            raw = exchange(connection, path, body)
            client_ms = (time.perf_counter() - began) * 1e3
            timing = msgspec.json.decode(raw)["timing_ms"]
            samples.append(Sample(client_ms, engine_ms[-1], timing["total"], timing["features"]))
    service.engine.submit_all = submit_all
    return samples[WARM_UP:]


def summary(samples: list[Sample]) -> dict[str, dict[str, float]]:
    """Returns p50 and p99 of each part."""
    parts = {
        "client": [s.client for s in samples],
        "engine": [s.engine for s in samples],
        "overhead": [s.client - s.engine for s in samples],
        "of it features": [s.features for s in samples],
        "overhead without features": [s.client - s.engine - s.features for s in samples],
    }
    return {
        name: {"p50_ms": float(np.percentile(v, 50)), "p99_ms": float(np.percentile(v, 99))}
        for name, v in parts.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=12_000, help="items in the catalogue")
    parser.add_argument("--candidates", type=int, default=500, help="candidates per request")
    parser.add_argument("--history", type=int, default=100, help="events in each user's history")
    parser.add_argument("--users", type=int, default=16, help="number of users")
    parser.add_argument("--requests", type=int, default=400, help="measured requests")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        bundle = make_bundle(Path(folder), options.items)
        service = Service.open(bundle, f"lmdb:{folder}/store", "cpu")
        ids = service.catalog.current.catalog.items.ids
        server, thread, port = serve(service)
        users = [f"user-{n}" for n in range(options.users)]
        for user in users:
            rows = rng.integers(0, len(ids), options.history)
            events = [EventInput(user_id=user, item_id=ids[row]) for row in rows]
            service.add_events(EventsRequest(events=events))

        def body(number: int, scorer: str) -> bytes:
            rows = rng.choice(len(ids), options.candidates, replace=False)
            candidates = [{"item_id": ids[row]} for row in rows]
            return msgspec.json.encode(
                {
                    "user": {"id": users[number % len(users)]},
                    "scorer": scorer,
                    "candidates": candidates,
                }
            )

        results = {}
        for scorer in ("ranker", "likelihood"):
            bodies = [body(n, scorer) for n in range(options.requests + WARM_UP)]
            results[scorer] = summary(measure(service, port, "/v1/rank", bodies))
        server.should_exit = True
        thread.join()
    machine = f"{processor().name}, torch {torch.__version__}, CPU"
    print(f"{machine}, {options.threads} torch threads, {options.requests} requests, one at a time")
    print(
        f"{options.items} items, {options.candidates} candidates, {options.users} users with ",
        end="",
    )
    print(f"{options.history} events each\n")
    print("| /v1/rank | part | p50 ms | p99 ms |\n|---|---|---|---|")
    for scorer, parts in results.items():
        for name, figures in parts.items():
            print(f"| {scorer} | {name} | {figures['p50_ms']:.2f} | {figures['p99_ms']:.2f} |")
    if options.json is not None:
        text = {"machine": machine, **vars(options), "json": None, "results": results}
        options.json.write_text(json.dumps(text, indent=1))


if __name__ == "__main__":
    main()

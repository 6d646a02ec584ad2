"""`recserve demo`: from nothing to answers in about two minutes on a laptop.

Data (made up, or the user's Parquet) becomes a bundle, two small models are trained within a minute
together, then a tiny language model on the sources of the standard library; one slate, one ranking
and one completion are printed, and the server starts. What was trained stays in the user's cache
folder under a name made of its data, so that a second run starts at once.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.bundle.new_folder import new_folder
from recserve.cli.terminal import counted, ranking_table, slate_table, timing_line, titles
from recserve.config import ServerConfig
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.features.tables.parquet import SchemaError
from recserve.schemas.items import (
    Candidate,
    RankRequest,
    RankResponse,
    RecommendRequest,
    RecommendResponse,
    UserRef,
)
from recserve.schemas.text import CompletionRequest, CompletionResponse, SpeculationOptions
from recserve.server.run import serve
from recserve.service import Service
from recserve.service.text.loader import TextSettings, load_text
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.ranker.ranker import RankerRecipe, train_ranker
from recserve.training.recommender.recommender import ITEMS_MASKED, train_recommender
from recserve.training.text.language_model import (
    LanguageRecipe,
    standard_library,
    train_language_model,
)

HOST = "127.0.0.1"
MINUTES = {"recommender": 0.5, "ranker": 0.25, "llm": 0.5}
SYNTHETIC = SyntheticOptions(num_items=2000, num_users=3000, mean_events=30)
# Smaller than what `recserve train` takes, so that several epochs fit into half a minute.
RECOMMENDER = replace(
    ITEMS_MASKED,
    hidden_size=96,
    num_heads=4,
    intermediate_size=256,
    validation_users=500,
    validation_width=10,
)
RANKER = RankerRecipe(hidden_size=48, validation_users=300)
LANGUAGE = LanguageRecipe(num_layers=2, steps=50)
SOURCES_BYTES = 1_000_000
DRAFTER = "suffix"
PROMPT = "def __init__(self, "
NUM_TOKENS = 64
LLM = "llm"
CPU = torch.device("cpu")
NUM_CODES = 64
SLATE_SIZE = 10
NUM_CANDIDATES = 200
ROWS_SHOWN = 10
LAST_EVENTS = 5


def run_demo(data: Path | None, port: int, once: bool) -> int:
    """The whole demo. data: folder with items.parquet and events.parquet, None: made up.

    Returns the exit status. Raises SchemaError or BadRowError for the data, OSError if no port
    near the options one is free.
    """
    console = Console(highlight=False)
    folder = prepare(data, console)
    show_answers(folder / "bundle", console)
    show_completion(folder / LLM, console)
    if once:
        return 0
    free = free_port(port)
    if free != port:
        say(console, f"port {port} is taken; using {free}")
    say(console, f"\nplayground and API: http://{HOST}:{free}/ (Ctrl-C ends)")
    settings = {"bundle": folder / "bundle", "llm": folder / LLM, "drafters": (DRAFTER,)}
    return serve(ServerConfig.load({**settings, "host": HOST, "port": free}))


def prepare(data: Path | None, console: Console) -> Path:
    """The folder of a finished demo for this data; made now if it is not there yet."""
    folder = cache_folder() / fingerprint(data)
    if folder.is_dir():
        say(console, f"using the bundle of an earlier run: {folder / 'bundle'}")
        return folder
    with new_folder(folder) as making:
        make_bundle(data, making, console)
        make_llm(making / LLM, console)
    say(console, f"kept for the next run: {folder / 'bundle'}")
    return folder


def make_bundle(data: Path | None, folder: Path, console: Console) -> None:
    """Build and train `folder/bundle`, a rule per step."""
    console.rule("catalogue and events", align="left")
    if data is None:
        files = write_synthetic(folder / "data", SYNTHETIC)
        items, events = files.items, files.events
    else:
        items, events = data / "items.parquet", data / "events.parquet"
    out = folder / "bundle"
    options = BuildOptions(items, events, out, codes=NUM_CODES, on_bad_rows="skip")
    build_bundle(options, lambda line: say(console, line.replace(f"{folder}{os.sep}", "")))
    for name in ("recommender", "ranker"):
        bundle, limits = Bundle.open(out), minutes(name, console)
        with one_thread():
            if name == "recommender":
                report = train_recommender(bundle, limits, RECOMMENDER, console)
            else:
                report = train_ranker(bundle, limits, RANKER, console)
        tell(report, console)


def make_llm(folder: Path, console: Console) -> None:
    """A language model small enough to be trained on the spot."""
    limits = minutes("llm", console)
    with one_thread():
        sources = standard_library(SOURCES_BYTES)
        tell(train_language_model(sources, folder, limits, LANGUAGE, console), console)


def minutes(name: str, console: Console) -> TrainOptions:
    """A rule over what is trained next, and how long it may take."""
    console.rule(f"{name}, about {MINUTES[name] * 60:.0f} s", align="left")
    return TrainOptions(max_minutes=MINUTES[name])


def tell(report: TrainReport, console: Console) -> None:
    """What a training run came to."""
    kept = ", ".join(f"{metric} {value:.4f}" for metric, value in report.metrics.items())
    say(console, f"trained {counted(report.epochs, 'epoch')} in {report.seconds:.0f} s: {kept}")


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices this small gain little from a second thread, and wait long for one that is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def show_answers(bundle: Path, console: Console) -> None:
    """Print one user's last events, a slate and a ranking, each with its times."""
    started = time.monotonic()
    with Service.open(bundle) as service:
        say(console, f"\nloaded in {time.monotonic() - started:.1f} s")
        title = titles(service.item)
        samples = service.samples(2, NUM_CANDIDATES)
        name, *others = samples["users"]
        past = [event.item_id for event in service.history(name).events]
        say(console, f"user {name}, {len(past)} events; the last ones:")
        for item_id in past[-LAST_EVENTS:]:
            say(console, f"  {item_id}  {title(item_id) or ''}")
        offered = [item_id for item_id in samples["items"] if item_id not in set(past)]
        for other in others:
            slate(service, other)
            ranking(service, other, offered)

        console.rule("recommend", align="left")
        first, again = slate(service, name), slate(service, name)
        console.print(slate_table(first, title))
        say(console, timing_line(first.timing_ms, first.degraded))
        say(console, f"again, root cached: {timing_line(again.timing_ms)}")

        console.rule(f"rank {len(offered)} candidates", align="left")
        order, order_again = ranking(service, name, offered), ranking(service, name, offered)
        console.print(ranking_table(order, title, ROWS_SHOWN))
        say(console, timing_line(order.timing_ms, order.degraded))
        say(console, f"again, root cached: {timing_line(order_again.timing_ms)}")


def show_completion(folder: Path, console: Console) -> None:
    """Print a completion, drafted and plain: the same text in fewer steps."""
    console.rule(f"completion, drafted by {DRAFTER}", align="left")
    with Service.of_text(load_text(TextSettings(folder, drafters=(DRAFTER,)), CPU)) as service:
        completion(service, "none")
        plain, plain_s = completion(service, "none")
        drafted, drafted_s = completion(service, DRAFTER)
    say(console, PROMPT + drafted.choices[0].text)
    same = "the same text" if drafted.choices[0].text == plain.choices[0].text else "another text"
    counts = drafted.metrics.speculative_decoding if drafted.metrics else None
    length = counts.mean_acceptance_length if counts else 1.0
    steps = f"{NUM_TOKENS} tokens in {drafted_s * 1e3:.0f} ms, {length:.2f} tokens per step"
    say(console, f"{steps}; without drafts {same} in {plain_s * 1e3:.0f} ms")


def completion(service: Service, drafter: str) -> tuple[CompletionResponse, float]:
    """The prompt continued, and the seconds it took."""
    began = time.monotonic()
    body = CompletionRequest(
        prompt=PROMPT,
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        ignore_eos=True,
        speculation=SpeculationOptions(drafter=drafter),
    )
    answer = service.texts.begin_completion(body).answer()
    assert isinstance(answer, CompletionResponse)
    return answer, time.monotonic() - began


def slate(service: Service, user_id: str) -> RecommendResponse:
    """Items the user has not seen."""
    return service.recommend(RecommendRequest(user=UserRef(id=user_id), k=SLATE_SIZE))


def ranking(service: Service, user_id: str, item_ids: list[str]) -> RankResponse:
    """The order of these items for the user."""
    candidates = [Candidate(item_id=item_id) for item_id in item_ids]
    return service.rank(RankRequest(user=UserRef(id=user_id), candidates=candidates))


def say(console: Console, line: str) -> None:
    """A line as it is: square brackets are no markup, a long line is not broken."""
    console.print(Text(line), soft_wrap=True)


def cache_folder() -> Path:
    """Where finished demos lie: XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "recserve" / "demo"


def fingerprint(data: Path | None) -> str:
    """Name of a demo: a digest of its data, its recipe and the code that makes bundles.

    Raises SchemaError if the folder lacks one of the two files.
    """
    digest = hashlib.sha256(f"{NUM_CODES} {MINUTES} {RECOMMENDER} {RANKER} {LANGUAGE}".encode())
    package = Path(__file__).parents[1]
    sources = []
    for room in ("bundle", "features", "models", "training"):
        sources += sorted((package / room).rglob("*.py"))
    if data is None:
        digest.update(repr(SYNTHETIC).encode())
    else:
        sources += [data / "items.parquet", data / "events.parquet"]
    for source in sources:
        if not source.is_file():
            raise SchemaError(f"{source}: no such file; the demo needs it")
        with source.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def free_port(wanted: int, tries: int = 20) -> int:
    """The wanted port of loopback, or the next free one. Raises OSError after `tries` ports."""
    for port in range(wanted, min(wanted + tries, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port
    raise OSError(f"ports {wanted} to {wanted + tries - 1} of {HOST} are taken; name another")

"""`recserve demo`: builds, trains and serves small models in about a minute on two free cores.

The demo has four steps:

1. It builds a bundle from synthetic data, or from the user's Parquet files.
2. It trains a recommender and a ranker, and then a tiny language model on the prose of Python's
   manual. The number of steps is fixed, so a slow machine gets the same models later. Only files of
   the user's own, which may be large, have a time limit too.
3. It prints one slate, one ranking and one completion.
4. It starts the server.

The models stay in the user's cache folder under a digest of their data, so that a second run
starts at once.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.cli.terminal import format_count, ranking_table, slate_table, timing_line, titles
from recserve.config import ServerConfig
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.features.tables.input_table import part_paths
from recserve.features.tables.parquet import SchemaError
from recserve.files import new_folder
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
from recserve.service.text.loader import EXAMPLE_PROMPT, TextSettings, load_text
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.ranker.ranker import RankerRecipe, train_ranker
from recserve.training.recommender.recommender import ITEMS_MASKED, train_recommender
from recserve.training.text.language_model import (
    LanguageRecipe,
    standard_library,
    train_language_model,
)
from recserve.training.text.python_manual import python_manual

HOST = "127.0.0.1"
EPOCHS = {"recommender": 2, "ranker": 1, "llm": 8}
OWN_DATA_MINUTES = 1.0
SYNTHETIC = SyntheticOptions(num_items=2000, num_users=3000, mean_events=30)
# Smaller than the model of `recserve train`, so that its epochs take some ten seconds each.
RECOMMENDER = replace(
    ITEMS_MASKED,
    hidden_size=96,
    num_heads=3,
    intermediate_size=256,
    validation_users=500,
    validation_width=10,
    choice_users=200,
)
RANKER = RankerRecipe(hidden_size=48, num_heads=3, validation_users=300)
LANGUAGE = LanguageRecipe(num_layers=2, steps=50, batch=8, window=128)
SOURCES_BYTES = 1_000_000
DRAFTER = "suffix"
PROMPT = "When an exception is raised,"
NUM_TOKENS = 40
# A model this small repeats one clause for ever if it decodes greedily without a penalty.
REPETITION_PENALTY = 1.1
LLM = "llm"
CPU = torch.device("cpu")
NUM_CODES = 64
SLATE_SIZE = 10
NUM_CANDIDATES = 200
ROWS_SHOWN = 10
LAST_EVENTS = 5


def run_demo(data: Path | None, port: int, once: bool) -> int:
    """Runs the whole demo.

    Args:
        data: Folder with items.parquet and events.parquet; None means synthetic data.
        port: Port of the server, or the first one to try.
        once: Exits after printing the answers, without starting the server.

    Returns:
        The exit status.

    Raises:
        SchemaError: If a file or a column is missing.
        BadRowError: If the data has unusable rows.
        OSError: If no port near `port` is free.
    """
    console = Console(highlight=False)
    folder = prepare(data, console)
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
    """Returns the folder of the demo for this data, and prints answers of its bundle.

    Builds and trains what does not exist. The answers come first: they need no language model.
    """
    folder = cache_folder() / fingerprint(data)
    if folder.is_dir():
        say(console, f"using the bundle of an earlier run: {folder / 'bundle'}")
        show_answers(folder / "bundle", console)
        return folder
    with new_folder(folder) as making:
        make_bundle(data, making, console)
        show_answers(making / "bundle", console)
        make_llm(making / LLM, console)
    say(console, f"saved for the next run: {folder / 'bundle'}")
    return folder


def make_bundle(data: Path | None, folder: Path, console: Console) -> None:
    """Builds `folder/bundle` and trains its models; prints a rule for each step."""
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
        minutes = None if data is None else OWN_DATA_MINUTES
        bundle, limits = Bundle.open(out), announce(name, console, minutes)
        with one_thread():
            if name == "recommender":
                report = train_recommender(bundle, limits, RECOMMENDER, console)
            else:
                report = train_ranker(bundle, limits, RANKER, console)
        tell(report, console)


def make_llm(folder: Path, console: Console) -> None:
    """Trains a tiny language model."""
    limits = announce("llm", console)
    with one_thread():
        texts = python_manual() or standard_library(SOURCES_BYTES)
        tell(train_language_model(texts, folder, limits, LANGUAGE, console), console)
    (folder / EXAMPLE_PROMPT).write_text(PROMPT, encoding="utf-8")


def announce(name: str, console: Console, minutes: float | None = None) -> TrainOptions:
    """Prints a rule for the next training, and returns its length as options."""
    epochs = EPOCHS[name]
    limit = "" if minutes is None else f", at most {minutes:g} min"
    console.rule(f"{name}, {format_count(epochs, 'epoch')}{limit}", align="left")
    return TrainOptions(epochs=epochs, max_minutes=minutes)


def tell(report: TrainReport, console: Console) -> None:
    """Prints the result of a training run."""
    metrics = ", ".join(f"{metric} {value:.4f}" for metric, value in report.metrics.items())
    say(
        console,
        f"trained {format_count(report.epochs, 'epoch')} in {report.seconds:.0f} s: {metrics}",
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch on one thread, because matrices this small gain little from a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def show_answers(bundle: Path, console: Console) -> None:
    """Prints one user's last events, a slate and a ranking, each with its times."""
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
        say(console, f"again, prefix cached: {timing_line(again.timing_ms)}")

        console.rule(f"rank {len(offered)} candidates", align="left")
        order, order_again = ranking(service, name, offered), ranking(service, name, offered)
        console.print(ranking_table(order, title, ROWS_SHOWN))
        say(console, timing_line(order.timing_ms, order.degraded))
        say(console, f"again, prefix cached: {timing_line(order_again.timing_ms)}")


def show_completion(folder: Path, console: Console) -> None:
    """Prints a completion, and its times without drafts, with drafts, and when asked again."""
    console.rule(f"completion, drafted by {DRAFTER}", align="left")
    with Service.of_text(load_text(TextSettings(folder, drafters=(DRAFTER,)), CPU)) as service:
        completion(service, "none")
        plain, plain_s = completion(service, "none")
        say(console, PROMPT + plain.choices[0].text)
        say(console, f"{NUM_TOKENS} tokens in {plain_s * 1e3:.0f} ms without drafts")
        gains = dict[str, float]()
        for times in ("first time", "asked again"):
            drafted, drafted_s = completion(service, DRAFTER)
            same = drafted.choices[0].text == plain.choices[0].text
            counts = drafted.metrics.speculative_decoding if drafted.metrics else None
            assert counts is not None
            gains[times] = plain_s / drafted_s
            line = f"{times}: {'the same' if same else 'another'} text in {drafted_s * 1e3:.0f} ms"
            line += f", {counts.mean_acceptance_length:.1f} tokens per draft"
            if counts.num_paused_steps:
                paused = format_count(counts.num_paused_steps, "step")
                line += f"; {paused} without a draft, because drafts did not pay"
            say(console, line)
        say(console, drafts_line(gains))


def drafts_line(gains: Mapping[str, float]) -> str:
    """Returns one line that says where drafts pay.

    Args:
        gains: Time without drafts relative to the time with them.
    """
    paying = [f"{times} x{gain:.1f}" for times, gain in gains.items() if gain > 1]
    if paying:
        return f"drafts pay here: {', '.join(paying)} as fast as without"
    return "drafts do not pay here: a model this small writes a token as fast as it checks a draft"


def completion(service: Service, drafter: str) -> tuple[CompletionResponse, float]:
    """Continues the prompt; returns the response and its time in seconds."""
    began = time.monotonic()
    body = CompletionRequest(
        prompt=PROMPT,
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        repetition_penalty=REPETITION_PENALTY,
        ignore_eos=True,
        speculation=SpeculationOptions(drafter=drafter),
    )
    answer = service.text.begin_completion(body).wait()
    assert isinstance(answer, CompletionResponse)
    return answer, time.monotonic() - began


def slate(service: Service, user_id: str) -> RecommendResponse:
    """Returns items that the user has not seen."""
    return service.recommend(RecommendRequest(user=UserRef(id=user_id), k=SLATE_SIZE))


def ranking(service: Service, user_id: str, item_ids: list[str]) -> RankResponse:
    """Ranks the items for the user."""
    candidates = [Candidate(item_id=item_id) for item_id in item_ids]
    return service.rank(RankRequest(user=UserRef(id=user_id), candidates=candidates))


def say(console: Console, line: str) -> None:
    """Prints a line without markup and without wrapping."""
    console.print(Text(line), soft_wrap=True)


def cache_folder() -> Path:
    """Returns the folder of all demos, under XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "recserve" / "demo"


def fingerprint(data: Path | None) -> str:
    """Returns the folder name of a demo: a digest of its data, its recipe and the training code.

    Raises:
        SchemaError: If the folder lacks one of the two files.
    """
    digest = hashlib.sha256(f"{NUM_CODES} {EPOCHS} {RECOMMENDER} {RANKER} {LANGUAGE}".encode())
    package = Path(__file__).parents[1]
    sources = []
    for folder in ("bundle", "features", "models", "training"):
        sources += sorted((package / folder).rglob("*.py"))
    if data is None:
        digest.update(repr(SYNTHETIC).encode())
    else:
        for table in (data / "items.parquet", data / "events.parquet"):
            if not table.exists():
                raise SchemaError(f"{table}: no such file; the demo needs it")
            sources += part_paths(table)
    for source in sources:
        with source.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def free_port(wanted: int, tries: int = 20) -> int:
    """Returns the wanted port of the loopback address, or the next free one.

    Raises:
        OSError: If all `tries` ports are taken.
    """
    for port in range(wanted, min(wanted + tries, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port
    raise OSError(f"ports {wanted} to {wanted + tries - 1} of {HOST} are taken; name another")

"""What a retrain does without a server: collects, builds, trains, compares with what is served.

    collect -> build -> train -> gate        (publish, load, watch: `recserve.cli.retrain`)

Each step writes its result into the folder of the run and is skipped when it is there, so a run
that was killed goes on where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta, field

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.bundle.kept_ids import freeze_changes, open_version
from recserve.evaluation.accuracy import NOT_FOUND, ranks_of, user_metrics
from recserve.evaluation.bundle_slates import EXHAUSTIVE, BundleSlates
from recserve.evaluation.cases import Cases, leave_one_out_cases
from recserve.evaluation.evaluation import EvaluationData, auto_of_bundle, make_slates
from recserve.evaluation.intervals import difference_interval
from recserve.evaluation.untrained import TrainingData
from recserve.features.catalog.item_journal import ItemJournal
from recserve.features.history.stores import open_store, split_ttl
from recserve.features.tables.events import DAY_US, EventLog
from recserve.files import UnreadableFile, check_format, read_json_object, whole_file
from recserve.schemas.items import StrictStruct
from recserve.service.event_types import EventTypes
from recserve.service.history_export import export_events
from recserve.training.card import count_collisions, group_members
from recserve.training.options import TrainOptions

Log = Callable[[str], None]
MODELS = ("recommender", "drafter", "retriever", "ranker")
FORMAT = "recserve-retrain/1"
RECORD = "run.json"
MAX_TRIES = 10
GIVEN_UP = "given up: the settings have changed"
Share = Annotated[float, Meta(ge=0, le=1)]
BundleName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z")]


class ModelTraining(StrictStruct, frozen=True, kw_only=True):
    """How one model is trained; None means the recipe's own value.

    Attributes:
        epochs: Number of epochs.
        max_minutes: Time limit.
        warm_start: Whether a drafter or a retriever may start from the served one's weights.
        half_life_days: For the recommender: an event counts half as much as one that is so many
            days newer.
    """

    epochs: Annotated[int, Meta(ge=1)] | None = None
    max_minutes: Annotated[float, Meta(gt=0)] | None = None
    warm_start: bool = True
    half_life_days: Annotated[float, Meta(gt=0)] | None = None


class GateLimits(StrictStruct, frozen=True, kw_only=True):
    """When a new bundle may be served.

    Attributes:
        metric: `ndcg@10` and the like, of slates without seen items.
        days: Only held-out events of the newest days count.
        users: Most users, drawn with a fixed seed.
        margin: The paired 95 % interval of the difference may reach so far below zero, as a share
            of the served bundle's figure.
        min_users: Fewest users.
        beats_popularity: Whether the new bundle must be better than the most popular items.
        max_items_lost: Largest share of the served bundle's items that the new one lacks.
        max_type_shift: Largest distance of the shares of event types, half the sum of differences.
        max_value_shift: Largest change of a type's mean value, in its standard deviations, of
            which each counts as a tenth of the mean at least.
        group_margin: As `margin`, for each group of users and items of the audit card. A group is
            worse if its whole interval is below this bound.
        min_coverage: Least number of items in all slates, as a share of the served bundle's.
        max_collision_rise: How far the share of items without codes of their own may rise.
    """

    metric: Annotated[str, Meta(pattern=r"^(ndcg|recall)@[1-9][0-9]{0,2}\Z")] = "ndcg@10"
    days: Annotated[float, Meta(gt=0)] = 7.0
    users: Annotated[int, Meta(ge=1)] = 5000
    margin: Share = 0.05
    min_users: Annotated[int, Meta(ge=2)] = 50
    beats_popularity: bool = True
    max_items_lost: Share = 0.2
    max_type_shift: Share = 0.3
    max_value_shift: Annotated[float, Meta(gt=0)] = 1.0
    group_margin: Share = 0.2
    min_coverage: Share = 0.5
    max_collision_rise: Share = 0.1


class Guardrails(StrictStruct, frozen=True, kw_only=True):
    """What is watched after a load; the old bundle returns if a limit is exceeded.

    Attributes:
        minutes: Time of the watch, and at most that of the comparison before it.
        longest_minutes: The watch goes on so long while there are less than `min_requests` answers.
        every_s: Time between two looks.
        min_requests: Fewest answers for a comparison.
        max_failed: Largest share of failed requests above that before the load.
        max_degraded: Largest share of degraded answers above that before the load.
        max_p99_factor: Largest p99 of the time of an answer, relative to that before the load.
        min_outcome_factor: Least number of outcomes per slate in the slate log, relative to that
            before the load; 0 does not look.
    """

    minutes: Annotated[float, Meta(ge=0)] = 15.0
    longest_minutes: Annotated[float, Meta(ge=0)] = 60.0
    every_s: Annotated[float, Meta(gt=0)] = 10.0
    min_requests: Annotated[int, Meta(ge=1)] = 100
    max_failed: Share = 0.01
    max_degraded: Share = 0.05
    max_p99_factor: Annotated[float, Meta(gt=0)] = 3.0
    min_outcome_factor: Annotated[float, Meta(ge=0)] = 0.7


class RetrainConfig(StrictStruct, frozen=True, kw_only=True):
    """The file of `recserve retrain`. Paths are relative to the folder of the file.

    Attributes:
        items: File of items, or the folder of its parts.
        events: Files of events, such as the first one, or folders of parts.
        bundles_dir: The server's folder of bundles; new ones get names of `name` and a number.
        runs: Folder of the runs.
        event_log: Folder of the server's event log.
        slate_log: Folder of its slate log, for the ranker.
        store: URL of its history store, whose events are exported too.
        journal: Its folder of item changes.
        catalog_log: Redis that has them instead, where several servers share them: its URL, or
            `redis` for that of `store`.
        catalog_name: Name of this log.
        served: Name of the bundle that is served; None asks the server.
        url: Address of the server; None stops after the gate.
        metrics: Addresses of the servers that are watched; None means `url`. A name with several
            addresses stands for all of them, as that of a headless service of Kubernetes.
        fleet: Whether all servers that share the log of item changes load the bundle.
        link: Name of a link in `bundles_dir` that leads to the served bundle, for restarts.
        name: First part of the names of new bundles.
        holdout_users: Most users whose last two events are held out of the training, to choose the
            best epoch and for the gate. All others train with their newest events.
        new_ids: Whether the quantiser is trained anew, so that items get other ids.
        embeddings: File of the user's own item vectors.
        columns: Names of columns in the files by our name.
        on_bad_rows: What to do with unusable rows.
        train: Which models are trained, and how.
        device: Where models are trained.
        seed: Seed of the training.
        gate: When a new bundle may be served.
        guard: What is watched after the load.
        keep_runs: Folders of finished runs that are kept.
        keep_bundles: Published bundles that are kept, the newest; None keeps all. One that is
            served, was served before, or has the link is kept too.
    """

    items: str
    bundles_dir: str
    runs: str
    events: list[str] = []
    event_log: str | None = None
    slate_log: str | None = None
    store: str | None = None
    journal: str | None = None
    catalog_log: str | None = None
    catalog_name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,64}\Z")] = "items"
    served: BundleName | None = None
    url: str | None = None
    metrics: list[str] | None = None
    fleet: bool = False
    link: BundleName | None = None
    name: BundleName = "retrained"
    holdout_users: Annotated[int, Meta(ge=1)] = 10_000
    new_ids: bool = False
    embeddings: str | None = None
    columns: dict[str, str] = {}
    on_bad_rows: Literal["error", "skip"] = "skip"
    train: dict[Literal["recommender", "drafter", "retriever", "ranker"], ModelTraining] = field(
        default_factory=lambda: {"recommender": ModelTraining()}
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Annotated[int, Meta(ge=0)] = 0
    gate: GateLimits = GateLimits()
    guard: Guardrails = Guardrails()
    keep_runs: Annotated[int, Meta(ge=1)] = 10
    keep_bundles: Annotated[int, Meta(ge=2)] | None = 10

    def __post_init__(self) -> None:
        if not self.events and self.event_log is None and self.store is None:
            raise ValueError("events: name files of events, an event_log or a store")
        if self.served is None and self.url is None:
            raise ValueError("served: is required without url; it names the bundle to compare with")
        if self.journal is not None and self.catalog_log is not None:
            raise ValueError("journal: the servers have item changes there or in catalog_log")
        for name, how in self.train.items():
            if name != "recommender" and how.half_life_days is not None:
                raise ValueError(f"train.{name}.half_life_days: only the recommender has it")
        if self.link is not None and self.link == self.name:
            raise ValueError("link: is the first part of the names of bundles; take another name")

    @property
    def catalog_url(self) -> str | None:
        """URL of the Redis that has the item changes. Raises ValueError."""
        if self.catalog_log != "redis":
            return self.catalog_log
        if self.store is None:
            raise ValueError("catalog_log: redis is the Redis of store; set store")
        return split_ttl(self.store)[0]

    @property
    def digest(self) -> str:
        """Names the settings that steps up to the gate depend on."""
        own = msgspec.structs.asdict(self)
        for name in ("url", "metrics", "link", "guard", "keep_runs", "keep_bundles"):
            del own[name]
        return hashlib.sha256(msgspec.json.encode(own)).hexdigest()[:16]


@dataclass
class Run:
    """A run and what its steps have found.

    Attributes:
        folder: Folder of the run.
        record: Results by step, and `outcome` at the end.
    """

    folder: Path
    record: dict[str, Any]

    @staticmethod
    def latest(folder: Path, settings: str) -> Run:
        """Returns the latest run if it has not ended, else a new one.

        Args:
            folder: Folder of the runs.
            settings: Names the settings. A run of other ones is given up.

        Raises:
            UnreadableFile: If the record of the latest run is damaged or of another version.
        """
        folder.mkdir(parents=True, exist_ok=True)
        numbers = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
        if numbers:
            last = folder / f"{numbers[-1]:04}"
            file = last / RECORD
            record: dict[str, Any] = {"format": FORMAT, "began_us": time.time_ns() // 1000}
            if file.exists():
                record = read_json_object(file)
                check_format(record.get("format"), FORMAT, file)
                _check_record(record, file)
            if "outcome" not in record:
                run = Run(last, record)
                if record.setdefault("settings", settings) == settings:
                    return run
                run.note("outcome", GIVEN_UP)
        new = folder / f"{(numbers[-1] if numbers else 0) + 1:04}"
        new.mkdir()
        run = Run(new, {"format": FORMAT, "settings": settings})
        run.note("began_us", time.time_ns() // 1000)
        return run

    @property
    def number(self) -> int:
        """Number of the run."""
        return int(self.folder.name)

    def step(self, name: str, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the result of a step, which is done unless an earlier process has done it.

        Raises:
            ValueError: If MAX_TRIES processes have begun the step, and none has finished it.
        """
        if name not in self.record:
            tries = self.record.get("tries", {})
            if tries.get(name, 0) >= MAX_TRIES:
                raise ValueError(f"{name}: {MAX_TRIES} processes have ended in this step")
            self.note("tries", tries | {name: tries.get(name, 0) + 1})
            started = time.time()
            found = do()
            self.record[name] = found | {"seconds": round(time.time() - started, 1)}
            self.save()
        result: dict[str, Any] = self.record[name]
        return result

    def note(self, name: str, value: Any) -> None:
        """Records a value that later processes read."""
        self.record[name] = value
        self.save()

    def save(self) -> None:
        """Writes the record."""
        with whole_file(self.folder / RECORD) as new:
            new.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")


# Values of a record that are no dictionaries.
TEXTS, NUMBERS = ("format", "settings", "served", "name", "outcome"), ("began_us",)


def _check_record(record: Mapping[str, Any], file: Path) -> None:
    """Raises UnreadableFile if a value of a run's record is of another type."""
    for name, value in record.items():
        kind = str if name in TEXTS else int if name in NUMBERS else dict
        if type(value) is not kind:
            raise UnreadableFile(f"{file}: {name} is {value!r:.80}; expected {kind.__name__}")
    if any(type(tries) is not int for tries in record.get("tries", {}).values()):
        raise UnreadableFile(f"{file}: tries is {record['tries']!r:.80}; expected whole numbers")


def collect(config: RetrainConfig, run: Run, served: Bundle) -> dict[str, Any]:
    """Takes what servers have recorded into the run, so that later steps have fixed inputs."""
    found: dict[str, Any] = {}
    for name, folder in (("event_log", config.event_log), ("slate_log", config.slate_log)):
        if folder is not None and (name == "event_log" or "ranker" in config.train):
            found[f"{name}_files"] = take_files(name, Path(folder), run.folder / name)
    items = run.folder / "items"
    shutil.rmtree(items, ignore_errors=True)
    found["item_changes"] = collect_changes(config, served, items)
    if config.store is not None:
        export = run.folder / "exported"
        shutil.rmtree(export, ignore_errors=True)
        store = open_store(config.store)
        try:
            kinds = served.manifest.event_kinds
            types = EventTypes(store, kinds)
            version = open_version(served, items)
            found["exported"] = vars(export_events(store, types, version, export))
        finally:
            store.close()
    return found


def take_files(name: str, source: Path, target: Path) -> int:
    """Links the files of a log to a folder, or copies them. Returns their number.

    A server replaces files of its log, and never changes one.
    """
    if not source.is_dir():
        raise ValueError(f"{name}: there is no folder {source}")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in sorted(source.glob("*.parquet")):
        with contextlib.suppress(FileNotFoundError):  # its server has deleted it
            try:
                os.link(path, target / path.name)
            except FileNotFoundError:
                raise
            except OSError:  # another file system
                shutil.copy2(path, target / path.name)
    return len(list(target.iterdir()))


def collect_changes(config: RetrainConfig, served: Bundle, out: Path) -> int:
    """Writes the changes of the served items as a journal. Returns their number."""
    if config.catalog_log is None:
        if config.journal is None:
            return 0
        file = Path(config.journal) / f"{served.manifest.catalog_version}.jsonl"
        return freeze_changes(served, ItemJournal(file).read(), out)
    from recserve.features.catalog.redis_log import open_log

    url = config.catalog_url
    assert url is not None
    log = open_log(url, served.catalog(), config.catalog_name)
    try:
        return freeze_changes(served, log.read(), out)
    finally:
        log.close()


def build(config: RetrainConfig, run: Run, served: Bundle, log: Log) -> dict[str, Any]:
    """Builds the bundle of the run."""
    out = run.folder / "bundle"
    shutil.rmtree(out, ignore_errors=True)
    sources = [Path(path) for path in config.events]
    logs = [run.folder / "event_log", run.folder / "exported"]
    sources += [path for path in logs if path.is_dir() and any(path.iterdir())]
    if not sources:
        raise ValueError("there are no events yet: the event log has no file")
    manifest = served.manifest
    options = BuildOptions(
        Path(config.items),
        tuple(sources),
        out,
        None if config.embeddings is None else Path(config.embeddings),
        seed=config.seed,
        columns=config.columns,
        on_bad_rows=config.on_bad_rows,
        event_kinds=manifest.event_kinds,
        event_weights=manifest.event_weights,
        holdout_users=config.holdout_users,
    )
    if not config.new_ids:
        options = replace(options, ids_from=served.root, journal=run.folder / "items")
    lines: list[str] = []

    def note(line: str) -> None:
        lines.append(line)
        log(line)

    report = build_bundle(options, note)
    return {
        "catalog_version": report.catalog_version,
        "items": report.num_items,
        "users": report.num_users,
        "events": report.num_events,
        "lines": [line for line in lines if ": column " not in line],
    }


def train(config: RetrainConfig, run: Run, served: Bundle, model: str, log: Log) -> dict[str, Any]:
    """Trains one model of the run's bundle, from its checkpoint if there is one."""
    from recserve.training.item_drafters.draft_head import train_drafter
    from recserve.training.ranker.ranker import train_ranker
    from recserve.training.recommender.recommender import train_recommender
    from recserve.training.recommender.retriever import train_retriever

    how = config.train[model]  # type: ignore[index]
    bundle = Bundle.open(run.folder / "bundle")
    sections = {"drafter": "drafters/speculative"}
    section = sections.get(model, model)
    options = TrainOptions(
        epochs=how.epochs,
        max_minutes=how.max_minutes,
        seed=config.seed,
        device=config.device,
        resume=True,
        half_life_days=how.half_life_days,
        start_from=(
            served.root
            if how.warm_start and model in ("drafter", "retriever") and served.has(section)
            else None
        ),
    )
    if model == "ranker":
        key = os.environ.get("RECSERVE_SIGNING_KEY")
        slates = None if config.slate_log is None else run.folder / "slate_log"
        if slates is not None and not any(slates.glob("slates-*.parquet")):
            log("the slate log has no slates yet; the ranker draws its negatives")
            slates = None
        report = train_ranker(
            bundle,
            options,
            slate_log=slates,
            signing_key=None if key is None else key.encode(),
        )
    elif model == "recommender":
        report = train_recommender(bundle, options)
    elif model == "drafter":
        report = train_drafter(bundle, options)
    else:
        report = train_retriever(bundle, options)
    return {"epochs": report.epochs, "best_epoch": report.best_epoch, "validation": report.metrics}


def judge(config: RetrainConfig, run: Run, served: Bundle) -> dict[str, Any]:
    """Compares the run's bundle with the served one. `faults` has why it may not be served."""
    limits = config.gate
    new = Bundle.open(run.folder / "bundle")
    new.verify()
    faults = [
        f"the served bundle has a {model}, and the new one none"
        for model in ("recommender", "ranker")
        if served.has(model) and not new.has(model)
    ]
    shift = drift(served, new)
    bounds = {
        "items_lost": limits.max_items_lost,
        "type_shift": limits.max_type_shift,
        "value_shift": limits.max_value_shift,
    }
    found: dict[str, Any] = {
        "drift": shift,
        "bounds": bounds
        | {
            "group_margin": limits.group_margin,
            "min_coverage": limits.min_coverage,
            "max_collision_rise": limits.max_collision_rise,
        },
    }
    for name, limit in bounds.items():
        if shift[name] > limit:
            faults.append(f"{name} is {shift[name]:.3f}; at most {limit:g} is allowed")
    if new.has("recommender") and served.has("recommender"):
        device = TrainOptions(device=config.device).torch_device()
        found |= compare(served, new, limits, device, run.record["began_us"])
        low, old = found["interval"][0], found["served"]
        if found["users"] < limits.min_users:
            faults.append(
                f"{found['users']} users have a held-out event in the newest {limits.days:g} days; "
                f"at least {limits.min_users} are needed"
            )
        elif low < -limits.margin * old:
            faults.append(
                f"{limits.metric} may be worse: {found['new']:.4f} against {old:.4f}, difference "
                f"{found['difference']:+.4f} ({low:+.4f} to {found['interval'][1]:+.4f}); "
                f"the lower bound may be {-limits.margin * old:+.4f}"
            )
        low, high = found["over_popularity"]
        if limits.beats_popularity and low <= 0:
            faults.append(
                f"{limits.metric} is not above that of the most popular items: the difference is "
                f"between {low:+.4f} and {high:+.4f}"
            )
        faults += card_faults(found["card"], limits)
    return found | {"faults": faults}


def card_faults(card: Mapping[str, Any], limits: GateLimits) -> list[str]:
    """Returns which bounds the audit card exceeds."""
    faults = []
    for name, group in card["groups"].items():
        bound = -limits.group_margin * group["served"]
        if group["interval"][1] < bound:
            faults.append(
                f"{limits.metric} of {name} is worse: {group['new']:.4f} against "
                f"{group['served']:.4f}; the upper bound of the difference is "
                f"{group['interval'][1]:+.4f}, and {bound:+.4f} is allowed"
            )
    shown, before = card["items_shown"]
    if shown < limits.min_coverage * before:
        faults.append(
            f"the slates of all users have {shown} items, {before} before; at least "
            f"{limits.min_coverage:g} of them are needed"
        )
    share, was = card["collisions"]
    if share > was + limits.max_collision_rise:
        faults.append(
            f"{share:.1%} of the items share their codes, {was:.1%} before; at most "
            f"{limits.max_collision_rise:.1%} more are allowed"
        )
    return faults


def drift(served: Bundle, new: Bundle) -> dict[str, float]:
    """Returns how far catalogue, event types and values of a new bundle are from the old one's."""
    old_items, new_items = (set(one.catalog().items.ids) for one in (served, new))
    shares, values = zip(*(_by_type(one) for one in (served, new)), strict=True)
    names = {*shares[0], *shares[1]}
    moved = 0.5 * sum(abs(shares[0].get(n, 0) - shares[1].get(n, 0)) for n in names)
    shifts = [
        abs(values[1][name][0] - mean) / max(deviation, 0.1 * abs(mean), 1e-6)
        for name, (mean, deviation) in values[0].items()
        if name in values[1]
    ]
    return {
        "items_lost": len(old_items - new_items) / max(len(old_items), 1),
        "items_new": len(new_items - old_items) / max(len(new_items), 1),
        "type_shift": float(moved),
        "value_shift": float(max(shifts, default=0.0)),
    }


def _by_type(bundle: Bundle) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Returns the share of each event type, and mean and deviation of its values."""
    events = bundle.all_events()
    counts = np.bincount(events.types, minlength=len(events.type_names))
    shares = dict(zip(events.type_names, (counts / max(counts.sum(), 1)).tolist(), strict=True))
    values = {}
    for number, name in enumerate(events.type_names):
        own = events.values[events.types == number]
        if own.size:
            values[name] = (float(own.mean()), float(own.std()))
    return shares, values


def compare(
    served: Bundle,
    new: Bundle,
    limits: GateLimits,
    device: torch.device | str = "cpu",
    now_us: int = 1 << 62,
) -> dict[str, Any]:
    """Returns the metric of both bundles for the same users, whose newest event is held out.

    Both see the new bundle's histories. An item that a bundle does not have is missing from its
    histories, and is a miss where it is the held-out one. Clocks of clients may be wrong: events
    after `now_us` do not say which days are the newest.
    """
    events = new.events()
    cases = leave_one_out_cases(events, "test")
    if events.has_timestamps:
        past = events.times[events.times <= now_us]
        newest = int(past.max()) if past.size else int(events.times.min())
        since = newest - int(limits.days * DAY_US)
        cases = cases.take(np.flatnonzero(events.times[cases.stops] >= since))
    cases = cases.sample(limits.users)
    if not len(cases):
        raise ValueError(f"no user has a held-out event in the newest {limits.days:g} days")
    catalogs = new.catalog(), served.catalog()
    place = {item: row for row, item in enumerate(catalogs[1].items.ids)}
    rows = np.array([place.get(item, -1) for item in catalogs[0].items.ids], np.int64)
    made = (
        _metric(new, cases, limits.metric, device),
        _metric(served, translate(cases, rows), limits.metric, device),
    )
    figures, shown = [values for values, _ in made], [number for _, number in made]
    train, held_times = events.leave_one_out().train, events.times[cases.stops]
    training = TrainingData(train, catalogs[0].vectors, cases, held_times, 1)
    data, groups = EvaluationData(catalogs[0], events, cases, training), dict[str, Any]()
    for name, (_, inside) in group_members(data).items():
        if inside.sum() > 1:
            own = [values[inside] for values in figures]
            groups[name] = {
                "users": int(inside.sum()),
                "new": float(own[0].mean()),
                "served": float(own[1].mean()),
                "interval": list(difference_interval(own[0] - own[1])),
            }
    card = {
        "groups": groups,
        "items_shown": shown,
        "collisions": [count_collisions(each, np.zeros(1, np.int64)).items for each in catalogs],
    }
    popular = _popular_metric(events, cases, len(rows), limits.metric)
    differences = figures[0] - figures[1]
    return {
        "metric": limits.metric,
        "users": len(cases),
        "new": float(figures[0].mean()),
        "served": float(figures[1].mean()),
        "difference": float(differences.mean()),
        "interval": list(difference_interval(differences)),
        "popular": float(popular.mean()),
        "over_popularity": list(difference_interval(figures[0] - popular)),
        "card": card,
    }


def translate(cases: Cases, rows: np.ndarray) -> Cases:
    """Returns cases in the item rows of another catalogue.

    Args:
        cases: The cases.
        rows: [I] the other row of each item; -1 for an item that the other catalogue lacks. Such
            items leave the histories; a held-out one is -1.
    """
    other = rows[cases.rows]
    before = np.concatenate([[0], np.cumsum(other >= 0)])
    return replace(
        cases,
        rows=other[other >= 0],
        starts=before[cases.starts],
        stops=before[cases.stops],
        held=rows[cases.held],
    )


def _metric(
    bundle: Bundle, cases: Cases, metric: str, device: torch.device | str
) -> tuple[np.ndarray, int]:
    """Returns [n] the metric of each case, of slates without seen items as they are served.

    And the number of items in all slates.
    """
    cutoff = int(metric.partition("@")[2])
    answers = BundleSlates.open(bundle, device)
    strategy, weight = "beam" if answers.autoregressive else EXHAUSTIVE, None
    if chosen := auto_of_bundle(bundle, answers):
        setting = chosen["filtered"]
        strategy, weight = answers.as_served(setting.strategy), setting.dense_weight
    way = answers.options(strategy, max(50, cutoff), True, weight)
    # A user of whom the bundle knows no item gets nothing of the model.
    known = np.flatnonzero(cases.stops > cases.starts)
    values, shown = np.zeros(len(cases)), 0
    if known.size:
        chosen_cases = cases.take(known)
        made = make_slates(
            chosen_cases, lambda which, _: answers.slates(chosen_cases, which, cutoff, way), True
        )
        hits = (made == chosen_cases.held[:, None]) & (chosen_cases.held >= 0)[:, None]
        ranks = np.where(hits.any(1), hits.argmax(1), NOT_FOUND)
        values[known] = user_metrics(ranks, [cutoff])[metric]
        shown = int(np.unique(made[made >= 0]).size)
    return values, shown


def _popular_metric(events: EventLog, cases: Cases, num_items: int, metric: str) -> np.ndarray:
    """Returns [n] the metric of the most frequent items that a user has not seen."""
    cutoff = int(metric.partition("@")[2])
    order = np.argsort(-events.leave_one_out().train.counts(num_items), kind="stable")
    made = np.full((len(cases), cutoff), -1, np.int64)
    for case in range(len(cases)):
        seen = cases.history(case)
        first = order[: cutoff + seen.size]
        first = first[~np.isin(first, seen)][:cutoff]
        made[case, : first.size] = first
    return user_metrics(ranks_of(made, cases.held), [cutoff])[metric]


def publish(config: RetrainConfig, run: Run) -> dict[str, Any]:
    """Moves the run's bundle into the folder of bundles, under a name that no other one has."""
    folder, source = Path(config.bundles_dir), run.folder / "bundle"
    if "name" not in run.record:  # else an earlier process may have published it
        number = max([run.number, *(n + 1 for n in list_published(config))])
        run.note("name", f"{config.name}-{number:04}")
    target = folder / run.record["name"]
    if not target.exists():
        aside = folder / f".{target.name}.new"
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(source, aside)
        aside.replace(target)
    return {"name": target.name}


def list_published(config: RetrainConfig) -> dict[int, Path]:
    """Returns the bundles that runs have published, by number in ascending order."""
    pattern = re.compile(rf"{re.escape(config.name)}-(\d{{4,}})")
    names = ((pattern.fullmatch(path.name), path) for path in Path(config.bundles_dir).iterdir())
    return dict(sorted((int(name[1]), path) for name, path in names if name is not None))


def delete_old_bundles(config: RetrainConfig, run: Run) -> None:
    """Deletes published bundles but the newest, and those that a server or the link may open."""
    if config.keep_bundles is None:
        return
    folder = Path(config.bundles_dir)
    used = {run.record.get("served"), run.record.get("name")}
    if config.link is not None:
        used.add((folder / config.link).resolve().name)
    for path in [*list_published(config).values()][: -config.keep_bundles]:
        if path.name not in used and not path.is_symlink():
            aside = folder / f".{path.name}.old"
            shutil.rmtree(aside, ignore_errors=True)
            path.replace(aside)  # no server opens half of a bundle
    for path in folder.glob(f".{config.name}-*.old"):
        shutil.rmtree(path, ignore_errors=True)


def switch_link(config: RetrainConfig, name: str) -> None:
    """Lets the link of the settings lead to a bundle, so that a restarted server opens it."""
    if config.link is None:
        return
    link = Path(config.bundles_dir) / config.link
    if link.exists() and not link.is_symlink():
        raise ValueError(f"link: {link} is no link; remove it or take another name")
    aside = link.with_name(f".{config.link}.new")
    aside.unlink(missing_ok=True)
    aside.symlink_to(name)
    aside.replace(link)


def summary(record: Mapping[str, Any]) -> str:
    """Returns one line about a run."""
    gate = record.get("gate", {})
    figures = ""
    if "difference" in gate:
        low, high = gate["interval"]
        figures = (
            f", {gate['metric']} {gate['new']:.4f} against {gate['served']:.4f} "
            f"({low:+.4f} to {high:+.4f})"
        )
    return f"{record.get('outcome', 'not finished')}{figures}"

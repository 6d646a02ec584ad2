"""Command `retrain`: a new bundle from what servers have recorded, served if it is no worse.

    collect -> build -> train -> gate -> publish -> load -> watch -> (roll back)

A run that was killed goes on at its step. A run's folder has `run.json` and `report.html`.
"""

from __future__ import annotations

import fcntl
import math
import re
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from recserve.cli.bundle_swap import POLL_S, KeyFlag, open_client
from recserve.cli.flags import yaml_mapping

if TYPE_CHECKING:
    from recserve.client import Client
    from recserve.training.retraining import Guardrails, RetrainConfig, Run

Counts = Mapping[str, float]
PATHS = ("items", "bundles_dir", "runs", "event_log", "slate_log", "journal", "embeddings")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
SAMPLE = re.compile(r"^(recserve_\w+?)(?:\{(.*)\})? ([-+.\deE]+|\+Inf|NaN)$", re.MULTILINE)
ROUTES = ("/v1/recommend", "/v1/rank", "/v1/rank:batch", "/v1/similar")
SERVED, READY, STOPPED = "served", "ready", "stopped by the gate"
REFUSED, RETURNED = "refused by the server", "rolled back"
SILENT_S = 30.0  # until the servers of a fleet have seen a load


def retrain(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="What is retrained, how.")],
    every: Annotated[
        str | None, typer.Option(help="Do it again and again, as in 6h, 30m or 1d.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(envvar="RECSERVE_STORE", help="URL of the history store, for the file's."),
    ] = None,
    admin_key: KeyFlag = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="RECSERVE_METRICS_KEY", help="Key for /metrics."),
    ] = None,
) -> None:
    """Build, train and compare a new bundle; load it, watch it, and roll back by itself.

    The exit status is 1 if the new bundle is not served at the end.
    """
    pause_s = None if every is None else duration_s(every)
    settings = read_config(config, store)
    while True:
        started = time.monotonic()
        try:
            outcome = run_once(settings, admin_key, api_key)
        except (ValueError, LookupError, OSError, RuntimeError) as error:
            if pause_s is None:
                raise
            outcome = f"failed: {error}"
            typer.echo(f"error: {error}", err=True)
        if pause_s is None:
            raise typer.Exit(int(outcome not in (SERVED, READY)))
        time.sleep(max(0.0, pause_s - (time.monotonic() - started)))


def duration_s(text: str) -> float:
    """Returns a time such as `6h` in seconds. Raises BadParameter."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None or not float(found[1]):
        raise typer.BadParameter(
            f"expected a number and s, m, h or d, as in 6h, got {text!r}", param_hint="--every"
        )
    return float(found[1]) * UNITS[found[2]]


def read_config(path: Path, store: str | None = None) -> RetrainConfig:
    """Returns the checked file, with its paths relative to its folder.

    Args:
        path: The file.
        store: URL of the history store that replaces the file's; None leaves it.

    Raises:
        ValueError: If a field is wrong. The message names it.
    """
    from recserve.schemas.validation import to_message
    from recserve.training.retraining import RetrainConfig

    given = yaml_mapping(path, "CONFIG.yaml")
    if store is not None:
        given["store"] = store
    try:
        checked = to_message(given, RetrainConfig)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    root = path.resolve().parent
    fields = {name: getattr(checked, name) for name in PATHS}
    from msgspec import structs

    return structs.replace(
        checked,
        **{name: str(root / value) for name, value in fields.items() if value is not None},
        events=[str(root / value) for value in checked.events],
    )


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder of runs. Raises RuntimeError if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"{folder}: another retrain works here; wait for its end") from None
        yield


def run_once(config: RetrainConfig, admin_key: str | None, api_key: str | None) -> str:
    """Does one run, or the rest of an interrupted one, and returns its outcome.

    Raises:
        ValueError: If its inputs or settings are wrong. The run has ended, and the next one begins
            anew.
        Exception: If it could not go on, such as without a server. The next call continues it.
    """
    from recserve.training.retraining import Run, summary

    with only_one(Path(config.runs)):
        run = Run.latest(Path(config.runs), config.digest)
        typer.echo(f"run {run.number} in {run.folder}")
        try:
            _steps(config, run, admin_key, api_key)
        except ValueError as error:
            run.note("outcome", f"failed: {error}")
            raise
        finally:
            write_page(run)
            if "outcome" in run.record:
                _tidy(config, run)
        typer.echo(f"run {run.number}: {summary(run.record)}; {run.folder / 'report.html'}")
        return str(run.record["outcome"])


def _steps(config: RetrainConfig, run: Run, admin_key: str | None, api_key: str | None) -> None:
    """Does the steps that the record lacks, and records the outcome."""
    from recserve.bundle.bundle import Bundle
    from recserve.training import retraining as steps

    if "served" not in run.record:
        run.note("served", config.served or _current(config, admin_key))
        if config.url is not None:
            run.note("reference", read_metrics(config, api_key))
    served = Bundle.open(Path(config.bundles_dir) / run.record["served"])
    run.step("collect", lambda: steps.collect(config, run, served))
    run.step("build", lambda: steps.build(config, run, served, typer.echo))
    for model in steps.MODELS:
        if model in config.train:
            do = partial(steps.train, config, run, served, model, typer.echo)
            run.step(f"train {model}", do)
    gate = run.step("gate", lambda: steps.judge(config, run, served))
    for fault in gate["faults"]:
        typer.echo(f"gate: {fault}", err=True)
    if gate["faults"]:
        run.note("outcome", STOPPED)
        return
    name = run.step("publish", lambda: steps.publish(config, run))["name"]
    if config.url is None:
        steps.switch_link(config, name)
        run.note("outcome", READY)
        return
    loaded = run.step("load", lambda: _load(config, run, name, admin_key, api_key))
    if loaded["refused"]:
        typer.echo(f"load: {loaded['refused']}", err=True)
        run.note("outcome", REFUSED)
        return
    watched = run.step("watch", lambda: watch(config, run, api_key))
    if watched["faults"]:
        for fault in watched["faults"]:
            typer.echo(f"guardrail: {fault}", err=True)
        run.step("roll back", lambda: _roll_back(config, run, name, admin_key))
        run.note("outcome", RETURNED)
        return
    steps.switch_link(config, name)
    run.note("outcome", SERVED)


def _current(config: RetrainConfig, admin_key: str | None) -> str:
    assert config.url is not None
    with open_client(config.url, admin_key) as client:
        current = client.bundle_status().current
    if current is None:
        raise RuntimeError(f"{config.url}: the server has no bundle yet; wait until it is ready")
    return _real_name(config, current.path)


def _real_name(config: RetrainConfig, name: str) -> str:
    """Returns the name of a bundle's folder, of a link that which it leads to."""
    return (Path(config.bundles_dir) / name).resolve().name


def _load(
    config: RetrainConfig, run: Run, name: str, admin_key: str | None, api_key: str | None
) -> dict[str, Any]:
    """Loads the bundle, unless it is served, and returns why the server refused it, or empty."""
    from recserve.schemas.admin import BundleLoadRequest

    assert config.url is not None
    if "before" not in run.record:  # else an earlier process may have begun the load
        run.note("before", read_metrics(config, api_key))
    with open_client(config.url, admin_key) as client:
        while (found := client.bundle_status()).state == "loading":
            time.sleep(POLL_S)
        current = "" if found.current is None else _real_name(config, found.current.path)
        fleet = found.fleet.path if config.fleet and found.fleet else ""
        refused = ""
        if current not in (name, run.record["served"]):
            refused = f"the server has got {current} since; the gate compared with another bundle"
        elif name not in (current, fleet):
            client.load_bundle(BundleLoadRequest(path=name, fleet=config.fleet))
        refused = refused or _await_load(config, client, name)
    run.note("after", read_metrics(config, api_key))
    return {"name": name, "refused": refused}


def _await_load(config: RetrainConfig, client: Client, name: str) -> str:
    """Waits until a server, or all of a fleet, have loaded a bundle. Returns why not, or empty."""
    silent_at_s = time.monotonic() + SILENT_S
    while True:
        found = client.bundle_status()
        if not config.fleet:
            if found.state != "loading":
                current = "" if found.current is None else _real_name(config, found.current.path)
                return "" if current == name else found.message or "it was refused"
        elif found.fleet and found.fleet.path == name:
            if found.fleet.state not in ("loading", "returning"):
                return "" if found.fleet.state == "ready" else found.fleet.message or "it failed"
        elif time.monotonic() > silent_at_s:
            return f"no server says that the fleet loads {name}"
        time.sleep(POLL_S)


def _roll_back(config: RetrainConfig, run: Run, name: str, admin_key: str | None) -> dict[str, Any]:
    """Restores the bundle that was served before, unless it is."""
    from recserve.schemas.admin import BundleLoadRequest

    assert config.url is not None
    old = run.record["served"]
    with open_client(config.url, admin_key) as client:
        found = client.bundle_status()
        if config.fleet:
            if not found.fleet or found.fleet.path != old:
                client.load_bundle(BundleLoadRequest(path=old, fleet=True, force=True))
        elif found.current is not None and found.current.path == name and found.state != "loading":
            client.rollback_bundle()
        if fault := _await_load(config, client, old):
            raise RuntimeError(f"{config.url}: the rollback failed: {fault}")
    return {"name": old}


def read_metrics(config: RetrainConfig, api_key: str | None) -> dict[str, dict[str, float]]:
    """Returns the counters that guardrails read, by address of the server.

    Raises:
        RuntimeError: If no server answers.
    """
    assert config.url is not None
    found, fault = {}, ""
    for url in config.metrics or [config.url]:
        for address in addresses(url):
            try:
                found[address] = _read_server(address, url, api_key)
            except (OSError, ValueError) as error:
                hint = "; give --api-key" if getattr(error, "code", 0) in (401, 403) else ""
                fault = f"{address}/metrics: {error}{hint}"
    if not found:
        raise RuntimeError(fault)
    return found


def addresses(url: str) -> list[str]:
    """Returns a URL for each address that the name of a URL has."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme != "http" or parts.hostname is None:  # a certificate has the name
        return [url.rstrip("/")]
    try:
        known = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except OSError:
        return [url.rstrip("/")]
    by_version = {
        version: sorted({str(one[4][0]) for one in known if one[0] == version})
        for version in (socket.AF_INET, socket.AF_INET6)
    }
    hosts = by_version[socket.AF_INET] or [f"[{host}]" for host in by_version[socket.AF_INET6]]
    port = "" if parts.port is None else f":{parts.port}"
    return [f"http://{host}{port}{parts.path.rstrip('/')}" for host in hosts]


def _read_server(address: str, url: str, api_key: str | None) -> dict[str, float]:
    """Returns the counters of one server. Raises OSError or ValueError."""
    request = urllib.request.Request(f"{address}/metrics")
    request.add_header("Host", urlsplit(url if "://" in url else f"http://{url}").netloc)
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key.split(',')[0].strip()}")
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for name, labels, number in SAMPLE.findall(text):
        own = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        key = ""
        if name == "recserve_request_seconds_count" and own.get("route") in ROUTES:
            key = "answers"
        elif name == "recserve_request_seconds_bucket" and own.get("route") in ROUTES:
            key = f"le {own['le']}"
        elif name == "recserve_requests_failed_total":
            key = "failed"
        elif name == "recserve_degraded_answers_total":
            key = "degraded"
        elif name == "recserve_slate_log_rows_total":
            key = own["kind"]
        if key:
            found[key] = found.get(key, 0.0) + float(number)
    return found


def window(first: Mapping[str, Counts], last: Mapping[str, Counts]) -> dict[str, float]:
    """Returns the counts of all servers between two looks.

    A server whose counts have fallen, or that the first look lacks, began anew: all of its counts
    are of this time.
    """
    found: Counter[str] = Counter()
    for server, counts in last.items():
        earlier = first.get(server, {})
        if any(counts.get(key, 0.0) < value for key, value in earlier.items()):
            earlier = {}
        for key, value in counts.items():
            found[key] += value - earlier.get(key, 0.0)  # type: ignore[assignment]
    return dict(found)


def guard_faults(before: Counts, now: Counts, limits: Guardrails) -> list[str]:
    """Returns which limits the counts since a load exceed, against those before it."""
    faults = []
    answers, others = now.get("answers", 0.0), before.get("answers", 0.0)
    requests, earlier = (c.get("answers", 0.0) + c.get("failed", 0.0) for c in (now, before))
    if requests >= limits.min_requests:
        for name, limit, count in (
            ("failed", limits.max_failed, (requests, earlier)),
            ("degraded", limits.max_degraded, (answers, others)),
        ):
            share, was = (
                counts.get(name, 0.0) / max(number, 1.0)
                for counts, number in zip((now, before), count, strict=True)
            )
            if share > was + limit:
                faults.append(f"{share:.1%} of the answers are {name}, {was:.1%} before the load")
    if min(answers, others) >= limits.min_requests:
        p99, was = quantile_s(now, 0.99), quantile_s(before, 0.99)
        if p99 > was * limits.max_p99_factor:
            faults.append(f"p99 of answers is {p99 * 1e3:.0f} ms, {was * 1e3:.0f} ms before")
    slates, past = now.get("slates", 0.0), before.get("slates", 0.0)
    if min(slates, past) >= limits.min_requests and limits.min_outcome_factor:
        rate, was = now.get("outcomes", 0.0) / slates, before.get("outcomes", 0.0) / past
        # The limit must lie above what the rate may be. 4 standard errors, since a watch looks many
        # times, and the outcomes of one slate come together.
        highest = rate + 4 * math.sqrt(max(rate, 1 / slates) / slates)
        if highest < was * limits.min_outcome_factor:
            faults.append(f"{rate:.3f} outcomes per slate, {was:.3f} before the load")
    return faults


def quantile_s(counts: Counts, share: float) -> float:
    """Returns the upper end of the bucket that has a quantile of the times of answers."""
    ends = sorted((float(key[3:]), value) for key, value in counts.items() if key[:3] == "le ")
    total = ends[-1][1] if ends else 0.0
    return next((end for end, value in ends if value >= share * total), 0.0)


def watch(config: RetrainConfig, run: Run, api_key: str | None) -> dict[str, Any]:
    """Looks at the servers for a time. Returns early if a limit is exceeded."""
    limits = config.guard
    before = window(run.record["reference"], run.record["before"])
    if before.get("answers", 0.0) < limits.min_requests:
        before = window({}, run.record["before"])  # all that the processes have answered
    started = time.monotonic()
    typer.echo(
        f"watch: {limits.minutes:g} minutes, and up to {limits.longest_minutes:g} until "
        f"{limits.min_requests} requests are answered"
    )
    while True:
        now = window(run.record["after"], read_metrics(config, api_key))
        faults = guard_faults(before, now, limits)
        few = now.get("answers", 0.0) < limits.min_requests
        minutes = max(limits.minutes, limits.longest_minutes) if few else limits.minutes
        left = started + 60 * minutes - time.monotonic()
        if faults or left <= 0:
            figures = {"before": _figures(before), "after": _figures(now)}
            return {"faults": faults, "too_few_answers": few} | figures
        time.sleep(min(limits.every_s, max(left, 0.0)))


def _figures(counts: Counts) -> dict[str, float]:
    answers, slates = counts.get("answers", 0.0), counts.get("slates", 0.0)
    return {
        "answers": answers,
        "failed": counts.get("failed", 0.0),
        "degraded": counts.get("degraded", 0.0),
        "p99_ms": 1e3 * quantile_s(counts, 0.99),
        "slates": slates,
        "outcomes_per_slate": counts.get("outcomes", 0.0) / slates if slates else 0.0,
    }


def _tidy(config: RetrainConfig, run: Run) -> None:
    """Deletes the copies of events, bundles that are published, and the oldest runs and bundles."""
    import shutil

    from recserve.training.retraining import delete_old_bundles

    for part in (
        "event_log",
        "slate_log",
        "items",
        "exported",
        *(["bundle"] if "publish" in run.record else []),
    ):
        shutil.rmtree(run.folder / part, ignore_errors=True)
    runs = [path for path in Path(config.runs).iterdir() if path.name.isdigit()]
    for path in sorted(runs, key=lambda path: int(path.name))[: -config.keep_runs]:
        shutil.rmtree(path, ignore_errors=True)
    delete_old_bundles(config, run)


def write_page(run: Run) -> None:
    """Writes the record of a run as a page."""
    from recserve.files import whole_file

    with whole_file(run.folder / "report.html") as new:
        new.write_text(run_page(run.number, run.record), encoding="utf-8")


def _card_table(gate: Mapping[str, Any]) -> Any:
    """Returns the audit card of a gate as a table, with its bounds."""
    from recserve.experiments.charts import table

    card, bounds = gate["card"], gate["bounds"]
    rows = [
        [
            f"{gate['metric']} of {name}, {group['users']} users",
            f"{group['new']:.4f}",
            f"{group['served']:.4f}",
            f"{group['interval'][0]:+.4f} to {group['interval'][1]:+.4f}",
            f"reaches {-bounds['group_margin'] * group['served']:+.4f}",
        ]
        for name, group in card["groups"].items()
    ]
    shown, before = card["items_shown"]
    share, was = card["collisions"]
    rows += [
        ["items in all slates", f"{shown}", f"{before}", f"{shown - before:+}"]
        + [f"at least {bounds['min_coverage'] * before:.0f} items"],
        ["items that share codes", f"{share:.1%}", f"{was:.1%}", f"{share - was:+.1%}"]
        + [f"at most {bounds['max_collision_rise']:+.1%}"],
    ]
    return table(["what", "new", "served", "difference", "bound"], rows)


def run_page(number: int, record: Mapping[str, Any]) -> str:
    """Returns the page of a run."""
    from recserve.experiments.charts import Axis, html_page, interval, section, table, tag

    steps = [
        [name, f"{found['seconds']:.1f} s"]
        for name, found in record.items()
        if isinstance(found, dict) and "seconds" in found
    ]
    parts = [section("Steps", table(["step", "time"], steps))]
    gate, watched = record.get("gate", {}), record.get("watch", {})
    if "interval" in gate:
        low, high = gate["interval"]
        most = max(abs(low), abs(high)) * 1.1 or 1.0
        style = "worse" if gate["faults"] else "pass"
        shown = interval(low, gate["difference"], high, Axis("", -most, most, ()), style)
        said = (
            f"{gate['metric']} {gate['new']:.4f}, served {gate['served']:.4f}, difference "
            f"{gate['difference']:+.4f} ({low:+.4f} to {high:+.4f}), {gate['users']} users"
        )
        parts.append(section("Quality on the newest days", tag("p", said), shown))
    if "drift" in gate:
        bounds = gate.get("bounds", {})
        rows = [
            [name.replace("_", " "), f"{value:.3f}", f"{bounds[name]:g}" if name in bounds else ""]
            for name, value in gate["drift"].items()
        ]
        shown = table(["what", "distance", "at most"], rows)
        parts.append(section("Drift against the served bundle", shown))
    if "card" in gate:
        parts.append(section("Audit card", _card_table(gate)))
    if "before" in watched:
        rows = [
            [name.replace("_", " "), f"{watched['before'][name]:.4g}", f"{value:.4g}"]
            for name, value in watched["after"].items()
        ]
        few = "There were too few answers to compare." if watched["too_few_answers"] else ""
        shown = table(["what", "before", "after"], rows)
        parts.append(section("Guardrails", shown, tag("p", few) if few else None))
    faults = [*gate.get("faults", []), *watched.get("faults", [])]
    if faults:
        parts.append(section("Why it is not served", *(tag("p", fault) for fault in faults)))
    trained = {
        f"{name.removeprefix('train ')}: {key}": value
        for name, found in record.items()
        if name.startswith("train ")
        for key, value in found["validation"].items()
    }
    if trained:
        rows = [[name, f"{value:.4f}"] for name, value in trained.items()]
        parts.append(section("Validation of the models", table(["metric", "value"], rows)))
    lines = record.get("build", {}).get("lines", [])
    if lines:
        parts.append(section("Build", tag("pre", "\n".join(lines))))
    title = f"Retrain {number}"
    header = tag("header", tag("h1", title), tag("p", str(record.get("outcome", "not finished"))))
    return html_page(title, tag("main", header, *parts, tag("footer", "Written by recserve.")))

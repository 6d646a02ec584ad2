"""`recserve doctor`: checks this machine and gives advice, one finding per check.

A finding is `ok`, `warn` (works, but slower or with little space left) or `fail` (does not work).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from recserve import cores
from recserve.doctor.finding import Finding
from recserve.extras import FAISS_FOR_CUDA, find_faiss, install_advice

if TYPE_CHECKING:
    from recserve.engine.stats import EngineStats
    from recserve.speculation.drafter import Drafter

MIN_PYTHON = (3, 11)
MIN_OPEN_FILES = 1024
MIN_FREE_BYTES = 1 << 30
MAX_STORE_MS = 5.0
PACKAGES = ("torch", "numpy", "pyarrow", "lmdb", "redis", "fastapi", "msgspec")


def examine(
    bundle: Path | None = None,
    store: str | None = None,
    llm: Path | None = None,
    drafters: tuple[str, ...] = (),
    weights: str | None = None,
    measure: bool = False,
) -> list[Finding]:
    """Runs all checks. A check that raises becomes a finding with state `fail`.

    Args:
        bundle: Bundle to verify and load, to see which searches are captured as CUDA graphs.
        store: URL of a history store to query once.
        llm: Folder of a language model to load, to see which steps are captured as CUDA graphs.
        drafters: Drafters of the language model, in the format of `serve --drafter`.
        weights: Format of the served models' weights, as for `serve --weights`.
        measure: Whether to compare the times of C and torch, which takes seconds.
    """
    checks: dict[str, Callable[[], Finding]] = {
        "python": check_python,
        "packages": check_packages,
        "device": check_device,
        "faiss": check_faiss,
        "kernels": check_kernels,
        "open files": check_open_files,
        "disk": lambda: check_disk(Path(tempfile.gettempdir())),
        "clock": check_clock,
    }
    if measure:
        checks["measured kernels"] = check_measured_kernels
    if bundle is not None:
        checks["bundle"] = lambda: check_bundle(bundle)
        checks["searches"] = lambda: check_searches(bundle)
    if store is not None:
        checks["store"] = lambda: check_store(store)
    if llm is not None:
        checks["graphs"] = lambda: check_graphs(llm, drafters)
    if bundle is not None or llm is not None:
        checks["served kernels"] = lambda: check_served_kernels(bundle, llm, weights)
    return [_run_check(name, check) for name, check in checks.items()]


def _run_check(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        return Finding(name, "fail", f"{type(error).__name__}: {error}")


def check_python() -> Finding:
    """Checks the version of the Python interpreter."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        return Finding("python", "fail", f"{found}; {wanted} or newer is needed")
    return Finding("python", "ok", found)


def check_packages(names: tuple[str, ...] = PACKAGES) -> Finding:
    """Lists the versions of the packages that recserve needs."""
    found, missing = [], []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding("packages", "fail", f"missing: {', '.join(missing)}; run `make install`")
    return Finding("packages", "ok", ", ".join(found))


def check_device() -> Finding:
    """Reports the device of the models: a GPU, or the CPU with threads and instruction set."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        size = f"{properties.total_memory / 2**30:.0f} GiB"
        version = f"CUDA {torch.version.cuda}"
        if importlib.util.find_spec("triton") is None:
            advice = f"Triton is missing, so the plain kernels run: {install_advice('gpu')}"
            return Finding("device", "warn", f"{properties.name}, {size}, {version}; {advice}")
        return Finding("device", "ok", f"{properties.name}, {size}, {version}")
    threads = _threads(torch.get_num_threads())
    from recserve.kernels.native import native
    from recserve.kernels.native.processor import instructions

    found = f"CPU, {threads}, {instructions()}"
    if native.library() is None:
        advice = (
            "no compiled C kernels for this processor in the package, and no C compiler (cc) that "
            "works, so layers take up to twice as long: install gcc"
        )
        return Finding("device", "warn", f"{found}; {advice}")
    return Finding("device", "ok", f"{found}, layers compiled for it")


def check_faiss() -> Finding:
    """Says which package of faiss is installed, and where it can search and cluster."""
    try:
        found = find_faiss()
    except RuntimeError as error:
        return Finding("faiss", "fail", str(error))
    import torch

    from recserve.features.vectors.faiss_gpu import has_gpu

    if has_gpu():
        return Finding("faiss", "ok", f"{found}, on the GPU and the CPU")
    if torch.cuda.is_available():
        advice = f"`dense` and `specgr` search on the CPU: {FAISS_FOR_CUDA}"
        return Finding("faiss", "warn", f"{found} sees no GPU, so {advice}")
    return Finding("faiss", "ok", f"{found}, on the CPU")


def _threads(count: int) -> str:
    """Says how many threads compute, what bounds their number, and how they wait."""
    quota = cores.cpu_quota()
    allowed = f"{len(cores.own_cores())} of {os.cpu_count()} cores"
    if quota is not None:
        allowed += f" with a CPU quota of {quota:g}"
    waits = next(
        (f"{name}={os.environ[name]}" for name in cores.POLICIES if name in os.environ), ""
    )
    return f"{count} threads on {allowed}, {waits or 'waiting as OpenMP does by default'}"


def check_kernels() -> Finding:
    """Says whether C or torch computes on this CPU."""
    from recserve.doctor.kernel_report import rule

    return Finding("kernels", "ok", rule())


def check_measured_kernels() -> Finding:
    """Compares C and torch on this CPU, for the work of a small model."""
    from recserve.doctor.kernel_report import measure_kernels

    return Finding("measured kernels", "ok", measure_kernels())


def _sum_up(found: dict[str, str]) -> list[tuple[str, str]]:
    """Returns kinds of work with their kernel; where C does none, one line per type and reason."""
    if any(kernel.startswith("C") for kernel in found.values()):
        return list(found.items())
    groups = Counter(
        (work.rpartition("] ")[2], kernel) for work, kernel in found.items() if "] " in work
    )
    lines = [(f"products of {n} shapes, {kind}", kernel) for (kind, kernel), n in groups.items()]
    return lines + [(work, kernel) for work, kernel in found.items() if "] " not in work]


def check_served_kernels(
    bundle: Path | None, llm: Path | None, weights: str | None = None
) -> Finding:
    """Lists the kernel of every product and of the attention of these models."""
    from recserve.bundle.bundle import Bundle
    from recserve.doctor.kernel_report import kernels_in_use
    from recserve.engine.build import EngineModels, build_engine
    from recserve.service.model_loader import load_models, resolve_device
    from recserve.service.snapshot import Snapshot
    from recserve.service.text.loader import TextSettings, load_text

    device, models = resolve_device("auto"), EngineModels()
    if bundle is not None:
        opened = Bundle.open(bundle)
        loaded = load_models(opened, Snapshot.of(opened.catalog(), device), device, None, weights)
        models = EngineModels(loaded.recommender, loaded.ranker, heads=loaded.heads)
    if llm is not None:
        models = replace(models, text=load_text(TextSettings(llm, weights=weights), device).network)
    lines = [
        f"{model}: {work}: {kernel}"
        for model, found in kernels_in_use(build_engine(models)).items()
        for work, kernel in _sum_up(found)
    ]
    return Finding("served kernels", "ok", "\n".join(lines) or "no models")


def check_open_files() -> Finding:
    """Checks the limit on open files, which bounds the number of connections."""
    try:
        import resource
    except ImportError:
        return Finding("open files", "ok", "this system has no such limit")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft < MIN_OPEN_FILES:
        advice = f"raise it to {MIN_OPEN_FILES} or more: ulimit -n {MIN_OPEN_FILES}"
        return Finding("open files", "warn", f"limit {soft}; {advice}")
    return Finding("open files", "ok", f"limit {soft}")


def check_disk(folder: Path) -> Finding:
    """Checks the free disk space for a bundle and its checkpoints."""
    free = shutil.disk_usage(folder).free
    found = f"{free / 2**30:.1f} GiB free in {folder}"
    if free < MIN_FREE_BYTES:
        return Finding("disk", "warn", f"{found}; training needs {MIN_FREE_BYTES / 2**30:.0f} GiB")
    return Finding("disk", "ok", found)


def check_clock() -> Finding:
    """Checks that the monotonic clock, which deadlines use, is finer than a millisecond."""
    step = time.get_clock_info("monotonic").resolution
    if step > 1e-3:
        return Finding("clock", "warn", f"monotonic steps of {step * 1e3:.1f} ms blur timings")
    return Finding("clock", "ok", f"monotonic steps of {step * 1e9:.0f} ns")


def check_bundle(path: Path) -> Finding:
    """Compares every file of the bundle with its recorded sha256."""
    from recserve.bundle.bundle import Bundle

    bundle = Bundle.open(path)
    bundle.verify()
    manifest = bundle.manifest
    versions = f"model {manifest.model_version}, catalogue {manifest.catalog_version}"
    return Finding("bundle", "ok", f"{len(manifest.files)} files match, {versions}")


def check_store(url: str) -> Finding:
    """Opens the store and times the read of a user that does not exist."""
    from recserve.features.history.stores import open_store

    shown = without_password(url)
    store = open_store(url)
    try:
        store.get("recserve-doctor")
        started = time.perf_counter()
        store.get("recserve-doctor")
        taken_ms = (time.perf_counter() - started) * 1e3
    finally:
        store.close()
    if taken_ms > MAX_STORE_MS:
        detail = (
            f"{shown} answered in {taken_ms:.1f} ms; a store should stay under {MAX_STORE_MS} ms"
        )
        return Finding("store", "warn", detail)
    return Finding("store", "ok", f"{shown} answered in {taken_ms:.2f} ms")


def check_graphs(llm: Path, drafters: tuple[str, ...]) -> Finding:
    """Reports which steps of a language model a server captures as CUDA graphs here."""
    from recserve.engine.build import EngineModels, build_engine
    from recserve.service.model_loader import resolve_device
    from recserve.service.text.loader import TextSettings, load_text

    device = resolve_device("auto")
    text = load_text(TextSettings(llm, drafters=drafters), device)
    network, named = text.network, text.drafters
    if device.type != "cuda":
        none = f"none: steps are not captured on {device.type}"
        limit = vocabulary_limit(network.config.vocab_size, named)
        return Finding("graphs", "ok", f"{none}; {limit}")
    return describe_graphs(build_engine(EngineModels(text=network, drafters=named)).stats())


def describe_graphs(stats: EngineStats) -> Finding:
    """Lists the captured steps and drafts with seconds and memory, and those that are not."""
    what = "steps and drafts" if stats.graph_drafts else "steps"
    return _records("graphs", what, "steps: nodes x texts, drafts: levels x texts", stats)


def vocabulary_limit(vocabulary: int, drafters: Mapping[str, Drafter]) -> str:
    """Names the steps and drafts that need too much memory for capture on a GPU.

    Args:
        vocabulary: Tokens of the language model.
        drafters: Its drafters, by name.
    """
    from recserve.engine.draft_graph import DraftLimits, draft_buckets
    from recserve.engine.text_step_graph import StepBucket, StepKind, TextStepLimits

    limits, draft_limits = TextStepLimits(), DraftLimits()
    captured = {name: own for name, d in drafters.items() if (own := d.capturable) is not None}
    drafts, all_parameters = draft_buckets(captured, draft_limits), StepKind(all_parameters=True)
    steps = [StepBucket(shape, all_parameters) for shape in limits.shapes]
    large = [step.name for step in steps if step.bytes(vocabulary) > limits.bytes]
    large += [draft.name for draft in drafts if draft.bytes > draft_limits.bytes]
    what = "steps and drafts" if drafts else "steps"
    found = f"on a GPU, with a vocabulary of {vocabulary:,} tokens,"
    size = f"{limits.bytes / 2**20:.0f} MiB"
    if not large:
        return f"{found} all {what} fit into {size}"
    return f"{found} {what} of more than {size} are not captured: {', '.join(large)}"


def check_searches(path: Path) -> Finding:
    """Reports which item searches a server captures as CUDA graphs for a bundle.

    On a GPU the searches are captured, to report time and memory of each.
    """
    from recserve.bundle.bundle import Bundle
    from recserve.engine.build import EngineModels, build_engine
    from recserve.service.model_loader import load_models, resolve_device
    from recserve.service.snapshot import Snapshot

    bundle, device = Bundle.open(path), resolve_device("auto")
    snapshot = Snapshot.of(bundle.catalog(), device)
    models = load_models(bundle, snapshot, device)
    if models.recommender is None:
        return Finding("searches", "ok", "none: the bundle holds no recommender")
    engine = build_engine(EngineModels(models.recommender, heads=models.heads))
    if "beam" not in engine.selectable:
        return Finding("searches", "ok", "none: `rpg` scores all levels at once")
    if device.type != "cuda":
        return plan_searches(models.recommender.config.dense_head, engine.selectable, device.type)
    engine.capture(snapshot.trie)
    return describe_searches(engine.stats(), engine.selectable)


def plan_searches(weighs: bool, strategies: Seq[str], device: str) -> Finding:
    """Says in one line what a GPU would capture, for a machine without one.

    Args:
        weighs: True if the recommender has a dense head.
        strategies: Strategies of the engine.
        device: Device of this machine.
    """
    from recserve.engine.beam_search_graph import SearchLimits, buckets_of

    limits = SearchLimits()
    count = len(buckets_of(weighs, "nezha" in strategies, limits.shapes))
    sizes = f"up to {limits.most_requests} requests and {limits.most_beams} beams"
    most = f"within {limits.seconds:.0f} s and {limits.bytes / 2**20:.0f} MiB"
    wanted = f"a GPU captures {count} searches of {sizes}, {most}"
    return Finding("searches", "ok", f"none on {device}; {wanted}")


def describe_searches(stats: EngineStats, strategies: Seq[str]) -> Finding:
    """Lists the captured searches of an engine with seconds and memory, and the other ones."""
    what = "searches and prefills" if stats.graph_prefills else "searches"
    found = _records("searches", what, "requests x beams", stats)
    return replace(found, detail=f"{found.detail}; {_list_launched(strategies)}")


def _list_launched(strategies: Seq[str]) -> str:
    """Lists the searches that are never captured, with the reasons."""
    from recserve.engine.beam_search_graph import SearchLimits
    from recserve.search.strategy import strategy_classes

    limits = SearchLimits()
    others = ", ".join(
        sorted(n for n in strategies if strategy_classes()[n].captured_search is None)
    )
    reasons = [
        f"more than {limits.most_requests} requests or {limits.most_beams} beams (size)",
        f"versions with more than {limits.capacity:,} new items (version)",
        *([f"{others} (no beam search)"] if others else []),
        *(["speculative where a draft pays (drafts)"] if "speculative" in strategies else []),
    ]
    return f"never captured: {', '.join(reasons)}"


def _records(name: str, what: str, sizes: str, stats: EngineStats) -> Finding:
    made = [
        f"{bucket} {seconds:.1f} s {stats.graph_bytes[bucket] / 2**20:.0f} MiB"
        for bucket, seconds in stats.graph_seconds.items()
    ]
    if not made:
        return Finding(name, "warn", f"no {what} were captured; the log says why")
    total_s, size = sum(stats.graph_seconds.values()), sum(stats.graph_bytes.values())
    total = f"{len(made)} {what} in {total_s:.0f} s, {size / 2**20:.0f} MiB"
    detail = f"{total} ({sizes}): {', '.join(made)}"
    if stats.unrecorded:
        left = f"not captured, the log says why: {', '.join(stats.unrecorded)}"
        return Finding(name, "warn", f"{detail}; {left}")
    return Finding(name, "ok", detail)


def without_password(url: str) -> str:
    """Returns the URL with its passwords masked, also those that are not percent-encoded."""
    shown = re.sub(r"^([\w+]+://[^:@/]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&]\w*password=)[^&]*", r"\1***", shown)

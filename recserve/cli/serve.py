"""Commands `demo`, `serve`, `scale` and `doctor`."""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recserve.cli.flags import (
    Device,
    DeviceFlag,
    ImportFlags,
    StoreFlag,
    with_flags,
    yaml_list,
)
from recserve.kernels.linear import formats

if TYPE_CHECKING:
    from recserve.config import ServerConfig
    from recserve.doctor.finding import Finding


def demo(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with items.parquet and events.parquet; default: synthetic data."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of 127.0.0.1.")] = 8080,
    once: Annotated[bool, typer.Option("--once", help="Print the answers and exit.")] = False,
) -> None:
    """Build, train and serve a small catalogue; print a slate, a ranking and a completion."""
    from recserve.cli.demo import run_demo

    raise typer.Exit(run_demo(data, port, once))


def _format(name: str | None) -> str | None:
    try:
        return formats.check_format(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def serve(
    bundle: Annotated[Path | None, typer.Option(help="Folder of the bundle.")] = None,
    llm: Annotated[
        Path | None, typer.Option(help="Language model: a Hugging Face folder (Llama, Qwen).")
    ] = None,
    llm_name: Annotated[
        str | None, typer.Option(help="Name of the language model; default: the folder's name.")
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="NAME, or NAME=DIR with weights; repeatable. The first is the default."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Chat template to use instead of the folder's.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address; any but loopback needs keys.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; default: 8080.")] = None,
    store: StoreFlag = None,
    device: Annotated[Device | None, typer.Option(help="Device of the models.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="`int8` stores the models' matrices in 8 bits.")
    ] = None,
    invariant: Annotated[
        bool,
        typer.Option("--invariant", help="Answers are bit-identical in every batch; CPU only."),
    ] = False,
    experiments: Annotated[
        Path | None, typer.Option(help="YAML file with the setting `experiments`.")
    ] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="URL of an OpenTelemetry receiver for traces.")
    ] = None,
    slate_log: Annotated[
        Path | None, typer.Option(help="Folder for a Parquet log of slates and their outcomes.")
    ] = None,
    event_log: Annotated[
        Path | None, typer.Option(help="Folder for a Parquet log of accepted events.")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="`text` or `json`.")] = None,
    metrics_compat: Annotated[
        str | None, typer.Option(help="`vllm` also exports metrics under vLLM's names.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with settings; --help-settings lists them.")
    ] = None,
    help_settings: Annotated[
        bool,
        typer.Option(
            "--help-settings",
            help="Print all settings with their types, defaults and bounds, and exit.",
        ),
    ] = False,
) -> None:
    """Serve a bundle, a language model or both over HTTP.

    These flags are the most common settings. See --help-settings for all of them.

    A flag overrides its RECSERVE_* variable, which overrides the file of --config.
    """
    from recserve.config import ServerConfig

    if help_settings:
        from recserve.cli.settings_table import settings_text

        typer.echo(settings_text())
        return
    flags = {
        **{"bundle": bundle, "host": host, "port": port, "store": store, "device": device},
        **{"llm": llm, "llm_name": llm_name, "chat_template": chat_template},
        **{"drafters": drafter or None, "invariant": invariant or None, "weights": weights},
        **{"experiments": None if experiments is None else yaml_list(experiments, "experiments")},
        **{"log_format": log_format, "metrics_compat": metrics_compat},
        **{"otlp_endpoint": otlp_endpoint, "slate_log": slate_log},
        **{"event_log": event_log},
    }
    settings = ServerConfig.load(flags, config)
    settings.check_files()
    _check_names(settings)
    from recserve.server.run import serve as run_server

    raise typer.Exit(run_server(settings))


def _check_names(settings: ServerConfig) -> None:
    """Finds a wrong store, drafter or device before torch is imported. Raises ValueError."""
    if settings.store is not None:
        from recserve.features.history.stores import split_ttl, store_class

        store_class(split_ttl(settings.store)[0])
    if settings.drafters:
        from recserve.drafters.names import check_names, drafter_names

        for drafter in settings.drafters:
            check_names(drafter.partition("=")[0], drafter_names())
    if settings.device == "cuda":
        if version("torch").endswith("+cpu"):
            raise ValueError("device is cuda, but this torch is built for CPUs only")
        if not _has_cuda():
            raise ValueError("device is cuda, but the NVIDIA driver shows no GPU")


def _has_cuda() -> bool:
    """Whether the CUDA driver counts at least one device that this process may use."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return not failed and count.value > 0


def scale(
    bundle: Annotated[Path | None, typer.Option(help="Folder of the bundle.")] = None,
    store: StoreFlag = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with settings of `recserve serve`.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas; the fewest of autoscaling.")] = 2,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Most replicas; default: no autoscaling.")
    ] = None,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Most requests in progress per replica.")
    ] = 64,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Most waiting requests; beyond it clients get 429.")
    ] = 1024,
    cpus: Annotated[float, typer.Option(help="CPU cores of a replica.")] = 1,
    gpus: Annotated[float, typer.Option(help="GPUs of a replica, or a share of one.")] = 0,
    host: Annotated[str, typer.Option(help="Address; any but loopback needs keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the proxy.")] = 8080,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to run on; default: a new local one.")
    ] = None,
) -> None:
    """Serve with several replicas on Ray Serve until SIGINT or SIGTERM.

    Send a user's id as the header X-Session-Id, so that one replica gets all requests of the user.
    """
    from recserve.server.ray_serve import ReplicaOptions, run

    given = {"bundle": bundle, "store": store}
    options = ReplicaOptions(
        settings={name: str(value) for name, value in given.items() if value is not None},
        config=config,
        min_replicas=replicas,
        max_replicas=max_replicas,
        max_requests=max_requests,
        max_waiting=max_waiting,
        cpus=cpus,
        gpus=gpus,
    )
    run(options, host, port, address)


@with_flags
def doctor(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="FOLDER",
            help="Examine and try this drafter of --llm: DIR, or NAME=DIR. Without --llm: a "
            "recommender that `bundle import` would read.",
            show_default=False,
        ),
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="Verify this bundle too.")] = None,
    store: StoreFlag = None,
    llm: Annotated[
        Path | None, typer.Option(help="Load this language model and list its captured steps.")
    ] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="Its drafters, as for serve.")] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Held-out text to try a drafter on; default: text of the model's own."),
    ] = None,
    device: DeviceFlag = "auto",
    weights: Annotated[
        str | None,
        typer.Option(callback=_format, help="List the kernels for weights in this format: `int8`."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Compare the times of C and torch on this CPU.")
    ] = False,
    items: Annotated[
        Path | None, typer.Option(help="Items of a checkpoint, as for `bundle import`.")
    ] = None,
    *,
    flags: ImportFlags,
    histories: Annotated[
        int,
        typer.Option(
            min=0, max=1000, help="Drawn histories on which an import is compared; 0 for none."
        ),
    ] = 4,
) -> None:
    """Check this machine, a drafter or a checkpoint, and print advice.

    A checkpoint that `bundle import` would read takes its flags too. With --items it is imported
    into a temporary folder, and compared with its original.

    The exit status is 1 if a check fails.
    """
    from rich.console import Console

    from recserve.cli.doctor import examine
    from recserve.cli.terminal import findings_table

    if path is None:
        if text:
            raise typer.BadParameter("--text is for trying a drafter")
        findings = examine(bundle, store, llm, tuple(drafter or ()), weights, measure)
    elif llm is None and Path(path).is_dir():
        if bundle or store or drafter or text or weights or measure:
            raise typer.BadParameter("a checkpoint is examined alone; a drafter needs --llm")
        from recserve.doctor.checkpoint_checks import examine_checkpoint

        if items is None and flags != ImportFlags():
            raise typer.BadParameter("the flags of an import need --items")
        # Nothing is written to the folder.
        options = None if items is None else flags.options(Path(path), items, out=Path(path))
        findings = examine_checkpoint(Path(path), options, histories)
    else:
        if llm is None and not Path(path.partition("=")[2] or path).exists():
            raise typer.BadParameter(f"there is no folder {path[:200]!r}")
        if llm is None or not llm.is_dir():
            raise typer.BadParameter("a drafter needs the folder of its language model (--llm)")
        if bundle or store or drafter or weights or measure:
            raise typer.BadParameter("a drafter is examined alone, with --llm and --text")
        findings = _examine_drafter(path, llm, text or [], device)
    Console().print(findings_table(findings))
    raise typer.Exit(int(any(finding.state == "fail" for finding in findings)))


def _examine_drafter(named: str, llm: Path, texts: list[Path], device: Device) -> list[Finding]:
    from recserve.doctor.drafter_checkup import examine_drafter
    from recserve.models.loading import load_language_model
    from recserve.service.model_loader import resolve_device
    from recserve.service.text.loader import unite_end_tokens
    from recserve.tokenizer.tokenizer import TextTokenizer
    from recserve.training.text.language_model import read_texts

    text = "\n".join(read_texts(texts)) if texts else None
    tokenizer = TextTokenizer.open(llm)
    target = load_language_model(llm, device=resolve_device(device))
    unite_end_tokens(target, tokenizer)
    return examine_drafter(named, target, tokenizer, text)

"""What the pages name exists: commands, settings, metrics, routes, fields and errors."""

import ast
import functools
import json
import os
import re
import shlex
import tomllib
from pathlib import Path

import msgspec
import pytest
import typer
import yaml

from recserve.cli.experiments import ab
from recserve.cli.retrain import read_config
from recserve.config import KERNEL_KEYS, ServerConfig
from recserve.experiments.settings import parse_experiments
from recserve.schemas import encoding, events, inference, items, scoring, text
from recserve.server.errors import INTERNAL, ROUTING, TABLE
from tests.support.pages import PAGES, find_in_pages, reference
from tests.support.paths import ROOT

# History, which names what has gone.
PAST = ("CHANGELOG.md",)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
SHELLS = ("bash", "sh", "console", "")
# What a browser or a compose file calls so.
OTHER_VARIABLES = {"RECSERVE_KEY", "RECSERVE_METRICS_KEY"}


def read_commands(page: str) -> list[list[str]]:
    """Words of each command in shell blocks and in sentences, without assignments before it."""
    lines = [
        line
        for language, block in FENCE.findall(page)
        if language in SHELLS
        for line in block.replace("\\\n", " ").splitlines()
    ]
    lines += INLINE.findall(re.sub(FENCE, "", page))
    found = []
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # prose, or half of a quoted body
            continue
        while words and re.match(r"[A-Z][A-Z0-9_]*=", words[0]):
            words = words[1:]
        if words:
            found.append(words)
    return found


@functools.cache
def read_options(path: Path) -> frozenset[str]:
    """Texts that begin with a dash, of a module and of modules of benchmarks that it imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and str(node.value).startswith("-"):
            found.add(str(node.value))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks."):
            other = ROOT / ((node.module or "").replace(".", "/") + ".py")
            if other.is_file() and other != path:
                found |= read_options(other)
    return frozenset(found)


def find_module_fault(words: list[str]) -> str | None:
    """Says what is wrong with `python -m MODULE OPTIONS`; None if nothing is."""
    module, rest = words[2], words[3:]
    if module == "pytest":
        missing = [w for w in rest if w.startswith("tests/") and not (ROOT / w).exists()]
        return f"there is no {missing}" if missing else None
    if not module.startswith(("benchmarks", "tests")):
        return None
    path = ROOT / module.replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return f"there is no module {module}"
    given = {word.partition("=")[0] for word in rest if word.startswith("--")}
    unknown = given - read_options(file)
    return f"{module} has no {sorted(unknown)}" if unknown else None


@functools.cache
def read_makefile() -> tuple[frozenset[str], frozenset[str]]:
    """Targets and variables of the Makefile."""
    source = (ROOT / "Makefile").read_text(encoding="utf-8")
    (targets,) = re.findall(r"^\.PHONY: (.*)$", source, re.MULTILINE)
    return frozenset(targets.split()), frozenset(re.findall(r"\$\((?:\w+ )*?([A-Z_]+)[,)]", source))


def find_make_fault(words: list[str]) -> str | None:
    """Says what is wrong with `make TARGET NAME=VALUE`; None if nothing is."""
    targets, variables = read_makefile()
    if words[1] not in targets:
        return f"there is no target {words[1]}"
    unknown = [w for w in words[2:] if "=" in w and w.partition("=")[0] not in variables]
    return f"the Makefile does not read {unknown}" if unknown else None


def find_docker_fault(words: list[str]) -> str | None:
    """Says which file or argument of a docker command does not exist; None if all do."""
    files = [value for flag, value in zip(words, words[1:], strict=False) if flag == "-f"]
    missing = [name for name in files if not (ROOT / name).is_file()]
    if missing:
        return f"there is no {missing}"
    source = "".join((ROOT / name).read_text(encoding="utf-8") for name in files)
    declared = re.findall(r"^ARG (\w+)", source, re.MULTILINE)
    given = [w.partition("=")[0] for w in words if re.match(r"[A-Z_]+=", w)]
    unknown = [] if words[1] != "build" else [name for name in given if name not in declared]
    return f"{files} has no argument {unknown}" if unknown else None


def find_helm_fault(words: list[str]) -> str | None:
    """Says which value of a helm command the chart does not have; None if it has all."""
    values = yaml.safe_load((ROOT / "deploy/helm/recserve/values.yaml").read_text())
    settings = [value for flag, value in zip(words, words[1:], strict=False) if flag == "--set"]
    for name in (setting.partition("=")[0] for setting in settings):
        place = values
        for part in name.split("."):
            if place == {}:  # any content
                break
            if part not in place and not (name.startswith("config.") and part in SETTINGS):
                return f"the chart has no value {name}"
            place = place.get(part, {})
    return None


def find_pip_fault(words: list[str]) -> str | None:
    """Says which extra of recserve does not exist; None if all do."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    given = re.findall(r"recserve\[([\w,]+)\]", " ".join(words))
    unknown = [e for each in given for e in each.split(",") if e not in project[EXTRAS]]
    return f"there is no extra {unknown}" if unknown else None


EXTRAS = "optional-dependencies"
SETTINGS = set(ServerConfig.model_fields)
CHECKS = {
    "make": find_make_fault,
    "docker": find_docker_fault,
    "helm": find_helm_fault,
    "pip": find_pip_fault,
}


def find_fault(words: list[str]) -> str | None:
    """Says what is wrong with a command of another program than recserve; None if nothing is."""
    if words[:2] == ["python", "-m"] and len(words) > 2:
        return find_module_fault(words)
    return CHECKS[words[0]](words) if words[0] in CHECKS and len(words) > 1 else None


def test_commands_of_other_programs_name_what_is_there():
    assert (
        find_in_pages(lambda page: [*filter(None, map(find_fault, read_commands(page)))], *PAST)
        == {}
    )


def test_environment_variables_are_settings():
    known = {f"RECSERVE_{name.upper()}" for name in (*SETTINGS, *KERNEL_KEYS)} | OTHER_VARIABLES
    named = re.compile(r"\bRECSERVE_[A-Z_]+\b")
    assert find_in_pages(lambda page: {*named.findall(page)} - known, *PAST) == {}


@functools.cache
def list_metrics() -> str:
    """The table of metrics, and the sources of those of experiments."""
    collector = (ROOT / "recserve/server/experiments.py").read_text(encoding="utf-8")
    names = re.findall(r'^    \("(\w+)", ', collector, re.MULTILINE)
    own = [f"recserve_experiment_{kind}{name}" for kind in ("", "compared_") for name in names]
    return " ".join([reference().GENERATORS["metrics"](), collector, *own])


def test_metrics_exist():
    named, known = re.compile(r"\brecserve_[a-z_]+[a-z]\b"), list_metrics()

    def missing(page: str) -> set[str]:
        return {n for n in named.findall(page) if n.removesuffix("_total") not in known}

    assert find_in_pages(missing, *PAST) == {}


NOT_SERVED = {"POST /v1/responses"}


def test_routes_exist():
    """`POST /v1/rank` and the like, against the routes of the snapshot of the public API."""
    snapshot = (ROOT / "tests/repository/public_api.txt").read_text(encoding="utf-8")
    routes = {tuple(line.split()[1:3]) for line in snapshot.splitlines() if line[:5] == "http "}
    served = [
        (method, re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))))
        for method, path in routes
    ]

    def missing(page: str) -> list[str]:
        wrong = []
        for named in INLINE.findall(page):
            method, _, path = named.partition(" ")
            if method not in ("GET", "POST", "PUT", "DELETE") or not path.startswith("/"):
                continue
            if "…" in path or path == "/" or path == "/openapi.json" or named in NOT_SERVED:
                continue
            path = path.partition("?")[0]
            if not any(m == method and pattern.fullmatch(path) for m, pattern in served):
                wrong.append(named)
        return wrong

    assert find_in_pages(missing, *PAST) == {}


def test_the_errors_of_the_page_are_those_of_the_server():
    page = (ROOT / "docs/reference/http.md").read_text(encoding="utf-8").split("\n## Errors\n")[1]
    rows = re.findall(r"^\| (\d{3}) \| ([^|]*) \|", page, re.MULTILINE)
    listed = sorted((int(status), code) for status, cell in rows for code in INLINE.findall(cell))
    raised = {(row.status, row.code) for row in (*TABLE.values(), *ROUTING.values(), INTERNAL)}
    assert listed == sorted(raised - {(499, "client_gone")})


BODIES = {
    "http.md": (
        items.RecommendRequest,
        items.Exclusions,
        items.Diversity,
        items.ColumnCap,
        items.SimilarRequest,
        items.RankRequest,
        items.Candidate,
        items.ItemInput,
        events.EventInput,
    ),
    "http-text.md": (
        text.CompletionRequest,
        text.ChatRequest,
        text.SpeculationOptions,
        text.StreamOptions,
        scoring.RerankRequest,
        scoring.GenerativeScoringRequest,
        encoding.EmbeddingsRequest,
        encoding.TokenizeRequest,
    ),
    "http-inference.md": (inference.InferParameters,),
}


@pytest.mark.parametrize("name", BODIES)
def test_the_page_has_every_field_of_the_bodies(name):
    page = (ROOT / "docs/reference" / name).read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", " ".join(INLINE.findall(page))))
    fields = {f.encode_name for body in BODIES[name] for f in msgspec.structs.fields(body)}
    assert sorted(fields - words) == []


def test_settings_of_yaml_blocks_are_valid(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("RECSERVE_")]:
        monkeypatch.delenv(name)
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page.name not in PAST)
    for language, block in FENCE.findall(pages):
        if language != "yaml":
            continue
        file = tmp_path / "settings.yaml"
        file.write_text(block, encoding="utf-8")
        given = yaml.safe_load(block)
        if "experiments" in given:
            assert parse_experiments(given["experiments"])
        elif "arms" in given:
            command = typer.Typer()
            command.command()(ab)
            context = typer.main.get_command(command).make_context("ab", ["--config", str(file)])
            assert context.params["url"] == given["url"]
        elif "runs" in given:
            assert read_config(file).name == "retrained"
        else:
            ServerConfig.load({}, file)


def test_bodies_of_json_blocks_are_valid():
    """Blocks that have a prompt or a user are bodies; others are parts, responses or lines."""
    kinds = {"prompt": text.CompletionRequest, "user": items.RecommendRequest}
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page.name not in PAST)
    for language, block in FENCE.findall(pages):
        if language != "json":
            continue
        try:
            given = json.loads(block)
        except ValueError:
            continue
        for key, kind in kinds.items():
            if key in given:
                msgspec.convert(given, kind)

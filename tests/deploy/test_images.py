"""Dockerfiles and the compose file, by their structure; deploy/try.sh runs the steps of one."""

import json
import re
import shlex
import subprocess
import tomllib

import pytest
import typer.main
import yaml

from recserve.cli import app
from recserve.config import ServerConfig
from recserve.schemas.api import OPEN_PATHS
from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"
IMAGES = ("cpu", "cuda")


def instructions(image):
    """Returns (instruction, rest) of each line of a Dockerfile, continued lines joined."""
    text = (DEPLOY / f"Dockerfile.{image}").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in lines]


def serve_flags(words):
    """Returns the flags of `recserve serve`, as the command line parses them."""
    assert words[0] == "serve"
    command = typer.main.get_command(app).commands["serve"]
    return command.make_context("serve", list(words[1:])).params


@pytest.mark.parametrize("image", IMAGES)
def test_the_image_runs_as_an_unprivileged_user(image):
    steps = instructions(image)
    assert steps[-1][0] == "CMD"
    users = [rest for name, rest in steps if name == "USER"]
    assert users == ["1000:1000"]
    after = [name for name, _ in steps[[name for name, _ in steps].index("USER") :]]
    assert "RUN" not in after and "COPY" not in after
    assert "useradd --uid 1000 " in " ".join(rest for name, rest in steps if name == "RUN")


@pytest.mark.parametrize("image", IMAGES)
def test_the_image_installs_the_pinned_versions(image):
    runs = [rest for name, rest in instructions(image) if name == "RUN"]
    installs = [rest for rest in runs if "pip install" in rest]
    assert len(installs) == 2
    assert all(
        "--constraint constraints.txt" in one and "--no-cache-dir" in one for one in installs
    )
    assert all("rm -rf /var/lib/apt/lists/*" in one for one in runs if "apt-get" in one)


@pytest.mark.parametrize("image", IMAGES)
def test_the_image_writes_below_data_only(image):
    settings = dict(rest.split("=", 1) for name, rest in instructions(image) if name == "ENV")
    folders = {name: value for name, value in settings.items() if value.startswith("/data")}
    assert {"HOME", "XDG_CACHE_HOME", "RECSERVE_JOURNAL"} <= set(folders)
    (command,) = (json.loads(rest) for name, rest in instructions(image) if name == "CMD")
    assert serve_flags(command)["store"] == "lmdb:/data/history"
    assert "mkdir -p /bundle /data && chown 1000:1000 /data" in [
        rest for name, rest in instructions(image) if name == "RUN"
    ]


@pytest.mark.parametrize("image", IMAGES)
def test_the_health_check_asks_the_port_of_the_command(image):
    steps = dict(instructions(image))
    flags = serve_flags(json.loads(steps["CMD"]))
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+[\w/]+", steps["HEALTHCHECK"])
    assert url.startswith(f"http://127.0.0.1:{flags['port']}/")
    assert url.removeprefix(f"http://127.0.0.1:{flags['port']}") in OPEN_PATHS
    assert steps["EXPOSE"] == str(flags["port"])


@pytest.mark.parametrize("image", IMAGES)
def test_copied_files_are_in_the_build_context(image):
    copied = {word for name, rest in instructions(image) if name == "COPY" for word in rest.split()}
    assert {"pyproject.toml", "setup.py", "recserve"} <= copied  # setup.py compiles the kernels
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    for name, rest in instructions(image):
        if name == "COPY":
            for source in shlex.split(rest)[:-1]:
                assert (ROOT / source).exists() and source in allowed


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def test_services_are_published_on_this_machine_only(compose):
    assert set(compose["services"]) == {
        *("grafana", "prometheus", "recserve", "recserve-2", "redis"),
    }
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert service["restart"] == "unless-stopped"
        assert re.search(r":[\w.-]+$", service["image"]) and "latest" not in service["image"]


def test_what_compose_names_is_there(compose):
    services, volumes = compose["services"], set(compose["volumes"])
    used = set()
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services), name
        assert set(service.get("secrets", ())) <= set(compose["secrets"]), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                folder = source.split("/")[1]
                if not (DEPLOY / folder).exists():
                    pytest.skip(f"NO deploy/{folder} in this checkout: compose was not checked")
                assert (DEPLOY / source).exists(), source
            elif not source.startswith("$"):
                used.add(source)
    assert used == volumes
    redis = services["redis"]["command"]
    assert redis[redis.index("--appendfsync") + 1] == "always"
    data = [one["volumes"][1] for name, one in services.items() if name.startswith("recserve")]
    assert len(data) == len(set(data)) == 2
    build = services["recserve"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists()


@pytest.mark.parametrize(("name", "port"), [("recserve", 8080), ("recserve-2", 8081)])
def test_a_composed_server_accepts_its_settings(compose, monkeypatch, name, port):
    service = compose["services"][name]
    for variable, value in service["environment"].items():
        monkeypatch.setenv(variable, "0123456789abcdef" if value.startswith("${") else value)
    flags = {name: value for name, value in serve_flags(service["command"]).items() if value}
    flags["drafters"] = flags.pop("drafter", None)
    config = ServerConfig.load(flags)
    assert (config.store, config.catalog_log) == ("redis://redis:6379/0", "redis")
    assert config.signing_key is not None
    assert service["ports"] == [f"127.0.0.1:{port}:{config.port}"]
    grace = float(service["stop_grace_period"].removesuffix("s"))
    assert grace > config.drain_delay_s + config.drain_timeout_s
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("image", IMAGES)
def test_the_image_names_what_the_project_names(image):
    """Its Python and its extras, and each package that it installs by name has a pinned version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().split()}
    steps = instructions(image)
    (version,) = re.findall(r"^python:([\d.]+)-slim$", dict(steps)["FROM"])
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    extras = {
        extra
        for name, rest in steps
        if name in ("ARG", "RUN")
        for found in re.findall(r"(?:\.|=)\[([a-z,]+)\]", rest)
        for extra in found.split(",")
    }
    assert extras and extras <= project["optional-dependencies"].keys()
    for rest in (rest for name, rest in steps if name == "RUN" and "pip install" in rest):
        for command in re.split(r"&&", rest):
            words = re.sub(r'"\$\(.*?\)"', "torch", command).split()
            if words[:2] == ["pip", "install"]:
                words = [word.strip("'\"") for word in words[2:] if word != "constraints.txt"]
                named = {word for word in words if word[0] not in "-."}
                assert named <= pinned, named - pinned


SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in DEPLOY.glob("*.sh"))


@pytest.mark.parametrize("script", [*SCRIPTS, *(f"deploy/Dockerfile.{image}" for image in IMAGES)])
def test_every_command_parses(script):
    path = ROOT / script
    text = path.read_text(encoding="utf-8")
    shell = "bash" if "bash" in text.partition("\n")[0] else "sh"
    if path.name.startswith("Dockerfile"):
        image = path.suffix[1:]
        text = "\n".join(rest for name, rest in instructions(image) if name == "RUN")
    done = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

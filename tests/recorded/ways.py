"""Two ways to an answer: a server process over HTTP, and `Service` in this process.

Everything here is public and stable: the command `recserve serve` and its settings, the routes, and
the methods of `recserve.Service`. When one of them changes on purpose, only this file follows.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import yaml

from recserve import Service, ServiceOptions
from tests.recorded.cases import Case
from tests.recorded.compare import STAGES, stable, stable_text
from tests.recorded.worlds import SIGNING_KEY, World
from tests.support.redis_server import free_port

# Headers that the reference of the HTTP API promises.
HEADERS = (
    *("content-type", "retry-after", "allow", "www-authenticate", "x-request-id", "server-timing"),
    *("cache-control", "content-security-policy", "referrer-policy", "x-accel-buffering"),
    *("x-content-type-options", "x-recserve-experiment"),
)
# What nearly every answer has is not stored.
USUAL = {
    "content-type": "application/json",
    "x-request-id": "<id>",
    "x-content-type-options": "nosniff",
}
START_S, ANSWER_S, STOP_S = 400, 120, 60
TOKEN = "$token"  # in a request: the attribution token of the answer before
HEAD = ("id", "object", "created", "model", "system_fingerprint")
LOADED = ("post-admin-bundle-load", "post-admin-bundle-rollback")


class HttpWay:
    """A server process, started by the command `recserve serve`."""

    def __init__(self, world: World, folder: Path) -> None:
        """Starts the server; `wait` returns once it is ready.

        Args:
            world: What it serves.
            folder: An empty folder for copies of the files.
        """
        self.world, self.folder = world, folder
        self.port = free_port()
        settings = {**world.prepare(folder), "port": self.port, "drain_delay_s": 0}
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "recserve", "serve", "--config", "config.yaml"]
        self._log = (folder / "server.log").open("w+", encoding="utf-8")
        environment = {**os.environ, "RECSERVE_THREADS": os.environ.get("RECSERVE_THREADS", "1")}
        self._process = subprocess.Popen(
            command, cwd=folder, stdout=self._log, stderr=subprocess.STDOUT, env=environment
        )
        self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        self.names: dict[str, str] = {}
        self._token = "none"

    def __enter__(self) -> HttpWay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Waits until the server is ready, and learns the digests of its models and items."""
        deadline_s = time.monotonic() + START_S
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self._log.seek(0)
                raise RuntimeError(f"the server did not start:\n{self._log.read()[-4000:]}")
            try:
                if self._send("GET", "/health/ready")[0] == 200:
                    break
            except OSError:
                self._connection.close()
            time.sleep(0.05)
        versions = json.loads(self._send("GET", "/version", self._keys())[2])
        self.names = names_of(versions)

    def ask(self, case: Case) -> dict[str, Any]:
        """Sends a request and returns its stable answer."""
        body = case.raw
        if case.body is not None:
            body = self._filled(json.dumps(case.body, ensure_ascii=False))
        raw = None if body is None else body.encode("utf-8", "surrogatepass")
        status, headers, content = self._send(
            case.method, self._filled(case.path), case.headers, raw
        )
        shown = {n: stable_text(headers[n], self.names) for n in HEADERS if n in headers}
        if "server-timing" in shown:
            stages = re.sub(r";dur=[\d.e-]+", "", shown["server-timing"])
            shown["server-timing"] = "<stages>" if stages.split(", ") == STAGES else stages
        differing = {n: shown.get(n) for n in {*shown, *USUAL} if shown.get(n) != USUAL.get(n)}
        answer: dict[str, Any] = {"status": status}
        if differing:
            answer["headers"] = differing
        answer["body"] = self._stable_body(case, shown.get("content-type", ""), content)
        if status == 202 and case.route in LOADED:
            answer["body"] = self._loaded(case)
        return answer

    def _stable_body(self, case: Case, kind: str, content: bytes) -> Any:
        if kind.startswith("application/json") and content:
            body = json.loads(content)
            if case.path == "/openapi.json":
                return described(body)
            if isinstance(body, dict) and isinstance(body.get("attribution_token"), str):
                self._token = body["attribution_token"]
            return stable(body, self.names)
        text = content.decode("utf-8", "replace")
        if kind.startswith("text/event-stream"):
            return stable_stream(text, self.names)
        if case.path == "/metrics":
            return metric_names(text)
        if kind.startswith(("text/html", "text/css", "text/javascript", "image/")):
            return "<page>" if text else ""
        return stable_text(text, self.names)

    def _loaded(self, case: Case) -> Any:
        """Waits for the end of a load. Returns the state then."""
        deadline_s = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline_s:
            state = json.loads(self._send("GET", "/admin/bundle", case.headers)[2])
            if state["state"] != "loading":
                return stable(state, self.names)
            time.sleep(0.02)
        raise RuntimeError("the bundle was not loaded in time")

    def _filled(self, text: str) -> str:
        for digest, name in self.names.items():
            text = text.replace(name, digest)
        return text.replace(TOKEN, self._token)

    def _keys(self) -> dict[str, str]:
        keys = self.world.settings.get("api_keys", ())
        return {"authorization": f"Bearer {keys[0]}"} if keys else {}

    def _send(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        self._connection.request(method, path, body, headers or {})
        response = self._connection.getresponse()
        content = response.read()
        shown = {name.lower(): value for name, value in response.getheaders()}
        if response.will_close:
            self._connection.close()
        return response.status, shown, content

    def close(self) -> None:
        """Stops the server and waits until it has ended."""
        self._connection.close()
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class ServiceWay:
    """The bundle of a world, opened in this process. Its answers are bodies and errors only."""

    def __init__(self, world: World, folder: Path) -> None:
        """Opens copies of the files in an empty folder."""
        settings = world.prepare(folder)
        options = ServiceOptions(
            journal=Path(settings["journal"]), signing_key=SIGNING_KEY.encode()
        )
        self.service = Service.open(settings["bundle"], settings["store"], "cpu", options)
        self.names = names_of(self.service.versions())
        kind = typing.get_args(typing.get_type_hints(Service.rollback_items)["body"])[0]
        self._rollback_body = msgspec.json.Decoder(kind)

    def __enter__(self) -> ServiceWay:
        return self

    def __exit__(self, *_: object) -> None:
        self.service.close()

    def ask(self, case: Case) -> dict[str, Any] | None:
        """Returns the stable answer; None if the request has no form in Python.

        An error is its message and parameter, because only HTTP has a status.
        """
        call = self._call(case)
        if call is None:
            return None
        try:
            found = call()
        except Exception as error:
            wrong = {"message": str(error), "param": getattr(error, "param", None)}
            return {"error": stable(wrong, self.names)}
        body = None if found is None else json.loads(msgspec.json.encode(found))
        return {"body": stable(body, self.names)}

    def _call(self, case: Case) -> Callable[[], Any] | None:
        service, body = self.service, self._filled(case.body)
        bodies: dict[tuple[str, str], Callable[[Any], Any]] = {
            ("POST", "/v1/recommend"): service.recommend,
            ("POST", "/v1/rank"): service.rank,
            ("POST", "/v1/events"): service.add_events,
            ("PUT", "/v1/items"): service.put_items,
        }
        if case.path == "/v1/items:rollback":
            try:
                typed = self._rollback_body.decode(json.dumps(body))
            except msgspec.ValidationError:
                return None
            return lambda: service.rollback_items(typed)
        if (case.method, case.path) in bodies:
            function = bodies[case.method, case.path]
            return None if not isinstance(body, dict) else lambda: function(body)
        ids: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
            ("GET", r"/v1/users/(.+)/history", service.history),
            ("DELETE", r"/v1/users/(.+)", service.delete_user),
            ("GET", r"/v1/items/(.+)", service.item),
            ("DELETE", r"/v1/items/(.+)", service.hide_item),
        )
        for method, pattern, by_id in ids:
            found = re.fullmatch(pattern, case.path)
            if case.method == method and found:
                name = unquote(found[1])
                return lambda call=by_id: call(name)  # type: ignore[misc]
        return None

    def _filled(self, body: Any) -> Any:
        text = json.dumps(body)
        for digest, name in self.names.items():
            text = text.replace(name, digest)
        return json.loads(text)


def names_of(versions: dict[str, Any]) -> dict[str, str]:
    """Returns what stands in answers for the digests of models and catalogue."""
    if "model_version" not in versions:
        return {}
    catalog = versions["catalog_version"].partition(".")[0]
    return {versions["model_version"]: "$model", catalog: "$catalog"}


def expected_of_service(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns what `Service` answers where HTTP gives the recorded answer."""
    body = answer["body"]
    if answer["status"] < 400:
        label = body.get("experiment") if isinstance(body, dict) else None
        outside = {"experiment": None} if label is not None and label["arm"] is None else {}
        return {"body": body | outside if outside else body or None}
    error = answer["body"]["error"]
    return {"error": {"message": error["message"], "param": error["param"]}}


def stable_stream(text: str, names: dict[str, str]) -> dict[str, Any]:
    """Returns the events of a stream: heads of the chunks, pieces of each text, and the rest.

    Chunks of several texts alternate as the engine finishes them, so each text has its own list.
    """
    heads: list[Any] = []
    pieces: dict[str, list[Any]] = {}
    rest: list[Any] = []
    for event in filter(None, text.split("\n\n")):
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            rest.append(data)
            continue
        chunk = stable(json.loads(data), names)
        head = {name: chunk.pop(name, None) for name in HEAD}
        if head not in heads:
            heads.append(head)
        for choice in chunk.pop("choices", ()):
            usage = chunk.pop("usage", None)
            shown = choice | ({} if usage is None else {"usage": usage})
            pieces.setdefault(str(choice["index"]), []).append(shown)
        if chunk:
            rest.append(chunk)
    return {"heads": heads, "pieces": pieces, "rest": rest}


def metric_names(text: str) -> list[str]:
    """Returns types and names of metrics, with the names of their labels."""
    found = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            found.add(line.removeprefix("# TYPE "))
        elif line and not line.startswith("#"):
            name, _, rest = line.partition("{")
            labels = re.findall(r'(\w+)="', rest.partition("}")[0]) if rest else []
            found.add(f"{name.split()[0]} {{{','.join(labels)}}}")
    return sorted(name for name in found if "shadow" not in name)


def described(value: Any) -> Any:
    """Returns an OpenAPI description without its prose."""
    prose = ("description", "summary", "title", "example", "examples")
    if isinstance(value, dict):
        return {
            name: described(inner)
            for name, inner in value.items()
            if name not in prose or not isinstance(inner, str | list)
        } | ({"version": "<version>"} if isinstance(value.get("version"), str) else {})
    return [described(inner) for inner in value] if isinstance(value, list) else value

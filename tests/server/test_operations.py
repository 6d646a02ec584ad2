"""What follows from the table of operations: handlers, paths, `Allow`, access, refusal, limits."""

import asyncio
from dataclasses import replace
from unittest import mock
from urllib.parse import quote

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recserve.config import ServerConfig
from recserve.core.client import Client
from recserve.core.errors import QueueFull
from recserve.schemas.api import OPERATIONS, TEXT, Api, Pages, parameters_of
from recserve.schemas.items import RankRequest
from recserve.schemas.text import MAX_TEXT_TIMEOUT_MS
from recserve.server import routing
from recserve.server.app import create_app
from recserve.server.context import RequestContext
from recserve.server.errors import NotReady
from recserve.server.lifecycle import Lifecycle
from recserve.server.routing import ORDER, Routes, handles, make_routes
from recserve.server.trace import UPLOAD_KEY, Upload
from recserve.service import Service
from tests.support.live_server import live
from tests.support.scripted_text import scripted
from tests.support.tiny_bundle import shared_bundle

KEY, ADMIN_KEY = "an-api-key-of-one-client", "an-admin-key-of-the-operator"
PATHS = sorted({path for row in OPERATIONS.values() for path in (row.path, *row.aliases)})


def ask(app, method, path, root_path="", upload=None, key=None, **more):
    """The response of an application without a server in front of it."""

    async def sent(scope, receive, send):
        extra = {} if upload is None else {UPLOAD_KEY: upload}
        await app({**scope, **extra}, receive, send)

    async def run():
        transport = httpx.ASGITransport(sent, root_path=root_path)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", trust_env=False
        ) as client:
            return await client.request(method, path, headers=headers, **more)

    return asyncio.run(run())


def filled(path, value="x"):
    """A path template with the same value for each parameter."""
    return path.replace(":path}", "}").format_map(dict.fromkeys(parameters_of(path), value))


@pytest.fixture(scope="module")
def keyed():
    """An application with an API key and an admin key, whose service is never there."""
    return create_app(ServerConfig(llm="given", api_keys=(KEY,), admin_keys=(ADMIN_KEY,)))


@pytest.mark.parametrize("name", ["recommend", "ping_post", "openapi"])
def test_a_server_with_an_operation_that_nobody_handles_does_not_start(name):
    without = {key: one for key, one in routing.HANDLERS.items() if key != name}
    with (
        mock.patch.object(routing, "HANDLERS", without),
        pytest.raises(RuntimeError, match=f"no handler for {name}"),
    ):
        create_app(ServerConfig(llm="given"))


def test_a_handler_takes_what_its_operation_brings():
    async def of_another_body(context: RequestContext, body: RankRequest) -> None: ...

    async def without_its_parameter(context: RequestContext) -> None: ...

    async def of_one_more(context: RequestContext, name: str, user_id: str) -> None: ...

    for row, function in (
        (Api.recommend, of_another_body),
        (Api.model, without_its_parameter),
        (Api.model, of_one_more),
    ):
        with pytest.raises(TypeError, match=f"{function.__name__} handles {row.name}"):
            handles(row)(function)


def test_operations_of_one_path_have_the_same_access():
    opened = replace(Api.put_items, open=True, counted=False)
    with pytest.raises(RuntimeError, match="items and put_items differ in their access"):
        Routes([Api.items, opened])


@pytest.mark.parametrize("path", PATHS)
def test_a_method_without_an_operation_is_told_which_ones_there_are(keyed, path):
    rows = [row for row in OPERATIONS.values() if path in (row.path, *row.aliases)]
    allowed = {row.method for row in rows} | (
        {"HEAD"} if any(r.method == "GET" for r in rows) else set()
    )
    for method in {*ORDER, "OPTIONS", "BREW"} - allowed:
        answer = ask(keyed, method, filled(path), key=ADMIN_KEY if "admin" in path else KEY)
        assert answer.status_code == 405
        assert answer.headers["allow"].split(", ") == [one for one in ORDER if one in allowed]


IDS = st.one_of(
    st.text(min_size=1, max_size=12),
    st.lists(
        st.sampled_from(["history", "/", "%", "%2F", "\n", ":stop", "stats", "a"]), min_size=1
    ).map("".join),
).filter(lambda text: text not in (".", ".."))


@settings(max_examples=75, deadline=None)
@given(st.sampled_from([row for row in OPERATIONS.values() if row.parameters]), IDS)
def test_every_id_reaches_its_operation(row, text):
    """The client writes each slash of an id as %2F, and the server reads the same id."""
    if any(0xD800 <= ord(char) < 0xE000 for char in text):
        return
    for path in (row.path, *row.aliases):
        sent = filled(path, quote(text, safe=""))
        scope = {"type": "http", "path": filled(path, text), "raw_path": sent.encode()}
        route, parameters = TABLE.match(scope)
        if (
            row in (Pages.static, Api.model_metadata)
            and route.path in PATHS
            and "{" not in route.path
        ):
            continue  # `samples` and `stats` are operations of their own
        assert route.operations[row.method] is row
        assert set(parameters.values()) == {text}


TABLE = make_routes()


@settings(max_examples=25, deadline=None)
@given(tail=st.text("abz/:.%{}\n", max_size=8), root=st.sampled_from(["", "/shop", "/v1"]))
def test_everything_below_admin_needs_an_admin_key(keyed, tail, root):
    for path in ("/admin", "/admin/" + quote(tail).replace(".", "%2E"), "/admin/bundle"):
        for key in (None, KEY):
            answer = ask(keyed, "GET", root + path, root_path=root, key=key)
            assert answer.status_code == 401, path
            assert "an admin key" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [*PATHS, "/", "/nowhere", "/v1", "/admin/nowhere"])
def test_a_path_is_closed_unless_its_row_opens_it(keyed, path):
    rows = [row for row in OPERATIONS.values() if path in (row.path, *row.aliases)]
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        status = ask(keyed, method, filled(path)).status_code
        assert (status == 401) != any(row.open for row in rows), (method, status)


def test_a_full_queue_refuses_every_operation_that_waits_in_it_on_arrival(tmp_path):
    """The body is not read: it may be anything."""
    with Service.open(shared_bundle(), f"lmdb:{tmp_path}", "cpu") as service:
        app = create_app(ServerConfig(bundle=service.bundle.root), service)
        app.state.lifecycle.start()
        app.state.lifecycle.loaded.wait()
        full = mock.Mock(side_effect=QueueFull("full", 1.0))
        with mock.patch.object(service.engine, "check_queue", full):
            for row in (one for one in OPERATIONS.values() if one.queue or one.body):
                for path in (row.path, *row.aliases):
                    for value in ("recommend", "rank") if row is Api.infer else ("recommend",):
                        full.reset_mock()
                        upload = Upload(num_ahead=9)
                        content = b"{" if row.body else None
                        answer = ask(
                            app, row.method, filled(path, value), upload=upload, content=content
                        )
                        assert (answer.status_code == 429) == bool(row.queue), path
                        call = mock.call(row.models({"name": value}), Client(b"127.0.0.1"), 9)
                        assert full.call_args_list == ([call] if row.queue else [])


def test_requests_that_may_take_as_long_as_a_text_are_those_of_the_language_model():
    """Of both clients and the server: their limits follow from the row."""
    for row in OPERATIONS.values():
        if row.body is not None and "timeout_ms" in row.body.__struct_fields__:
            _, components = msgspec.json.schema_components([row.body])
            timeout = components[row.body.__name__]["properties"]["timeout_ms"]
            most = max(one.get("maximum", 0) for one in timeout.get("anyOf", [timeout]))
            assert (most == MAX_TEXT_TIMEOUT_MS) == row.text == (row.queue == TEXT), row.name


HISTORY = ["item000003", "item000007"]
RANKING = {"history": HISTORY, "candidates": [{"item_id": "item000009"}]}
TENSOR = {"name": "history", "shape": [1, 1], "datatype": "BYTES", "data": ["item000003"]}
BODIES = {
    "recommend": {"history": HISTORY, "k": 3},
    "similar": {"item_ids": HISTORY, "k": 3},
    "rank": RANKING,
    "rank_batch": {"requests": [RANKING, RANKING]},
    "infer": {"inputs": [TENSOR]},
    "add_events": {"events": [{"user_id": "u", "item_id": "item000003"}]},
    "rollback_items": {"catalog_version": "unknown"},
    "complete": {"prompt": "a", "max_tokens": 2},
    "tokenize": {"prompt": "a"},
    "detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module", params=["items", "texts"])
def client(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "texts":
        with live(scripted(folder, lambda prompt, seed: "yes")) as running:
            yield running
    else:
        with live(Service.open(shared_bundle(), f"lmdb:{folder}", "cpu")) as running:
            yield running


def test_a_request_sees_one_service(client, monkeypatch, request):
    """It takes the service once. A swap or a drain that begins then does not reach it."""
    service, taken = client.app.state.lifecycle.service, []

    def take(_):
        taken.append(1)
        if len(taken) > 1:
            raise NotReady("another service")
        return service

    monkeypatch.setattr(Lifecycle, "service", property(take))
    for row in OPERATIONS.values():
        if row.admin or (row.body is not None and row.name not in BODIES):
            continue
        taken.clear()
        answer = client.request(
            row.method, filled(row.path, "recommend"), json=BODIES.get(row.name)
        )
        assert "another service" not in answer.text and len(taken) <= 1, row.name
        if "items" in request.node.callspec.id and row.queue not in (TEXT, ()):
            assert answer.status_code == 200, row.name

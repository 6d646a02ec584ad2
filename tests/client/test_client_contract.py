"""Every operation of openapi.json has a client method whose request the description allows."""

from __future__ import annotations

import asyncio
import datetime
import inspect
import subprocess
import sys

import httpx
import pytest

from recserve.client import AsyncClient, Client
from recserve.config import ServerConfig
from recserve.schemas import admin, browse, encoding, events, inference, items, scoring, text
from recserve.schemas.chat_messages import ChatMessage
from recserve.server.app import create_app
from tests.support.described_requests import misfits, operations

NOW = datetime.datetime(2026, 11, 20, tzinfo=datetime.UTC)
RECOMMEND = items.RecommendRequest(
    user=items.UserRef(id="a/b"),
    history=["x"],
    k=3,
    strategy="beam",
    beam_width=10,
    dense_weight=0.5,
    exclude=items.Exclusions(item_ids=["y"], seen=True, seen_within_s=60.0),
    filter={"eq": ["category", "Care"]},
    outcome={"click": 1.0},
    diversity=items.Diversity(
        category=2,
        caps=[items.ColumnCap(field="brand", most=2)],
        prefix=(0, 2),
        at_least=[items.Quota(count=1, new_within_s=60.0)],
    ),
    on_deadline="popular",
    exclude_shown=items.ShownLimit(within="6h", times=3),
    discount_shown=items.ShownDiscount(within="1d", by=0.5),
    shown_ids=["z"],
    fields=["title", "price"],
    timeout_ms=100,
    request_id="r-1",
    explain=True,
)
RANK = items.RankRequest(
    candidates=[items.Candidate(item_id="x", features={"price": 1.0}, shown_at=NOW)],
    history=["y"],
    fields=["title"],
)
TENSOR = inference.InferTensor(name="user_id", shape=[1], datatype="BYTES", data=["u"])
COMPLETION = text.CompletionRequest(prompt="Once", max_tokens=3, stop=["."], seed=1)
CHAT = text.ChatRequest(messages=[ChatMessage(role="user", content="Hi")], n=2)
EVENT = events.EventInput(user_id="u", item_id="x", type="click", value=1.0)
SCORING = scoring.GenerativeScoringRequest(query="q", items=["a"], label_token_ids=[1, 2])
RERANK = scoring.RerankRequest(query="q", documents=["a", scoring.Document(text="b")])
ARGUMENTS = {
    "recommend": (RECOMMEND,),
    "similar": (items.SimilarRequest(item_ids=["x"], k=3, by="vectors"),),
    "rank": (RANK,),
    "rank_batch": (items.RankBatchRequest(requests=[RANK]),),
    "add_events": (events.EventsRequest(events=[EVENT], warm=True),),
    "history": ("a/b history",),
    "delete_user": ("a/history",),
    "put_items": (items.ItemsRequest(items=[{"item_id": "x", "price": 1}]),),
    "item": ("x/y?z",),
    "items": (browse.ItemsQuery(query="red & blue", limit=5, after=20),),
    "users": (browse.UsersQuery(prefix="a/b"),),
    "hide_item": ("x",),
    "rollback_items": (items.RollbackRequest(catalog_version="a.1"),),
    "complete": (COMPLETION,),
    "chat": (CHAT,),
    "rerank": (RERANK,),
    "rerank_v2": (RERANK,),
    "generative_scoring": (SCORING,),
    "embeddings": (encoding.EmbeddingsRequest(input=["a", "b"]),),
    "tokenize": (encoding.TokenizeRequest(prompt="a b"),),
    "detokenize": (encoding.DetokenizeRequest(tokens=[1, 2]),),
    "model": ("recommender",),
    "model_metadata": ("recommend",),
    "model_ready": ("rank",),
    "model_config": ("rank",),
    "model_statistics": ("rank",),
    "infer": ("recommend", inference.InferRequest(inputs=[TENSOR])),
    "stop_experiment": ("a/b",),
    "start_experiment": ("width",),
    "load_bundle": (admin.BundleLoadRequest(path="two"),),
}


@pytest.fixture(scope="module")
def described() -> dict:
    """The description that a server with admin routes serves."""
    return create_app(ServerConfig(llm="given")).openapi()


def methods_of(described):
    """The operations that a client needs a method for: all but /ping by another HTTP method."""
    return [name for name in operations(described) if name != "ping_post"]


def test_every_operation_has_a_method(described):
    missing = {
        name
        for name in methods_of(described)
        for kind in (Client, AsyncClient)
        if not callable(getattr(kind, name, None))
    }
    assert not missing, f"add these operations to recserve/client: {missing}"


def test_every_method_sends_what_is_described(described):
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(418)

    wrong = []
    with Client("http://server", transport=httpx.MockTransport(answer)) as client:
        for name in methods_of(described):
            with pytest.raises(RuntimeError, match="418"):
                getattr(client, name)(*ARGUMENTS.get(name, ()))
            wrong += misfits(described, name, seen[-1])
    assert len(seen) == len(methods_of(described))
    assert wrong == []


def test_both_clients_send_the_same(described):
    sent: list[list[tuple]] = [[], []]

    def recorder(which: int):
        def answer(request: httpx.Request) -> httpx.Response:
            headers = {k: v for k, v in request.headers.items() if k != "x-deadline-ms"}
            sent[which].append((request.method, request.url, request.content, headers))
            return httpx.Response(418)

        return httpx.MockTransport(answer)

    async def all_of(client: AsyncClient) -> None:
        for name in methods_of(described):
            with pytest.raises(RuntimeError, match="418"):
                await getattr(client, name)(*ARGUMENTS.get(name, ()))

    asyncio.run(all_of(AsyncClient("http://server", transport=recorder(0))))
    client = Client("http://server", transport=recorder(1))
    for name in methods_of(described):
        with pytest.raises(RuntimeError, match="418"):
            getattr(client, name)(*ARGUMENTS.get(name, ()))
    assert sent[0] == sent[1]


def test_both_clients_have_the_same_methods_and_types():
    def public(kind: type) -> dict[str, list[str]]:
        """Parameters of each method; what one awaits, the other returns."""
        return {
            name: [str(one) for one in inspect.signature(method).parameters.values()]
            for name, method in vars(kind).items()
            if callable(method) and not name.startswith("_")
        }

    assert public(Client) == public(AsyncClient)


def test_a_body_that_the_description_does_not_allow_is_found(described):
    request = httpx.Request("POST", "http://s/v1/recommend", json={"k": 0, "userr": {}})
    found = misfits(described, "recommend", request)
    # The value of k, the unknown field, and that neither user nor history is there.
    assert len(found) == 3 and "0 is less than the minimum" in "".join(found)
    assert misfits(described, "rank", request)[0].startswith("POST /v1/recommend is not")


def test_the_client_needs_no_torch():
    code = (
        "import sys, recserve.client; "
        "print([n for n in ('torch', 'numpy', 'fastapi', 'pyarrow') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr

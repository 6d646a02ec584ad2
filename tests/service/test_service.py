"""The service on a real bundle, engine and store: slates, rankings, events, deletions."""

import datetime

import lmdb
import numpy as np
import pytest
from msgspec import UNSET, structs

from recserve.core.errors import QueueFull
from recserve.core.futures import wait_all
from recserve.schemas.events import EventInput, EventsRequest
from recserve.schemas.items import (
    Candidate,
    Exclusions,
    InvalidRequest,
    RankBatchRequest,
    RankRequest,
    RecommendRequest,
    UserRef,
)
from recserve.search.strategy import strategy_classes
from recserve.service import Service, ServiceOptions
from recserve.service.errors import ServiceClosed, UnknownModel
from tests.support.background_work import settled
from tests.support.tiny_bundle import shared_bundle, tiny_bundle

KEY = b"sixteen bytes or"


@pytest.fixture
def service(tmp_path):
    with Service.open(
        shared_bundle(), f"lmdb:{tmp_path}/store", "cpu", ServiceOptions(signing_key=KEY)
    ) as opened:
        yield opened


@pytest.fixture
def user(service):
    return service.samples(1, 1)["users"][0]


@pytest.fixture
def ids(service):
    return service.catalog.current.catalog.items.ids


def recommend(service, user=None, **fields):
    ref = None if user is None else UserRef(id=user)
    return service.recommend(RecommendRequest(user=ref, **fields))


def rank(service, user, item_ids, **fields):
    candidates = [Candidate(item_id=i) for i in item_ids]
    return service.rank(RankRequest(user=UserRef(id=user), candidates=candidates, **fields))


def view(user, item, **fields):
    return EventsRequest(events=[EventInput(user_id=user, item_id=item, **fields)])


def seen_items(service, user):
    return [event.item_id for event in service.history(user).events]


def test_what_was_seen_long_ago_may_come_back(service, user, ids):
    now = datetime.datetime.now(datetime.UTC)
    for item, age in ((ids[3], 90), (ids[5], 3)):
        moment = (now - datetime.timedelta(days=age)).isoformat()
        service.add_events(view("window", item, timestamp=moment))

    def left_out(user, days, **fields):
        exclude = Exclusions(seen_within_s=days * 86_400)
        answer = recommend(service, user, k=500, beam_width=500, exclude=exclude, **fields)
        return set(ids) - {i.item_id for i in answer.items}, answer.degraded

    assert left_out("window", 1)[0] == set()
    assert left_out("window", 30) == ({ids[5]}, ["fewer_than_k"])
    assert left_out("window", 365)[0] == {ids[3], ids[5]}
    # Without moments, all of them count as seen, and the answer says so.
    gone, degraded = left_out(user, 30, history=ids[:4])
    assert gone == set(ids[:4]) and "seen_within_s_ignored" in degraded


def test_slate_scores_are_the_likelihoods_of_its_items(service, user):
    slate = recommend(service, user, k=10)
    ranked = rank(service, user, [i.item_id for i in slate.items], scorer="likelihood")
    assert [i.item_id for i in ranked.items] == [i.item_id for i in slate.items]
    np.testing.assert_allclose(
        [i.score for i in ranked.items], [i.score for i in slate.items], atol=1e-4
    )


def test_places_that_beams_leave_empty_are_filled_with_popular_items(service, user):
    answer = recommend(service, user, k=3, beam_width=3)
    assert {i.source for i in answer.items} == {"model"}
    body = RecommendRequest(user=UserRef(id=user), k=30)
    work = service.recommender.begin(body)
    (slate,) = wait_all(work.futures)
    short = type(slate)(slate.rows[:4], slate.scores[:4], True, 1, slate.timing)
    filled = work.finish([short])
    assert [i.source for i in filled.items] == ["model"] * 4 + ["popular"] * 26
    assert filled.items[4].score is None
    assert len({i.item_id for i in filled.items}) == 30
    assert not {i.item_id for i in filled.items} & set(seen_items(service, user))


def test_an_item_that_must_not_be_there_is_counted_and_dropped(service, user):
    body = RecommendRequest(user=UserRef(id=user), k=3)
    work = service.recommender.begin(body)
    (slate,) = wait_all(work.futures)
    seen = service.catalog.current.rows.get(seen_items(service, user)[0])
    wrong = type(slate)(
        np.array([slate.rows[0], seen, 10_000]), slate.scores, True, 1, slate.timing
    )
    answer = work.finish([wrong])
    assert [i.source for i in answer.items] == ["model", "popular", "popular"]
    assert "illegal_items" in answer.degraded and service.gauges().illegal_items == 2


def test_a_new_event_changes_the_next_answer_and_costs_one_token(service, user):
    recommend(service, user)
    before = recommend(service, user, explain=True)
    assert before.explanation.root_tokens_computed == 0
    top = before.items[0].item_id
    assert service.add_events(view(user, top)).accepted == 1
    after = recommend(service, user, explain=True)
    assert top not in {i.item_id for i in after.items}
    assert [i.score for i in after.items] != [i.score for i in before.items]
    assert after.explanation.root_tokens_computed == 1
    assert after.explanation.root_tokens_cached == before.explanation.root_tokens_cached
    assert after.explanation.history_events == before.explanation.history_events + 1
    assert before.items[0].semantic_id == service.item(top).semantic_id


def test_events_are_judged_one_by_one(service, ids):
    good = {"user_id": "new", "item_id": ids[0], "timestamp": "2026-01-02T03:04:05Z"}
    rows = [
        good,
        good,
        {**good, "event_id": "e1"},
        {**good, "event_id": "e1", "item_id": ids[1]},
        {**good, "item_id": "gone"},
        {**good, "timestamp": "yesterday"},
        {**good, "timestamp": "2026-01-02T03:04:05"},
        {**good, "timestamp": "1969-01-02T03:04:05Z"},
        {**good, "timestamp": "2999-01-02T03:04:05Z"},
        {**good, "type": "sneeze"},
        {**good, "user_id": ""},
        {**good, "user_id": "u" * 257},
        {**good, "user_id": "\N{GRINNING FACE}" * 200},
        {**good, "event_id": "e" * 257},
        {**good, "value": 1e39},
    ]
    answer = service.add_events(EventsRequest(events=[EventInput(**row) for row in rows]))
    assert (answer.accepted, answer.duplicates) == (2, 2)
    assert [r.index for r in answer.rejected] == list(range(4, 15))
    words = ["gone", "RFC 3339", "time zone", "1970", "future", "sneeze", "0 bytes", "256"]
    words += ["800 bytes", "256", "value"]
    for rejection, word in zip(answer.rejected, words, strict=True):
        assert word in rejection.reason
    assert [e.timestamp for e in service.history("new").events] == ["2026-01-02T03:04:05Z"] * 2


def test_nothing_of_a_deleted_user_is_left(service, user, ids):
    for n in range(30):  # more than the window of 16 items, so that it has slid
        service.add_events(view(user, ids[n]))
        recommend(service, user)
        rank(service, user, ids[:3])
    history = seen_items(service, user)
    assert service.gauges().kv_pages["cached"] > 0
    service.delete_user(user)
    assert service.history(user).events == []
    assert recommend(service, user).degraded == ["cold_start"]
    assert service.gauges().kv_pages["cached"] == 0
    again = recommend(service, history=history, explain=True)
    assert again.explanation.root_tokens_cached == 0
    service.delete_user(user)
    service.delete_user("never seen")


def test_a_deleted_user_stays_deleted_when_the_store_is_opened_again(tmp_path):
    url = f"lmdb:{tmp_path}/store"
    with Service.open(shared_bundle(), url, "cpu") as service:
        gone, kept = service.samples(2, 1)["users"]
        events = service.history(kept).events
        assert events
        service.delete_user(gone)
    with Service.open(shared_bundle(), url, "cpu") as service:
        assert service.history(gone).events == []
        assert service.history(kept).events == events


def test_a_damaged_history_is_said_and_a_closed_store_too(tmp_path):
    url = f"lmdb:{tmp_path}/store"
    with Service.open(shared_bundle(), url, "cpu") as service:
        user = service.samples(1, 1)["users"][0]
    with lmdb.open(f"{tmp_path}/store") as environment, environment.begin(write=True) as txn:
        value = bytearray(txn.get(user.encode()))
        value[20] ^= 1
        txn.put(user.encode(), bytes(value))
    with Service.open(shared_bundle(), url, "cpu") as service:
        assert recommend(service, user).degraded == ["history_damaged", "cold_start"]
        rejected = service.add_events(view(user, service.samples(1, 1)["items"][0])).rejected
        assert "damaged" in rejected[0].reason
        service.delete_user(user)
        assert recommend(service, user).degraded == ["cold_start"]
        service.histories.close()
        assert recommend(service, user).degraded == ["history_unavailable", "cold_start"]


@pytest.mark.parametrize("scorer", ["ranker", "likelihood"])
def test_a_score_does_not_depend_on_company(service, user, ids, scorer):
    among = {i.item_id: i.scores for i in rank(service, user, ids[:200], scorer=scorer).items}
    reverse = {i.item_id: i.scores for i in rank(service, user, ids[199::-1], scorer=scorer).items}
    for item in ids[:5]:
        (alone,) = rank(service, user, [item], scorer=scorer).items
        assert alone.scores == pytest.approx(among[item], abs=1e-5)
        assert alone.scores == pytest.approx(reverse[item], abs=1e-5)


def test_a_candidate_sees_only_events_before_its_exposure(service, ids):
    for day, item in enumerate(ids[:4], start=1):
        service.add_events(view("timed", item, timestamp=f"2026-01-0{day}T00:00:00Z"))

    def score(moment):
        candidate = Candidate(item_id=ids[9], shown_at=moment)
        body = RankRequest(user=UserRef(id="timed"), candidates=[candidate])
        return service.rank(body).items[0].score

    early, later = (datetime.datetime(2026, 1, d, 12, tzinfo=datetime.UTC) for d in (2, 3))
    before = (score(early), score(later))
    service.add_events(view("timed", ids[7], timestamp="2026-01-05T00:00:00Z"))
    assert (score(early), score(later)) == before
    assert before[0] != before[1]


def test_candidate_features_replace_the_catalogues(service, user, ids):
    price = service.item(ids[0]).attributes["price"]

    def score(**features):
        candidate = Candidate(item_id=ids[0], features=features or None)
        return (
            service.rank(RankRequest(user=UserRef(id=user), candidates=[candidate])).items[0].score
        )

    assert score() == pytest.approx(score(price=price), abs=1e-6)
    assert score() != score(price=price * 50)
    with pytest.raises(InvalidRequest, match="price"):
        score(weight=1.0)


@pytest.mark.parametrize("price", [1e300, -1e30])
def test_a_number_that_would_overflow_in_the_ranker_is_refused(service, user, ids, price):
    candidates = [Candidate(item_id=ids[1]), Candidate(item_id=ids[0], features={"price": price})]
    with pytest.raises(InvalidRequest, match=r"features.price: expected .* to .*, got .*e\+30"):
        service.rank(RankRequest(user=UserRef(id=user), candidates=candidates))


def test_a_batch_answers_in_order_and_keeps_errors_apart(service, user, ids):
    one = RankRequest(user=UserRef(id=user), candidates=[Candidate(item_id=i) for i in ids[:4]])
    bad = RankRequest(user=UserRef(id=user), candidates=one.candidates, scorer="dice")
    works = service.ranker.begin_each(RankBatchRequest(requests=[one, bad, one]), "batch")
    assert works[0].wait().request_id == "batch.0"
    with pytest.raises(InvalidRequest, match="dice"):
        works[1].wait()
    assert works[2].wait().items == service.rank(one).items


def test_what_this_bundle_lacks_is_refused_with_the_command_that_adds_it(tmp_path):
    bundle = tiny_bundle(tmp_path, ranker=False)
    with Service.open(bundle, device="cpu") as service:
        classes = strategy_classes()
        lacking = {
            name: classes[name].missing for name in classes.keys() - set(service.engine.selectable)
        }
        assert {"dense", "specgr"} <= lacking.keys()
        for name, advice in (lacking | {"guess": None}).items():
            with pytest.raises(InvalidRequest) as caught:
                recommend(service, "u", strategy=name)
            said = f"{name!r}: {advice}" if advice else repr(name)
            assert str(caught.value).endswith(f"similar_vectors, got {said}")
        with pytest.raises(InvalidRequest, match="got 'ranker': no ranker .* train ranker`$"):
            rank(service, "u", ["i"], scorer="ranker")


def test_a_bundle_without_models_says_so(tmp_path):
    bundle = tiny_bundle(tmp_path, ranker=False, recommender=False)
    service = Service.open(bundle, device="cpu")
    assert (tmp_path / "bundle.history").is_dir()
    for name in strategy_classes():
        with pytest.raises(UnknownModel, match="or ask for strategy popular, latest or similar"):
            recommend(service, "u", strategy=name)
    with pytest.raises(UnknownModel):
        rank(service, "u", ["i"])
    assert recommend(service, "u").degraded == ["no_recommender"]
    assert [model["recserve"]["trained"] for model in service.models()] == [False]
    service.close()
    with pytest.raises(ServiceClosed):
        recommend(service, "u")


@pytest.mark.parametrize("ranker", [False, True])
def test_the_lists_need_no_recommender(tmp_path, ranker):
    """On its first day a service has items and events. The lists are those of a trained bundle."""
    bare, trained = (tmp_path / name for name in ("bare", "trained"))
    bundles = tiny_bundle(bare, ranker, recommender=False), tiny_bundle(trained)
    answers = []
    for bundle in bundles:
        with Service.open(bundle, device="cpu") as service:
            user = service.samples(1, 1)["users"][0]
            (seen, *_) = seen_items(service, user)
            title = service.item(seen).categories[0]
            asked = [
                {"strategy": "popular", "k": 7},
                {"strategy": "latest", "k": 7, "exclude": Exclusions(seen=False)},
                {"strategy": "popular", "filter": {"eq": ["category", title]}, "explain": True},
            ]
            service.add_events(view("new user", seen))
            slates = [recommend(service, user, **each) for each in asked]
            slates.append(recommend(service, strategy="popular", k=1))
            answers.append([[item.item_id for item in slate.items] for slate in slates])
            assert {slate.strategy for slate in slates} == {"popular", "latest"}
            assert not any("no_model_items" in slate.degraded for slate in slates)
            with pytest.raises(InvalidRequest, match="does not use it"):
                recommend(service, user, strategy="popular", dense_weight=1.0)
    assert answers[0] == answers[1] and len(answers[0][0]) == 7


@pytest.mark.parametrize("model", ["recommender", "ranker"])
def test_warm_events_leave_only_the_tree_to_compute(service, tmp_path, ids, model):
    """The next answer finds its whole prefix cached, and is that of a service that was cold."""
    body = EventsRequest(events=[EventInput(user_id="me", item_id=i) for i in ids[:9]], warm=True)
    answer = service.add_events(body)
    assert (answer.accepted, answer.warmed) == (9, 2)
    more = service.add_events(view("me", ids[9]))
    assert more.warmed is UNSET

    def ask(opened):
        if model == "ranker":
            begun = opened.ranker.begin(
                RankRequest(
                    user=UserRef(id="me"), candidates=[Candidate(item_id=i) for i in ids[20:60]]
                )
            )
        else:
            begun = opened.recommender.begin(RecommendRequest(user=UserRef(id="me"), k=30))
        (result,) = wait_all(begun.futures)
        return result.timing, {i.item_id: i.score for i in begun.finish([result]).items}

    again = structs.replace(view("me", ids[10]), warm=True)
    assert service.add_events(again).warmed == 2
    settled(service)
    timing, warm = ask(service)
    assert timing.prefix_computed == 0 < timing.prefix_cached
    with Service.open(
        shared_bundle(), f"lmdb:{tmp_path}/cold", "cpu", ServiceOptions(journal=tmp_path / "items")
    ) as cold:
        for item in ids[:11]:
            cold.add_events(view("me", item))
        timing, expected = ask(cold)
    assert timing.prefix_cached == 0 < timing.prefix_computed
    assert list(warm) == list(expected)
    assert warm == pytest.approx(expected, abs=1e-5)


def test_a_full_queue_leaves_prefixes_cold(service, ids, monkeypatch):
    def full(*_):
        raise QueueFull("full", 0.1)

    monkeypatch.setattr(service.engine, "submit", full)
    body = structs.replace(view("me", ids[0]), warm=True)
    assert service.add_events(body).warmed == 0

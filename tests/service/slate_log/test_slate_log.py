"""The slate log: what it holds, what a crash loses, bounds, deletion, and the joined table."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from recserve.files import TEMPORARY
from recserve.schemas.events import EventInput
from recserve.schemas.items import RecommendResponse
from recserve.service import parquet_log
from recserve.service.attribution import Signer
from recserve.service.parquet_log import LogFiles
from recserve.service.slate_log.reader import read_log, shown_items
from recserve.service.slate_log.records import SCHEMAS, token_id, verify_tokens
from recserve.service.slate_log.slate_log import SlateLog
from tests.support.paths import ROOT
from tests.support.slate_records import SIGNER, opened, slate


def click(answer: RecommendResponse, item: str, user: str = "u1", **more) -> EventInput:
    token = answer.attribution_token
    return EventInput(user_id=user, item_id=item, attribution_token=token, **more)


def outcomes(log: SlateLog, events: list[EventInput]) -> None:
    found, wrong = verify_tokens(events, set(), SIGNER, log.settings.users)
    assert not wrong
    for one in found:
        log.outcome(one)


def test_slates_join_their_outcomes(tmp_path):
    log = opened(tmp_path)
    first, second = slate(1), slate(2, None)
    log.slate("u1", first, SIGNER)
    log.slate(None, second, SIGNER)
    twice = click(first, "i1", event_id="e1", type="click", value=2.0)
    outcomes(log, [twice, twice, click(first, "i1", type="purchase"), click(second, "i0", "u2")])
    log.close()
    table = shown_items(tmp_path)
    assert table.num_rows == 6 and log.counts.rows == {"slates": 2, "outcomes": 4}
    rows = {(row["token_id"], row["item_id"]): row for row in table.to_pylist()}
    hit = rows[token_id(first.attribution_token), "i1"]
    assert (hit["num_outcomes"], hit["value"], hit["rank"], hit["score"]) == (2, 2.0, 2, -1.0)
    assert hit["user"] == SIGNER.user("u1") and hit["first_outcome"] is not None
    anonymous = rows[token_id(second.attribution_token), "i0"]
    assert (anonymous["user"], anonymous["num_outcomes"]) == (None, 1)
    assert sum(table.column("num_outcomes").to_pylist()) == 3
    clicks = shown_items(tmp_path, types=["click"]).column("num_outcomes").to_pylist()
    assert sum(clicks) == 1


def test_outcomes_cannot_be_inflated(tmp_path):
    log = opened(tmp_path)
    first, anonymous = slate(1), slate(2, None)
    log.slate("u1", first, SIGNER)
    log.slate(None, anonymous, SIGNER)
    unnamed = [click(first, "i1", type="click", value=float(n % 3)) for n in range(50)]
    unshown = [click(first, f"i{n}", type="click", event_id=f"e{n}") for n in range(3, 50)]
    both = [click(first, "i0", type=kind, event_id="e") for kind in ("click", "purchase")]
    users = [
        click(anonymous, "i2", f"user{n}", type="click", event_id="e", timestamp=moment)
        for n, moment in enumerate(["2026-11-24T08:00:00Z", "2026-11-24T07:00:00Z"] * 20)
    ]
    assert verify_tokens(unshown, set(), SIGNER, "hash")[0] == []
    outcomes(log, [*unnamed, *both, *users])
    log.close()
    rows = shown_items(tmp_path).to_pylist()
    counts = {(row["user"] is None, row["item_id"]): row["num_outcomes"] for row in rows}
    assert counts == {
        (False, "i0"): 1,
        (False, "i1"): 1,
        (False, "i2"): 0,
        (True, "i0"): 0,
        (True, "i1"): 0,
        (True, "i2"): 1,
    }
    assert [row["value"] for row in rows if row["item_id"] == "i1" and row["user"]] == [2.0]


def test_a_log_without_outcomes_can_be_read(tmp_path):
    assert shown_items(tmp_path).num_rows == 0
    log = opened(tmp_path)
    log.slate("u1", slate(1), SIGNER)
    log.close()
    assert shown_items(tmp_path).column("num_outcomes").to_pylist() == [0, 0, 0]


@pytest.mark.parametrize("users", ["hash", "id", "none"])
def test_what_stands_for_a_user(tmp_path, users):
    log = opened(tmp_path, users=users)
    answer = slate(1, "anna")
    log.slate("anna", answer, SIGNER)
    outcomes(log, [click(answer, "i0", "anna", event_id="anna-7")])
    log.close()
    expected = {"hash": SIGNER.user("anna"), "id": "anna", "none": None}[users]
    for kind in SCHEMAS:
        assert read_log(tmp_path, kind).column("user").to_pylist() == [expected]
    text = str(
        read_log(tmp_path, "slates").to_pylist() + read_log(tmp_path, "outcomes").to_pylist()
    )
    assert ("anna" in text) == (users == "id")


def test_tokens_are_verified():
    answer = slate(1)
    other = Signer(b"x" * 16).token("r", "u1", "m", "c", ["i0"])
    events = [
        click(answer, "i0"),
        click(answer, "i0", "u2"),
        EventInput(user_id="u1", item_id="i0", attribution_token=other),
        EventInput(user_id="u1", item_id="i0", attribution_token="?"),
        EventInput(user_id="u1", item_id="i0", attribution_token="A" * 9000),
        EventInput(user_id="u1", item_id="i0"),
        EventInput(
            user_id="u1",
            event_id="e",
            correction="remove",
            attribution_token=answer.attribution_token,
        ),
        click(answer, "i0"),
    ]
    found, wrong = verify_tokens(events, {7}, SIGNER, "hash")
    assert len(found) == 1
    reasons = {one.index: one.reason for one in wrong}
    assert list(reasons) == [1, 2, 3, 4, 6]
    assert "another user" in reasons[1] and "not signed" in reasons[2] and "at most" in reasons[4]


def test_a_deleted_user_is_in_no_file(tmp_path):
    log = opened(tmp_path, users="id")
    for number in range(3):
        for user in ("anna", "ben"):
            log.slate(user, slate(number, user), SIGNER)
        outcomes(log, [click(slate(number, "anna"), "i0", "anna")])
        log.forget("nobody", SIGNER)  # writes what is buffered
    assert len(list(tmp_path.glob("*.parquet"))) == 6
    log.slate("anna", slate(9, "anna"), SIGNER)
    log.forget("anna", SIGNER)
    log.close()
    users = read_log(tmp_path, "slates").column("user").to_pylist()
    assert users == ["ben"] * 3 and read_log(tmp_path, "outcomes").num_rows == 0
    with pytest.raises(OSError, match="closed"):
        log.forget("ben", SIGNER)


def test_a_full_buffer_drops_and_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_log, "MAX_SIZE", 10)
    log = opened(tmp_path)
    for number in range(5):
        log.slate("u1", slate(number), SIGNER)
    log.close()
    assert log.counts.dropped["queue_full"] == 3 and log.counts.rows["slates"] == 2


def test_a_full_buffer_is_written_before_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_log, "ROTATE_SIZE", 8)
    log = opened(tmp_path)
    for number in range(2):
        log.slate("u1", slate(number), SIGNER)
    while not log.counts.rows["slates"]:
        time.sleep(0.01)
    log.close()
    assert read_log(tmp_path, "slates").num_rows == 2


def test_the_oldest_files_are_deleted(tmp_path):
    files = LogFiles(tmp_path, 1, SCHEMAS)
    rows = [{"token_id": str(n)} for n in range(10)]
    for number in range(4):
        files.write("slates" if number % 2 else "outcomes", rows[number : number + 1])
    size = max(path.stat().st_size for path in tmp_path.iterdir())
    files.max_bytes = 2 * size
    assert 0 < files.limit() <= 2 * size
    left = [*read_log(tmp_path, "outcomes").column("token_id").to_pylist()]
    left += read_log(tmp_path, "slates").column("token_id").to_pylist()
    assert left and "3" in left and "0" not in left


def test_a_disk_that_refuses_is_counted_and_the_log_goes_on(tmp_path, monkeypatch):
    log = opened(tmp_path)
    real = LogFiles.write

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LogFiles, "write", refuse)
    log.slate("u1", slate(1), SIGNER)
    log.forget("nobody", SIGNER)
    monkeypatch.setattr(LogFiles, "write", real)
    log.slate("u1", slate(2), SIGNER)
    log.close()
    assert log.counts.dropped["write_failed"] == 1 and read_log(tmp_path, "slates").num_rows == 1


CRASHING = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.support.slate_records import SIGNER, opened, slate
log = opened(Path({folder!r}), rotate_s=0.02)
number = 0
while True:
    log.slate("u1", slate(number), SIGNER)
    number += 1
    time.sleep(0.001)
    if log.counts.rows["slates"]:
        print(log.counts.rows["slates"], flush=True)
"""


def test_every_visible_file_is_complete(tmp_path):
    """In copies that are made while the log is written, which is what a kill leaves."""
    log, number = opened(tmp_path / "log", rotate_s=0.02), 0
    for copy in range(4):
        before = log.counts.rows["slates"]
        while log.counts.rows["slates"] == before:
            log.slate("u1", slate(number), SIGNER)
            number += 1
            time.sleep(0.001)
        written = log.counts.rows["slates"]
        visible = shutil.ignore_patterns(".*")
        left = shutil.copytree(tmp_path / "log", tmp_path / f"left-{copy}", ignore=visible)
        assert read_log(left, "slates").num_rows >= written
    log.close()
    assert read_log(tmp_path / "log", "slates").num_rows == number


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 60])
def test_a_killed_process_loses_the_buffer_only(tmp_path, lines):
    script = CRASHING.format(root=str(ROOT), folder=str(tmp_path / "log"))
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    assert child.stdout is not None
    written = [int(child.stdout.readline()) for _ in range(lines)][-1]
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    table = read_log(tmp_path / "log", "slates")  # every visible file is complete
    assert table.num_rows >= written
    times = table.column("time").to_pylist()
    assert times == sorted(times)
    for path in (tmp_path / "log").glob(f"{TEMPORARY}*"):
        os.utime(path, (0, 0))
    LogFiles(tmp_path / "log", 1 << 30, SCHEMAS)
    assert all(pq.ParquetFile(path).metadata for path in (tmp_path / "log").iterdir())

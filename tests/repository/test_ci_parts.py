"""Which slow tests `.ci/run` leaves out: those whose tests and sources are as when they passed."""

import importlib.util
import subprocess

import pytest

from tests.support.paths import ROOT

FILES = {
    "recserve/low.py": "LOW = 1",
    "recserve/c.c": "int c;",
    "recserve/kernels/fast.py": "from recserve import low",
    "recserve/kernels/fast.c": "int fast;",
    "recserve/other.py": 'HOME = "recserve.features.here:name"',
    "recserve/features/here.py": "HERE = 1",
    "tests/conftest.py": "",
    "tests/one/test_one.py": "def test():\n    from recserve.kernels import fast",
    "tests/two/test_two.py": "import recserve.other",
}


@pytest.fixture
def parts(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".ci").mkdir()
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    spec = importlib.util.spec_from_file_location("parts", ROOT / ".ci" / "parts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PASSED", tmp_path / ".ci" / "passed.txt")
    monkeypatch.setattr(module, "rooms_with_slow_tests", lambda: ["one", "two"])
    monkeypatch.delenv("CI_PART", raising=False)
    return module


def digests(parts) -> dict[str, str]:
    for cached in (parts.tracked, parts.reads):
        cached.cache_clear()
    return {room: parts.digest(room) for room in ("one", "two")}


@pytest.mark.parametrize(
    "name,rooms",
    [
        ("recserve/low.py", ["one"]),
        ("recserve/kernels/fast.c", ["one"]),
        ("recserve/other.py", ["two"]),
        ("recserve/features/here.py", ["two"]),
        ("tests/two/test_two.py", ["two"]),
        ("tests/conftest.py", ["one", "two"]),
    ],
)
def test_a_room_runs_when_something_that_it_reaches_has_changed(parts, name, rooms):
    before = digests(parts)
    with (parts.ROOT / name).open("a") as file:
        file.write("\n")
    after = digests(parts)
    assert [room for room in before if after[room] != before[room]] == rooms


def test_rooms_take_turns_and_can_be_asked_for(parts, capsys, monkeypatch):
    parts.note(["one", "two"])
    turns = []
    for number in range(4):
        monkeypatch.setattr(parts, "git", lambda *words, n=number: f"{n}\n")
        parts.choose()
        turns.append(capsys.readouterr().out.splitlines()[0])
    assert turns == ["one", "two", "one", "two"]
    monkeypatch.setenv("CI_PART", "all")
    parts.choose()
    assert capsys.readouterr().out == "one two\n"
    monkeypatch.setenv("CI_PART", "three")
    with pytest.raises(SystemExit, match="CI_PART is three; choose all or some of one, two"):
        parts.choose()

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


@pytest.fixture
def times(tmp_path):
    """A JUnit file in which `one` takes 700 seconds with two workers, and `two` 600."""
    cases = {"tests.one.test_one": 1000, "tests.one.deep.test": 400, "tests.two.test_two": 1200}
    text = "".join(f'<testcase classname="{name}" time="{cases[name]}"/>' for name in cases)
    path = tmp_path / "times.xml"
    path.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    return path


@pytest.fixture
def chosen(parts, capsys, monkeypatch):
    """A function that returns what is chosen at a commit, and why the others do not run."""

    git = parts.git

    def choose(number):
        count = {"rev-list": f"{number}\n"}
        monkeypatch.setattr(parts, "git", lambda *words: count.get(words[0]) or git(*words))
        parts.choose()
        return capsys.readouterr().out.splitlines()

    return choose


def test_rooms_take_turns_and_can_be_asked_for(parts, times, chosen, monkeypatch):
    parts.note(["one", "two"], times)
    today = parts.notes()["one"].day
    assert [chosen(number)[0] for number in range(4)] == ["one", "two", "one", "two"]
    assert chosen(0)[1:] == [f"two: not run, as it is unchanged; it passed on {today}"]
    monkeypatch.setenv("CI_PART", "all")
    assert chosen(0) == ["one two"]
    monkeypatch.setenv("CI_PART", "three")
    with pytest.raises(SystemExit, match="CI_PART is three; choose all or some of one, two"):
        parts.choose()


def test_changed_rooms_run_until_the_time_is_used_the_oldest_first(parts, times, chosen):
    assert chosen(0) == ["one two"]  # nothing is known of them
    parts.note(["one", "two"], times)
    assert [parts.notes()[room].seconds for room in ("one", "two")] == [700, 600]
    for day, expected in (("2026-11-01", ["two"] * 2), (parts.notes()["one"].day, ["one", "two"])):
        parts.PASSED.write_text(f"one x {parts.notes()['one'].day} 700\ntwo x {day} 600\n")
        found = [chosen(number) for number in range(2)]
        assert [lines[0] for lines in found] == expected
    assert found[1][1].startswith("one: not run, as 20 minutes are used; it passed on ")
    parts.PASSED.write_text("one x 2026-11-01 9000\ntwo x 2026-11-02 600\n")
    assert chosen(1)[0] == "one"  # alone it takes longer than there is, and yet its turn comes

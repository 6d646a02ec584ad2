"""The pages tell the truth: commands parse, links lead somewhere, no path is one machine's."""

import re
import shlex

import pytest
import typer
import typer.main

from recserve.cli import app
from tests.support.paths import ROOT

# Typer carries its own copy of click; BadParameter is the public end of its errors.
UsageError = typer.BadParameter.__mro__[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]

FENCE = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(recserve [^`]*)`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/\w+")


def fenced_commands(text):
    """Every `recserve ...` line of the shell blocks, continued lines joined, settings dropped."""
    commands = []
    for block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = (
                shlex.split(line, comments=True)
                if line.startswith(("recserve", "RECSERVE_"))
                else []
            )
            while words and "=" in words[0]:
                words = words[1:]
            if words and words[0] == "recserve":
                commands.append(words)
    return commands


def parse(words):
    """Let the command line parse the words, run nothing. Raises UsageError."""
    command = typer.main.get_command(app)
    context = command.make_context("recserve", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_parse(page):
    wrong = []
    for words in fenced_commands(page.read_text(encoding="utf-8")):
        try:
            parse(words[1:])
        except UsageError as error:
            wrong.append(f"{shlex.join(words)}: {error.format_message()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_in_a_sentence_exist(page):
    """They may leave out what they need, but name no command or option that is not there."""
    wrong = []
    for command in INLINE.findall(page.read_text(encoding="utf-8")):
        try:
            parse(shlex.split(command)[1:])
        except UsageError as error:
            if type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
                wrong.append(f"{command}: {error.format_message()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "words",
    [
        ["serv"],
        ["serve", "--bundel", "b"],
        ["build", "--levels", "four"],
        ["train", "gpt"],
        ["rank"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_found(words):
    with pytest.raises(UsageError):
        parse(words)


def test_commands_are_found_in_blocks():
    text = "```bash\nKEY=x recserve a --b \\\n  c   # why\nRECSERVE_X=1 recserve d\ncurl e\n```\n"
    assert fenced_commands(text) == [["recserve", "d"]]
    text = text.replace("KEY=x ", "")
    assert fenced_commands(text) == [["recserve", "a", "--b", "c"], ["recserve", "d"]]


def anchors(text):
    """What a link may name behind `#`: the headings, as they are written in addresses."""
    headings = HEADING.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page):
    """Links to files that are not there, or to headings that their file lacks."""
    dead = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        found = other.exists()
        if found and anchor:
            found = anchor in anchors(other.read_text(encoding="utf-8"))
        if not found:
            dead.append(target)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page):
    assert dead_links(page) == []


def test_dead_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A: `b` c\n\n[1](#a-b-c) [2](#b) [3](page.md#a-b-c) [4](page.md#c) [5](no.md)"
    )
    assert dead_links(page) == ["#b", "page.md#c", "no.md"]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_no_paths_of_one_machine(page):
    assert MACHINE_PATH.findall(page.read_text(encoding="utf-8")) == []


def test_machine_paths_are_found():
    assert MACHINE_PATH.findall("see /home/ann/x and /root/y, not a/home/x") == [
        "/home/ann",
        "/root/y",
    ]


def test_the_readme_shows_the_picture_and_every_room():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/tree.svg" in LINK.findall(text)
    folders = {p.parent.name for p in (ROOT / "recserve").glob("*/*.py")}
    assert not {name for name in folders if f"{name}/" not in text}

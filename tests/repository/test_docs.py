"""The pages tell the truth: commands parse, links lead somewhere, no path is one machine's."""

import functools
import re
import shlex

import pytest
import typer
import typer.main

from recserve.cli import app
from recserve.config import ServerConfig
from recserve.search.strategy import strategy_classes
from tests.support.pages import PAGES, find_in_pages, reference
from tests.support.paths import ROOT

# Typer carries its own copy of click; BadParameter is the public end of its errors.
UsageError = typer.BadParameter.__mro__[1]

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


@functools.cache
def whole_command():
    """The command line with all its subcommands, which takes long to build."""
    return typer.main.get_command(app)


def parse(words):
    """Let the command line parse the words, run nothing. Raises UsageError."""
    command = whole_command()
    context = command.make_context("recserve", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def wrong_commands(text):
    wrong = []
    for words in fenced_commands(text):
        try:
            parse(words[1:])
        except UsageError as error:
            wrong.append(f"{shlex.join(words)}: {error.format_message()}")
    return wrong


def wrong_names(text):
    """Commands in sentences may leave out what they need, but name nothing that is not there."""
    wrong = []
    for command in INLINE.findall(text):
        try:
            parse(shlex.split(command)[1:])
        except UsageError as error:
            if type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
                wrong.append(f"{command}: {error.format_message()}")
    return wrong


@pytest.mark.parametrize("find", [wrong_commands, wrong_names])
def test_commands_of_the_pages_exist(find):
    assert find_in_pages(find) == {}


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


def test_links_lead_somewhere():
    found = {str(page): dead_links(page) for page in PAGES}
    assert {page: dead for page, dead in found.items() if dead} == {}


def test_no_paths_of_one_machine():
    assert find_in_pages(MACHINE_PATH.findall) == {}


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    found = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert listed == found


def test_generated_parts_of_the_reference_are_those_of_the_package():
    made = reference()
    pages = {name: (made.REFERENCE / name).read_text("utf-8") for name in made.PAGES}
    markers = sorted(found[1] for page in pages.values() for found in made.BLOCK.findall(page))
    assert markers == sorted(made.GENERATORS)
    stale = [name for name, page in pages.items() if made.fill(page) != page]
    assert not stale, "run: make reference (or python docs/_build/reference.py)"
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", pages["configuration.md"], re.MULTILINE)
    silent = [key for key, meaning in rows if key in ServerConfig.model_fields and not meaning]
    assert not silent, "say in ServerConfig what each setting is"


def test_the_strategies_of_the_guide_are_those_of_the_registry():
    guide = (ROOT / "docs" / "guides" / "recommend.md").read_text(encoding="utf-8")
    table = guide.partition("\n## Choose a strategy")[2].partition("\n`auto` takes")[0]
    named = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert named == set(strategy_classes())

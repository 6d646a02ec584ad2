"""The report: one page without scripts or links, every text escaped, and the same as JSON."""

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from recserve.experiments.calibration import Lateness, Overhead
from recserve.experiments.charts import (
    Markup,
    join,
    linear_axis,
    log_axis,
    percentile_axis,
    short,
    tag,
    tail,
)
from recserve.experiments.comparison import Criteria
from recserve.experiments.load import Arm, Design
from recserve.experiments.measurements import summarise
from recserve.experiments.report import (
    ReportDocument,
    make_document,
    ms,
    page,
    plain,
    to_json,
    without_secrets,
)
from recserve.experiments.session import Exactness, Session, Workload, compare_session, this_machine
from recserve.experiments.targets import find_target
from tests.support.experiment_runs import SAMPLES, SLATE, made_run
from tests.support.grids import covering

EVIL = '<script>alert("x")</script> & <img src=x onerror=y>'
VOID = {"meta", "path", "line", "circle", "rect", "polygon", "polyline", "br", "link"}


def made_document(mode="blocks", arms=2, text=False, name=EVIL, **run):
    columns = made_run(mode, text=text, shots=1500, **run)
    names = ["beam", name, "third"][:2]
    kind = "text" if text else "items"
    session = Session(
        columns=columns,
        samples=SAMPLES,
        arms=tuple(Arm(one, "http://h", {"note": EVIL}) for one in names),
        summaries=tuple(summarise(columns, names, SAMPLES, kind, frozenset(SLATE), k=10)),
        exactness=() if text else (Exactness(50, 0.9, 0.5), None),
        overlaps=((), (1.0,) * 50) if mode != "paired" else (),
        lateness=Lateness(0.1, 0.5, 2.0),
        overhead=Overhead(5000.0, 0.1, 0.4, 1.2, Lateness(0.1, 0.5, 2.0)),
        peak_in_flight=7,
        generator_cpu_share=0.1,
        machine=this_machine(),
        servers={"http://h": {"version": EVIL}},
        warnings=(EVIL,),
    )
    workload = Workload(target=find_target("chat" if text else "recommend"), data=Path("d.parquet"))
    design = Design(mode=mode)
    if arms == 1:
        one = replace(
            session,
            arms=session.arms[:1],
            summaries=session.summaries[:1],
            exactness=session.exactness[:1],
        )
        return make_document(one, workload, design, ["bench", EVIL])
    comparisons, ratio = compare_session(session, design, Criteria(statistic="p50", k=10))
    return make_document(session, workload, design, ["ab", EVIL], comparisons, ratio)


class Reader(HTMLParser):
    """Checks that tags are closed in order, and collects them with the text."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.attributes += [key for key, _ in attributes]
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.tags.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.text.append(data)


def read(document):
    reader = Reader()
    html = page(document)
    reader.feed(html)
    assert reader.open == []
    return html, reader


@pytest.mark.parametrize("mode,text", covering(("blocks", "paired", "split"), (False, True)))
def test_the_page_is_whole_and_holds_no_foreign_markup(mode, text):
    html, reader = read(made_document(mode, text=text, effect=0.2))
    assert not {"script", "img", "link", "iframe", "a"} & set(reader.tags)
    assert not [key for key in reader.attributes if key.startswith("on")]
    assert "url(" not in html and "@import" not in html
    assert not re.findall(r'(?:src|href)="', html)
    assert EVIL in "".join(reader.text)


@pytest.mark.parametrize(
    ("effect", "badge"), [(-0.3, "better"), (0.3, "worse"), (0.0, "undecided")]
)
def test_the_verdict_comes_first(effect, badge):
    document = made_document(effect=effect, name="narrow", seed=2)
    html, reader = read(document)
    words = " ".join(reader.text).replace("\N{NO-BREAK SPACE}", " ")
    assert badge in words
    assert words.index("p50 latency") < words.index("Latency distribution")
    assert document.comparisons[0].verdict.split("(")[0] in words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (0.034, "a change of 3.4% with power 0.9"),
        (1.0, "a change of 100.0% with power 0.9"),
        (1.01, "only very large changes"),
        (float("inf"), "only very large changes"),
    ],
)
def test_the_page_says_which_change_a_run_can_find(change, words):
    document = made_document()
    (one,) = document.comparisons
    html, reader = read(replace(document, comparisons=[replace(one, detectable=change)]))
    assert words in " ".join(reader.text)


def test_a_failed_guardrail_is_the_headline():
    html, reader = read(made_document("paired", changed=5))
    words = " ".join(reader.text).replace("\N{NO-BREAK SPACE}", " ")
    assert "do not ship: quality" in words and "undecided" not in words
    assert words.index("\N{MINUS SIGN}0.5") < words.index("do not ship")


def test_a_run_with_one_arm_has_figures_instead_of_effects():
    html, reader = read(made_document(arms=1))
    words = " ".join(reader.text)
    assert "requests per second" in words and "illegal share 0.00%" in words
    assert "overlap with the exact slate 0.900" in words
    assert "Guardrails" not in words


def test_text_shows_tokens_per_step():
    words = " ".join(read(made_document(text=True))[1].text)
    assert "Speculative decoding" in words and "3.00" in words
    assert "Time to first token" in words


def test_a_long_object_is_folded_under_its_names_and_a_short_one_is_open():
    assert "<details>" not in plain({"version": "1", "models": [1, 2]})
    long = plain({"version": EVIL, "models": ["m" * 40] * 5})
    assert long.startswith("<details><summary>version, models</summary><pre>")
    assert json.loads(unescape(long.partition("<code>")[2].partition("</code>")[0])) == {
        "version": EVIL,
        "models": ["m" * 40] * 5,
    }
    assert "<summary>200 values</summary>" in plain(list(range(200)))


def test_json_holds_the_whole_document_and_reads_back():
    document = made_document("paired", effect=0.1)
    again = msgspec.json.decode(to_json(document), type=ReportDocument)
    assert page(again) == page(document)
    assert again.comparisons[0].verdict == document.comparisons[0].verdict


def test_values_of_headers_stay_out():
    command = ["bench", "--header", "Authorization: Bearer k", "--header=X: y", "--rate", "5"]
    assert without_secrets(command) == ["bench", "--header", "...", "--header=...", "--rate", "5"]


def test_text_is_escaped_and_markup_is_not():
    assert tag("p", "a < b", Markup("<b>c</b>"), None) == "<p>a &lt; b<b>c</b></p>"
    assert (
        tag("line", x1=1, class_="a", stroke_width=2) == '<line x1="1" class="a" stroke-width="2"/>'
    )
    assert tag("p", title='"<') == '<p title="&quot;&lt;"></p>'
    assert join("<", Markup("<")) == "&lt;<"


def test_axes_hold_their_values_and_have_round_ticks():
    axis = linear_axis("", -13, 22)
    assert [tick.value for tick in axis.ticks] == [-20, -10, 0, 10, 20, 30]
    assert axis.share(-20) == 0 and axis.share(30) == 1 and axis.share(99) == 1
    log = log_axis("ms", 3.0, 180.0)
    assert (log.low, log.high) == (2, 200)
    assert log.share(20) == pytest.approx(0.5)
    assert linear_axis("", 5, 5).share(5) == 0.5
    ends = percentile_axis(10_000)
    assert [tick.label for tick in ends.ticks][-1] == "99.99 %"
    assert ends.share(tail(0.99)) == pytest.approx(0.5)
    assert short(-1500, 500) == "\N{MINUS SIGN}1,500" and short(0.05, 0.01) == "0.05"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1234, "0.12 ms"), (12.34, "12.3 ms"), (1234, "1,234 ms"), (12_340, "12.3 s")],
)
def test_times_have_three_digits(value, text):
    assert ms(value) == text

"""The report: one page without scripts or links, every text escaped, and the same as JSON."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from recserve.load.calibration import Lateness, Overhead
from recserve.load.comparison import Criteria
from recserve.load.generator import Arm, Design
from recserve.load.measurements import summarise
from recserve.load.report import (
    ReportDocument,
    make_document,
    page,
    to_json,
    without_secrets,
)
from recserve.load.session import Exactness, Session, Workload, compare_session, this_machine
from recserve.load.targets import find_target
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


def test_json_holds_the_whole_document_and_reads_back():
    document = made_document("paired", effect=0.1)
    again = msgspec.json.decode(to_json(document), type=ReportDocument)
    assert page(again) == page(document)
    assert again.comparisons[0].verdict == document.comparisons[0].verdict


def test_values_of_headers_stay_out():
    command = ["bench", "--header", "Authorization: Bearer k", "--header=X: y", "--rate", "5"]
    assert without_secrets(command) == ["bench", "--header", "...", "--header=...", "--rate", "5"]

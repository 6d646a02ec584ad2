"""Settings of an arm with another server: where a url may stand, and what it may be."""

import sys
import tempfile

import pytest

from recserve.config import ConfigError, ServerConfig
from recserve.experiments.settings import parse_experiments
from recserve.extras import install_advice
from recserve.schemas.items import InvalidRequest
from recserve.server.app import create_app

URL = "http://10.0.0.2:8080"


def experiment(arm, **more):
    return {"name": "e", "use": "recommend", "arms": [{"name": "a"}, {"name": "b", **arm}], **more}


@pytest.mark.parametrize("url", [URL, f"{URL}/", "https://two.example", "http://[::1]:8081"])
def test_an_address_is_accepted(url):
    (one,) = parse_experiments([experiment({"url": url})])
    assert one.arms[1].url == url


@pytest.mark.parametrize(
    "url",
    [
        "10.0.0.2:8080",
        "ftp://10.0.0.2",
        "http://",
        f"{URL}/v1",
        f"{URL}?a=1",
        f"{URL}#a",
        "http://name:secret@10.0.0.2",
        "http://10.0.0.2:port",
        "http://10.0.0.2:0",
        "http://two words",
        "http://two\n.example",
        "http://[::1",
        "",
    ],
)
def test_another_text_is_refused(url):
    with pytest.raises(InvalidRequest) as refused:
        parse_experiments([experiment({"url": url})])
    assert str(refused.value).startswith("experiments[0].arms[1].url: expected http://host:port")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (experiment({"url": URL}, use="text"), "arms[1].url: expected none for text"),
        (experiment({"api_key_file": "k"}), "arms[1].api_key_file: expected none without url"),
        (experiment({"url": URL, "max_in_flight": 0}), "max_in_flight: expected int >= 1, got 0"),
        (experiment({"url": URL, "fields": {"k": 3}}), "arms[1].fields.k: expected a field of"),
        (
            {**experiment({}), "arms": [{"name": "a", "url": URL}, {"name": "b"}]},
            "arms[0].url: expected none for the control",
        ),
    ],
    ids=["text", "key", "bound", "field", "control"],
)
def test_a_url_stands_only_where_it_can_work(one, words):
    with pytest.raises(InvalidRequest) as refused:
        parse_experiments([one])
    assert words in str(refused.value)


def start(arm):
    with tempfile.TemporaryDirectory() as folder:
        settings = {"experiments": [experiment({"url": URL, **arm})], "experiments_dir": folder}
        create_app(ServerConfig(bundle="b", **settings))


def test_without_httpx_the_start_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "recserve.server.remote_arm", raising=False)
    with pytest.raises(ConfigError) as refused:
        start({})
    needs = "experiments: arm e/b has a url, which needs httpx: "
    assert str(refused.value) == needs + install_advice("client")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory"),
        (b"short", "expected one key of 16 to 4096 characters, got 5"),
        (b"a-key-of-16-chars\nand-another-one", "expected one key"),
        (b"\xff" * 20, "it is not ASCII text"),
    ],
    ids=["missing", "short", "two", "binary"],
)
def test_a_wrong_key_file_stops_the_start(tmp_path, content, words):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        start({"api_key_file": str(file)})
    assert words in str(refused.value) and "a-key-of" not in str(refused.value)

"""Settings: precedence, unknown keys, bounds, and the refusal to stand open."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recserve.cli.app import app
from recserve.config import ConfigError, ServerConfig, is_loopback

KEY = "a-key-of-sixteen"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith("RECSERVE_"):
            monkeypatch.delenv(name)


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "recserve.yaml"
    file.write_text(text)
    return file


def test_flag_over_environment_over_file(tmp_path, monkeypatch):
    file = written(tmp_path, "bundle: from_file\nport: 1\nhost: 127.0.0.3\nmax_queue: 7\n")
    monkeypatch.setenv("RECSERVE_PORT", "2")
    monkeypatch.setenv("RECSERVE_HOST", "127.0.0.2")
    config = ServerConfig.load({"host": "127.0.0.1", "store": None}, file)
    assert (config.host, config.port, config.max_queue) == ("127.0.0.1", 2, 7)
    assert config.bundle == Path("from_file")
    assert type(config) is ServerConfig
    assert not config.invariant
    assert ServerConfig.load({"bundle": "b", "invariant": True}).invariant


@pytest.mark.parametrize(
    "text, words",
    [
        ("bundle: b\nprot: 9\n", ("prot", "did you mean port")),
        ("bundle: b\nport: 70000\n", ("port", "65535", "70000")),
        ("bundle: b\ndrain_delay_s: -1\n", ("drain_delay_s", "0", "-1")),
        ("bundle: b\ndevice: tpu\n", ("device", "cuda", "tpu")),
        ("bundle: b\nkv_dtype: int8\n", ("kv_dtype", "fp8", "int8")),
        ("bundle: b\nweights: int4\n", ("weights", "int8", "int4")),
        ("port: 9\n", ("bundle", "llm", "required")),
        ("bundle: b\ndrafters: [ngram]\n", ("drafters", "llm")),
        ("bundle: b\nllm_name: x\n", ("llm_name", "llm")),
        ("llm: m\nllm_dtype: int8\n", ("llm_dtype", "bfloat16", "int8")),
        ("llm: m\ntext_timeout_ms: 0\n", ("text_timeout_ms", "1", "0")),
        ("bundle: b\napi_keys: [short]\n", ("api_keys", "16", "5")),
        ("bundle: [\n", ("recserve.yaml",)),
        ("- a\n", ("recserve.yaml",)),
    ],
)
def test_bad_file_names_key_bound_and_value(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        ServerConfig.load({}, written(tmp_path, text))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "name,value", [("RECSERVE_KERNELS", "torch"), ("RECSERVE_ISA", "x86-64-v3")]
)
def test_what_the_kernels_read_is_no_setting_of_the_server(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert ServerConfig.load({"bundle": "b"}).bundle == Path("b")


def test_unknown_environment_names_the_near_one(monkeypatch):
    monkeypatch.setenv("RECSERVE_STROE", "lmdb:x")
    with pytest.raises(ConfigError, match="did you mean store"):
        ServerConfig.load({"bundle": "b"})


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        ServerConfig.load({"bundle": "b"}, tmp_path / "none.yaml")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_open_address_needs_keys_or_a_word(host):
    with pytest.raises(ConfigError, match="api_keys"):
        ServerConfig.load({"bundle": "b", "host": host})
    assert ServerConfig.load({"bundle": "b", "host": host, "insecure": True}).host == host
    assert ServerConfig.load({"bundle": "b", "host": host, "api_keys": (KEY,)}).host == host


def test_keys_from_the_environment_and_never_printed(monkeypatch):
    monkeypatch.setenv("RECSERVE_API_KEYS", f"{KEY}, another-key-of-24-chars")
    config = ServerConfig.load({"bundle": "b"})
    assert [k.get_secret_value() for k in config.api_keys] == [KEY, "another-key-of-24-chars"]
    assert KEY not in repr(config)


@pytest.mark.parametrize(
    "host, yes",
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("127.9.9.9", True),
        ("10.0.0.1", False),
    ],
)
def test_is_loopback(host, yes):
    """Also as an IPv4 address that is written as IPv6, in every version of Python."""
    assert is_loopback(host) is yes
    if host.count(".") == 3:
        assert is_loopback(f"::ffff:{host}") is is_loopback(f"[::FFFF:{host}]") is yes


def test_drafters_come_from_flag_environment_and_file(tmp_path, monkeypatch):
    file = written(tmp_path, "llm: m\ndrafters: [suffix, draft_model=d]\n")
    assert ServerConfig.load({}, file).drafters == ("suffix", "draft_model=d")
    monkeypatch.setenv("RECSERVE_DRAFTERS", "ngram, medusa=heads")
    assert ServerConfig.load({}, file).drafters == ("ngram", "medusa=heads")
    assert ServerConfig.load({"drafters": ["lookahead"]}, file).drafters == ("lookahead",)
    assert ServerConfig.load({"llm": "m"}).bundle is None


def test_the_command_prints_every_setting_with_its_variable_default_and_bounds():
    """The flags of `serve` are a part of the settings; `--help` says where all of them are."""
    helped = CliRunner().invoke(app, ["serve", "--help"]).output
    assert "--help-settings" in helped
    printed = CliRunner().invoke(app, ["serve", "--help-settings"]).output
    for name, field in ServerConfig.model_fields.items():
        (line,) = re.findall(rf"^{name}  .*$", printed, re.MULTILINE)
        assert line.endswith(f"RECSERVE_{name.upper()}")
        assert field.default in (None, (), []) or f"default {field.default}" in line
        for limit in field.metadata:
            for bound in ("ge", "gt", "le", "lt"):
                value = getattr(limit, bound, None)
                assert value is None or f" {value:,}" in line


@pytest.mark.parametrize("log", ["redis", "redis://h:1/0", "rediss+cluster://h:1"])
@pytest.mark.parametrize("key", [None, "a-key-of-sixteen"])
@pytest.mark.parametrize("served", [{"bundle": "b"}, {"llm": "l"}])
def test_a_shared_catalogue_needs_one_signing_key(log, key, served):
    """Only slates have tokens, so a language model alone needs none."""
    flags = {**served, "store": "redis://h:1/0", "catalog_log": log, "signing_key": key}
    if key is None and "bundle" in served:
        with pytest.raises(ConfigError, match=r"^signing_key: is required, because catalog_log is"):
            ServerConfig.load(flags)
    else:
        assert ServerConfig.load(flags).catalog_log == log

"""Fixtures of every folder: forced kernels, the reference data, and a real redis-server."""

import functools
import gc
import os
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import typer.main

from tests.support.paths import reference
from tests.support.redis_server import start_redis
from tests.support.shared_folders import check_shared_folders
from tests.support.small_caches import shrink_default_caches

# Triton decides when it is first imported, by whatever library, whether kernels are interpreted.
os.environ["TRITON_INTERPRET"] = "1"

# Before a signature takes the default size of a cache.
shrink_default_caches()


def pytest_collection() -> None:
    """Collection makes objects that stay, so there is no garbage to look for."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keeps garbage collections from traversing modules and collected tests again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture
def force_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that forces `auto`, `c`, `torch` or `triton` kernels until the test ends."""

    def force(kernels: str) -> None:
        monkeypatch.setattr("recserve.kernels.backend.FORCED", kernels)

    return force


@pytest.fixture(scope="session", autouse=True)
def one_of_each() -> Iterator[None]:
    """Shares what many tests make and none changes: TLS contexts and the tree of commands.

    A context reads all root certificates; the tree has hundreds of options.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        patch.setattr("typer.testing._get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def unchanged_shared_folders() -> Iterator[None]:
    """Fails at the end where a test has changed a folder that all tests share."""
    yield
    check_shared_folders()


@pytest.fixture(scope="session")
def beauty() -> Path:
    """Folder of the Amazon Beauty set; skips where it is not beside the repository."""
    return reference("amazon-beauty")


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real redis-server that lives as long as the tests; flush it before use."""
    server, port = start_redis(tmp_path_factory.mktemp("redis"))
    yield f"redis://127.0.0.1:{port}/0"
    server.kill()
    server.wait()


@pytest.fixture
def empty_redis(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the real redis-server, which has no keys."""
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    yield client
    client.close()

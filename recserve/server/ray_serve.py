"""Runs the server as replicas on Ray Serve; the only file of the server that imports ray.

Each replica holds the same application that `recserve serve` runs. Ray's proxy takes the requests
and routes them by consistent hashing of the header `X-Session-Id`, so that a user's requests reach
the replica that has the user's prefix in its cache. Requests without the header spread evenly.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Ray reads these variables when it is imported or started.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve.context import _get_global_client
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from recserve.config import ServerConfig, is_loopback, is_redis
from recserve.cores import short_waits
from recserve.server.app import create_app
from recserve.server.context import context_of
from recserve.server.errors import NotShared
from recserve.server.lifecycle import Lifecycle
from recserve.server.loader import ServiceLoader

NAME = "recserve"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# Replicas after the preferred one that a request may go to when that one is full.
NUM_FALLBACKS = 2
RETRY_AFTER_S = 1
# Requests and responses do not pass through Ray's object store.
OBJECT_STORE_BYTES = 128 * 2**20


class ReplicaOptions(BaseModel):
    """How many replicas serve, and how requests reach them.

    Attributes:
        settings: Settings of `recserve serve` by name, such as `bundle` and `store`.
        config: YAML file with more settings. Every machine of the cluster needs it.
        min_replicas: Fewest replicas.
        max_replicas: Most replicas; by default as many as `min_replicas`, without autoscaling.
        target_requests: Requests in progress per replica at which autoscaling aims.
        max_requests: Most requests in progress per replica. Another request of the same user goes
            to the next replica.
        max_waiting: Most requests that wait in a proxy because all their replicas are full.
            Another request gets 429.
        cpus: CPU cores that Ray reserves for a replica; also its number of threads.
        gpus: GPUs, or the share of a GPU, that Ray reserves for a replica.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: dict[str, Any] = {}
    config: Path | None = None
    min_replicas: int = Field(default=1, ge=1, le=10_000)
    max_replicas: int | None = Field(default=None, ge=1, le=10_000)
    target_requests: float = Field(default=16.0, gt=0, le=100_000)
    max_requests: int = Field(default=64, ge=1, le=100_000)
    max_waiting: int = Field(default=1024, ge=1, le=1_000_000)
    cpus: float = Field(default=1.0, gt=0, le=1024)
    gpus: float = Field(default=0.0, ge=0, le=64)

    @model_validator(mode="after")
    def _check_order(self) -> ReplicaOptions:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas: expected at least min_replicas = {self.min_replicas}, "
                f"got {self.max_replicas}"
            )
        return self

    @property
    def most(self) -> int:
        """Most replicas."""
        return self.max_replicas or self.min_replicas

    def server_config(self, **flags: Any) -> ServerConfig:
        """Returns the settings of a replica.

        Several replicas whose store is a Redis share one live catalogue there, unless `catalog_log`
        says otherwise.

        Args:
            flags: Settings that override those of the options.

        Raises:
            ConfigError: If a setting is invalid, or several replicas have no common signing key.
        """
        given = {**self.settings, **flags}
        config = ServerConfig.load(given, self.config)
        if self.most > 1:
            if is_redis(config.store):
                config = ServerConfig.load(given, self.config, {"catalog_log": "redis"})
            config.check_signing_key(f"up to {self.most} replicas serve")
        return config

    def config_behind_proxy(self) -> ServerConfig:
        """Returns the settings of a replica for the address that Ray's proxy listens on.

        `serve deploy` starts the proxy from `http_options`, which the application does not see. A
        proxy that runs already keeps its address.

        Raises:
            ConfigError: If a setting is invalid, or other machines reach the proxy and no key is
                needed.
        """
        config = self.server_config()
        if not ray.is_initialized():
            return config
        client = _get_global_client(raise_if_no_controller_running=False)
        host = None if client is None else client.http_config.host
        return config if host is None or is_loopback(host) else self.server_config(host=host)


class SharedChangesOnly:
    """ASGI middleware that refuses changes which would reach one replica only."""

    def __init__(self, app: ASGIApp, shared_catalog: bool) -> None:
        self.app = app
        self.shared_catalog = shared_catalog

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on. Raises NotShared for a change that other replicas do not see."""
        operation = context_of(scope).operation if scope["type"] == "http" else None
        if operation is not None and operation.per_process:
            if not operation.sharable:
                raise NotShared("this changes one replica only: deploy the change to all of them")
            if not self.shared_catalog:
                raise NotShared(
                    "this changes one replica only: set catalog_log to redis, so that replicas "
                    "share one catalogue and its experiments"
                )
        await self.app(scope, receive, send)


@serve.ingress()
class Replica:
    """One replica: the application of `recserve serve`, without its listener."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = ReplicaOptions.model_validate(options)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Loads the models; Ray sends requests when this has returned."""
        config = self._options.config_behind_proxy()
        app = create_app(config, ServiceLoader(config).first())
        shared = config.catalog_log != "file"
        app.user_middleware.append(Middleware(SharedChangesOnly, shared_catalog=shared))
        self._lifecycle: Lifecycle = app.state.lifecycle
        return app

    def check_health(self) -> None:
        """Raises NotReady if the engine has stopped; Ray then replaces the replica."""
        self._lifecycle.loaded.wait(1)
        _ = self._lifecycle.service


def app(args: dict[str, Any]) -> serve.Application:
    """Builds the application: `serve run recserve.server.ray_serve:app config=FILE`.

    Args:
        args: Fields of `ReplicaOptions`.

    Raises:
        ValueError: If an option is unknown or out of range.
        ConfigError: If other machines reach Ray's proxy and no key is needed, or several replicas
            have no common signing key.
    """
    options = ReplicaOptions.model_validate(args)
    config = options.config_behind_proxy()
    scaled: dict[str, Any] = {"num_replicas": options.min_replicas}
    if options.most > options.min_replicas:
        scaled = {
            "autoscaling_config": {
                "min_replicas": options.min_replicas,
                "max_replicas": options.most,
                "target_ongoing_requests": options.target_requests,
            }
        }
    deployment = serve.deployment(
        name=NAME,
        max_ongoing_requests=options.max_requests,
        max_queued_requests=options.max_waiting,
        request_router_config={
            "request_router_class": ROUTER,
            "request_router_kwargs": {"num_fallback_replicas": NUM_FALLBACKS},
        },
        backpressure_config={"status_code": 429, "retry_after_s": RETRY_AFTER_S},
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        ray_actor_options={
            "num_cpus": options.cpus,
            "num_gpus": options.gpus,
            "runtime_env": {"env_vars": short_waits()},
        },
        **scaled,
    )
    return deployment(Replica).bind(options.model_dump(mode="json"))


def deploy(options: ReplicaOptions) -> None:
    """Starts the application, or replaces its replicas one after the other by new ones.

    Args:
        options: The new options. Requests in progress finish on the old replicas.

    Raises:
        ConfigError: If other machines reach Ray's proxy and no key is needed, or several replicas
            have no common signing key.
        RuntimeError: If the new replicas do not become healthy.
    """
    serve.run(app(options.model_dump(mode="json")), name=NAME, route_prefix="/")


@contextmanager
def running(
    options: ReplicaOptions, host: str = "127.0.0.1", port: int = 8080, address: str | None = None
) -> Iterator[str]:
    """Serves on Ray and yields the HTTP address; at the end the replicas drain and stop.

    Args:
        options: How many replicas serve, and what.
        host: Address that the proxy listens on. Any but loopback needs keys.
        port: Port of the proxy.
        address: Address of a Ray cluster; None starts one on this machine, without a dashboard.

    Raises:
        ConfigError: If a setting is invalid.
        ValueError: If this machine has fewer cores or GPUs than the replicas need.
        OSError: If the port is in use.
        RuntimeError: If the replicas do not become healthy.
    """
    options.server_config(host=host, port=port)
    if address is None:
        ray.init(
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
        )
    else:
        ray.init(address=address)
    try:
        if address is None:
            _check_resources(options)
            _check_port(host, port)
        serve.start(http_options={"host": host, "port": port})
        try:
            deploy(options)
            yield f"http://{host}:{port}"
        finally:
            # Replicas finish their requests before the proxy goes. A cluster that was there before
            # keeps its proxy and its other applications.
            serve.delete(NAME)
    finally:
        if address is None:
            serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def _check_resources(options: ReplicaOptions) -> None:
    """Raises ValueError if the fewest replicas do not fit; Ray would wait forever."""
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for name, resource, each in (("cpus", "CPU", options.cpus), ("gpus", "GPU", options.gpus)):
        needed, most = options.min_replicas * each, there.get(resource, 0.0)
        if needed > most:
            raise ValueError(
                f"{name}: {options.min_replicas} replicas of {each:g} need {needed:g}, "
                f"this machine has {most:g}"
            )


def _check_port(host: str, port: int) -> None:
    """Raises OSError if nothing can listen there; Ray's own error has forty lines."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise OSError(f"port {port} of {host} cannot be used: {error.strerror}") from None


def run(options: ReplicaOptions, host: str, port: int, address: str | None) -> None:
    """Serves until SIGINT or SIGTERM; arguments and errors are those of `running`."""
    stopped = threading.Event()
    with running(options, host, port, address) as url:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        print(f"serving on {url}; stop with Ctrl-C", flush=True)
        stopped.wait()

"""Real redis-servers on loopback: one, a Sentinel with two, a cluster of three, TLS."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

FIRST_PORT, NUM_PORTS = 16384, 16384


def start_redis(folder: Path, port: int = 0, *more: str) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a redis-server without persistence on loopback; port 0 takes a free one."""
    if shutil.which("redis-server") is None:
        message = "NO redis-server on this machine: the Redis tests did not run"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    for _ in range(5):
        chosen = port or free_port()
        arguments = [
            "--port",
            str(chosen),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(folder),
        ]
        server = subprocess.Popen(
            ["redis-server", *arguments, "--appendonly", "no", *more],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(200):
            if server.poll() is not None:
                break
            try:
                socket.create_connection(("127.0.0.1", chosen), timeout=0.2).close()
                return server, chosen
            except OSError:
                time.sleep(0.02)
        server.kill()
        server.wait()
    raise RuntimeError("redis-server did not start")


@contextlib.contextmanager
def servers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Ends the servers that the body adds."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        for server in started:
            server.send_signal(signal.SIGCONT)
            server.kill()
            server.wait()


def start_sentinel(folder: Path, started: list[subprocess.Popen[bytes]]) -> tuple[str, int]:
    """Starts a primary, a replica and a Sentinel; returns its address and the primary's port."""
    server, primary = start_redis(folder)
    started.append(server)
    link = ["--replicaof", "127.0.0.1", str(primary), "--repl-diskless-sync-delay", "0"]
    replica, _ = start_redis(folder, 0, *link)
    started.append(replica)
    port = free_port()
    lines = [
        f"port {port}",
        "bind 127.0.0.1",
        f"dir {folder}",
        f"sentinel monitor shop 127.0.0.1 {primary} 1",
        "sentinel down-after-milliseconds shop 500",
        "sentinel failover-timeout shop 2000",
    ]
    path = folder / "sentinel.conf"
    path.write_text("\n".join(lines) + "\n")
    started.append(
        subprocess.Popen(
            ["redis-server", str(path), "--sentinel"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # the pipe of the tests would not end before it
        )
    )
    with redis.Redis("127.0.0.1", port) as sentinel:
        wait_for(lambda: sentinel.sentinel_slaves("shop"), "the Sentinel sees no replica")
    return f"127.0.0.1:{port}", primary


def start_cluster(folder: Path, started: list[subprocess.Popen[bytes]]) -> tuple[str, list[int]]:
    """Starts a cluster of three primaries and returns their addresses and ports."""
    ports = []
    for number in range(3):
        own = folder / f"node{number}"
        own.mkdir()
        cluster = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"]
        cluster += ["--cluster-port", str(free_port())]
        server, port = start_redis(own, 0, *cluster)
        started.append(server)
        ports.append(port)
    nodes = [redis.Redis("127.0.0.1", port) for port in ports]
    buses = [node.config_get("cluster-port")["cluster-port"] for node in nodes]
    bounds = [0, 5461, 10923, 16384]
    for number, node in enumerate(nodes):
        node.execute_command(
            "CLUSTER ADDSLOTSRANGE", str(bounds[number]), str(bounds[number + 1] - 1)
        )
        node.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
    for node in nodes:
        for port, bus in zip(ports, buses, strict=True):
            node.execute_command("CLUSTER MEET", "127.0.0.1", port, bus)
    wait_for(
        lambda: all(
            (state := node.execute_command("CLUSTER INFO"))["cluster_state"] == "ok"
            and state["cluster_known_nodes"] == "3"
            for node in nodes
        ),
        "the cluster does not form",
    )
    return ",".join(f"127.0.0.1:{port}" for port in ports), ports


def wait_for(condition: Callable[[], object], message: str) -> None:
    """Waits up to 20 seconds until a condition holds."""
    for _ in range(400):
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        time.sleep(0.05)
    raise RuntimeError(message)


def make_certificate(folder: Path) -> list[str]:
    """Writes `tls.pem` and `tls.key` for 127.0.0.1; returns the arguments of redis-server."""
    key, pem = folder / "tls.key", folder / "tls.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        + ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        + ["-keyout", str(key), "-out", str(pem)],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return ["--tls-cert-file", str(pem), "--tls-key-file", str(key), "--tls-ca-cert-file", str(pem)]


def free_port() -> int:
    """Returns a loopback port that was free at the time of the call.

    Systems take ports from 32768 on for connections and for port 0. This one is lower, so only
    another call of this function could take it before the caller does.
    """
    while True:
        port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port

"""Checks that all Kubernetes manifests share: schemas, pod security, settings of the server."""

from __future__ import annotations

from typing import Any

import kubernetes_validate

from recserve.config import ServerConfig

# The oldest and the newest release that the manifests are checked against.
KUBERNETES = ("1.27.0", "1.37.0")
Manifest = dict[str, Any]


def check_schema(manifest: Manifest) -> None:
    """Validates a manifest against Kubernetes' own schemas; an unknown field is an error."""
    for version in KUBERNETES:
        kubernetes_validate.validate(manifest, version, strict=True)


def as_pod(spec: Manifest) -> Manifest:
    """Returns a pod with the pod specification of a custom resource, to validate it."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}


def check_security(spec: Manifest, read_only: bool = True, token: bool = False) -> None:
    """Asserts what Kubernetes calls the restricted profile.

    Args:
        spec: A pod specification.
        read_only: Whether root file systems must be read-only.
        token: Whether the pod may have the token of its service account.
    """
    assert spec["automountServiceAccountToken"] is token
    # A service called recserve would set RECSERVE_PORT and other variables that are settings.
    assert spec["enableServiceLinks"] is False
    pod = spec["securityContext"]
    assert pod["runAsNonRoot"] is True and pod["runAsUser"] == 1000
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context.get("readOnlyRootFilesystem", False) is read_only
        assert "memory" in container["resources"]["limits"]


def check_drain(spec: Manifest, config: ServerConfig) -> None:
    """Asserts that Kubernetes neither kills nor restarts a pod that drains."""
    (container,) = spec["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    drain_s = float(command[1]) + config.drain_delay_s + config.drain_timeout_s
    assert spec["terminationGracePeriodSeconds"] >= drain_s
    live = container["livenessProbe"]
    assert live["failureThreshold"] * live["periodSeconds"] > drain_s


def probe_paths(spec: Manifest) -> set[str]:
    """Returns the paths of all probes."""
    return {
        container[name]["httpGet"]["path"]
        for container in spec["containers"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }

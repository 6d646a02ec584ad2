"""The Helm chart, rendered by Helm's own library and checked against Kubernetes' schemas."""

import itertools
import json

import pytest
import yaml

helm = pytest.importorskip("helm_python", reason="NO helm-python-sdk: the chart was not rendered")

from recserve.config import ServerConfig  # noqa: E402
from recserve.schemas.api import OPEN_PATHS  # noqa: E402
from tests.support.chart_schema import FILE, config_schema  # noqa: E402
from tests.support.manifests import check_drain, check_schema, check_security, probe_paths  # noqa: E402
from tests.support.paths import ROOT  # noqa: E402

CHART = ROOT / "deploy" / "helm" / "recserve"
KEY = "0123456789abcdef"
LEAST = {
    "bundle": {"volume": {"persistentVolumeClaim": {"claimName": "bundle"}}},
    "secret": {"apiKeys": [KEY], "signingKey": KEY},
}
# Kinds that Kubernetes itself does not define, so that there is no schema for them here.
CUSTOM = {"ServiceMonitor"}


def render(values=None, name="rec"):
    """Returns the manifests by kind, with `values` over the least values."""
    with helm.Chart.load(CHART) as chart:
        rendered = chart.render({**LEAST, **(values or {})}, name=name, namespace="shop")
    parts = [part for file, part in rendered.items() if file.endswith(".yaml")]
    found = [one for part in parts for one in yaml.safe_load_all(part) if one]
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


def pod_of(manifests):
    return manifests["Deployment"]["spec"]["template"]["spec"]


def config_of(manifests, tmp_path, monkeypatch):
    """Returns the settings that the server reads from the config map."""
    monkeypatch.setenv("RECSERVE_API_KEYS", KEY)
    file = tmp_path / "recserve.yaml"
    file.write_text(manifests["ConfigMap"]["data"]["recserve.yaml"])
    return ServerConfig.load({}, file)


CASES = [
    {"autoscaling": {"enabled": enabled, "metric": metric}, **rest}
    for enabled, metric, rest in itertools.product(
        (False, True),
        ("cpu", "queue"),
        (
            {},
            {
                "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
                "podDisruptionBudget": {"enabled": False},
                "secret": {"existing": "keys"},
                "serviceAccount": {"existing": "other"},
                "device": "cuda",
                "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "32Gi"}},
                "imagePullSecrets": [{"name": "registry"}],
                "bundle": {"volume": {"hostPath": {"path": "/b"}}, "path": "v7", "version": "7"},
                "podAnnotations": {"a": "b"},
                "podLabels": {"c": "d"},
                "nodeSelector": {"gpu": "h100"},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "affinity": {"nodeAffinity": {}},
                "extraEnv": [{"name": "GOMP_SPINCOUNT", "value": "1000"}],
            },
        ),
    )
]


@pytest.mark.parametrize("values", CASES)
def test_manifests_fit_the_schemas(values):
    manifests = render(values)
    for kind, manifest in manifests.items():
        if kind not in CUSTOM:
            check_schema(manifest)
    assert ("HorizontalPodAutoscaler" in manifests) == values["autoscaling"]["enabled"]
    assert ("replicas" in manifests["Deployment"]["spec"]) != values["autoscaling"]["enabled"]


@pytest.mark.parametrize("values", CASES[:2])
def test_helm_finds_no_fault(values):
    report = helm.lint(CHART, {**LEAST, **values}, strict=True)
    assert not report["errors"]
    assert {message["severity"] for message in report["messages"]} <= {0, 1}, report


@pytest.mark.parametrize("values", CASES[:2])
def test_pods_are_restricted_and_drain(values, tmp_path, monkeypatch):
    manifests = render(values)
    check_security(pod_of(manifests))
    check_drain(pod_of(manifests), config_of(manifests, tmp_path, monkeypatch))
    assert probe_paths(pod_of(manifests)) <= OPEN_PATHS


def test_a_longer_drain_moves_every_bound(tmp_path, monkeypatch):
    config = {"drain_delay_s": 2.5, "drain_timeout_s": 300, "threads": 4}
    manifests = render({"config": config, "preStopSeconds": 20})
    check_drain(pod_of(manifests), config_of(manifests, tmp_path, monkeypatch))


def test_the_server_accepts_the_config_map(tmp_path, monkeypatch):
    values = {"device": "cuda", "bundle": {**LEAST["bundle"], "path": "v7"}}
    config = config_of(render(values), tmp_path, monkeypatch)
    assert (str(config.bundle), config.host, config.port) == ("/bundle/v7", "0.0.0.0", 8080)
    assert (config.device, config.threads, config.store) == ("cuda", 2, "lmdb:/data/history")
    (container,) = pod_of(render())["containers"]
    assert container["ports"][0]["containerPort"] == config.port
    mounts = {one["mountPath"]: one.get("readOnly", False) for one in container["volumeMounts"]}
    assert mounts == {"/bundle": True, "/etc/recserve": True, "/data": False, "/tmp": False}


def test_a_changed_setting_or_bundle_rolls_the_pods():
    def notes(values):
        return render(values)["Deployment"]["spec"]["template"]["metadata"]["annotations"]

    plain = notes({})
    new_bundle = notes({"bundle": {**LEAST["bundle"], "version": "2"}})
    new_key = notes({"secret": {**LEAST["secret"], "apiKeys": ["another-key-of-16"]}})
    new_setting = notes({"config": {"max_queue": 7}})
    changed = [
        {name for name in plain if plain[name] != other[name]}
        for other in (new_bundle, new_key, new_setting)
    ]
    assert changed == [{"recserve/bundle"}, {"recserve/secret"}, {"recserve/config"}]


def test_names_and_selectors_agree():
    for name in ("rec", "recserve", "x" * 53):
        manifests = render({"serviceMonitor": {"enabled": True}}, name)
        labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
        selectors = [
            manifests["Deployment"]["spec"]["selector"]["matchLabels"],
            manifests["Service"]["spec"]["selector"],
            manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        ]
        assert all(one.items() <= labels.items() for one in selectors)
        monitored = manifests["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
        assert monitored.items() <= manifests["Service"]["metadata"]["labels"].items()
        assert all(len(one["metadata"]["name"]) <= 63 for one in manifests.values())
        assert (
            pod_of(manifests)["serviceAccountName"]
            == (manifests["ServiceAccount"]["metadata"]["name"])
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bundle": {}}, "bundle.volume is required"),
        ({"secret": {}}, "secret.apiKeys is required"),
        ({"secret": {"apiKeys": ["short"]}}, "minLength"),
        ({"replica": 3}, "replica"),
        ({"config": {"host": "127.0.0.1"}}, "host"),
        ({"autoscaling": {"metric": "requests"}}, "metric"),
    ],
)
def test_wrong_values_are_refused(values, message):
    with pytest.raises(helm.HelmError, match=message), helm.Chart.load(CHART) as chart:
        merged = {**LEAST, **values}
        chart.validate_schema(merged)
        chart.render(merged)


@pytest.mark.parametrize(
    ("values", "several"),
    [
        ({"replicas": 2}, True),
        ({"replicas": 1}, False),
        ({"replicas": 1, "autoscaling": {"enabled": True, "maxReplicas": 2}}, True),
        (
            {"replicas": 2, "autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 1}},
            False,
        ),
    ],
)
def test_several_pods_need_one_signing_key(values, several):
    """In the values, or as a key of the secret without which no pod starts."""
    own = {**values, "secret": {"apiKeys": [KEY]}}
    if several:
        with pytest.raises(helm.HelmError, match=r"secret\.signingKey is required"):
            render(own)
    else:
        render(own)
    for secret in (LEAST["secret"], {"existing": "keys"}):
        (container,) = pod_of(render({**values, "secret": secret}))["containers"]
        (found,) = (one for one in container["env"] if one["name"] == "RECSERVE_SIGNING_KEY")
        assert found["valueFrom"]["secretKeyRef"]["optional"] is not several


def test_the_chart_knows_every_setting():
    """If this fails, run `python -m tests.support.chart_schema`."""
    assert json.loads(FILE.read_text())["properties"]["config"] == config_schema()


def closed_maps(schema, path=()):
    """Yields the path of each map of the values that has a list of names."""
    if schema.get("additionalProperties") is False:
        yield path
    for name, one in (schema.get("properties") or {}).items():
        if one:
            yield from closed_maps(one, (*path, name))
    if "items" in schema:
        yield from closed_maps(schema["items"], (*path, 0))


@pytest.mark.parametrize("path", list(closed_maps(json.loads(FILE.read_text()))), ids=str)
def test_an_unknown_value_is_refused(path):
    value = {"max_que": "3"}
    for name in reversed(path):
        value = [value] if name == 0 else {name: value}
    with pytest.raises(helm.HelmError, match="max_que"), helm.Chart.load(CHART) as chart:
        chart.render({**LEAST, **value})


@pytest.mark.parametrize("name", ServerConfig.model_fields)
def test_a_misspelt_setting_is_refused(name):
    with pytest.raises(helm.HelmError, match=f"{name}x"), helm.Chart.load(CHART) as chart:
        chart.render({**LEAST, "config": {f"{name}x": 1}})

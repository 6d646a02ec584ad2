"""The Helm chart, rendered by Helm's own library and checked against Kubernetes' schemas."""

import itertools
import json

import pytest
import yaml

helm = pytest.importorskip("helm_python", reason="NO helm-python-sdk: the chart was not rendered")

from recserve.cli.retrain import read_config  # noqa: E402
from recserve.config import ServerConfig  # noqa: E402
from recserve.schemas.api import OPEN_PATHS  # noqa: E402
from tests.support.chart_schema import FILE, config_schema  # noqa: E402
from tests.support.manifests import check_drain, check_schema, check_security, probe_paths  # noqa: E402
from tests.support.paths import ROOT  # noqa: E402

REDIS = {"store": "redis://redis:6379/0"}
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
    headless = {"clusterIP": "None"}.items()
    kinds = [
        "Pods" if one["kind"] == "Service" and headless <= one["spec"].items() else one["kind"]
        for one in found
    ]
    assert len(set(kinds)) == len(kinds)
    return dict(zip(kinds, found, strict=True))


def pod_of(manifests):
    return manifests["Deployment"]["spec"]["template"]["spec"]


def config_of(manifests, tmp_path, monkeypatch):
    """Returns the settings that the server reads from the config map."""
    monkeypatch.setenv("RECSERVE_API_KEYS", KEY)
    monkeypatch.setenv("RECSERVE_SIGNING_KEY", KEY)
    file = tmp_path / "recserve.yaml"
    file.write_text(manifests["ConfigMap"]["data"]["recserve.yaml"])
    return ServerConfig.load({}, file)


CASES = [
    {"autoscaling": {"enabled": enabled, "metric": metric}, "config": REDIS, **rest}
    for enabled, metric, rest in itertools.product(
        (False, True),
        ("cpu", "queue"),
        (
            {},
            {
                "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
                "ingress": {"enabled": True, "host": "feed.shop", "tlsSecret": "certificate"},
                "rollingUpdate": {"maxSurge": "50%", "maxUnavailable": 1},
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
                "retrain": {"enabled": True},
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
    assert config.catalog_log == "file"
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
        secret = {**LEAST["secret"], "adminKeys": [KEY]}
        monitored = {"serviceMonitor": {"enabled": True}, "retrain": {"enabled": True}}
        manifests = render({**monitored, "secret": secret}, name)
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
        assert len(manifests["CronJob"]["metadata"]["name"]) <= 52  # of Kubernetes
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
        ({"rollingUpdate": {"maxSurge": 0}}, "both 0"),
        ({"rollingUpdate": {"maxSurge": "half"}}, "maxSurge"),
        ({"ingress": {"enabled": True}}, "ingress.host is required"),
        ({"ingress": {"paths": []}}, "paths"),
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
        ({}, True),
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
    values = {**values, "config": REDIS}
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


SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+cluster", "unix")


@pytest.mark.parametrize(
    ("values", "replicas"),
    [
        ({}, 1),
        *(({"config": {"store": f"{scheme}://redis:6379/0"}}, 2) for scheme in SCHEMES),
        ({"secret": {**LEAST["secret"], "store": "redis://:password@redis:6379/0"}}, 2),
        ({"secret": {"existing": "keys"}, "config": {"catalog_log": "redis"}}, 2),
        ({"config": {"catalog_log": "redis://other:6379/1"}}, 2),
        ({"config": {**REDIS, "catalog_log": "file"}}, 1),
        ({"config": REDIS, "replicas": 5}, 5),
    ],
)
def test_pods_with_a_redis_are_a_fleet_with_one_catalogue(values, replicas, tmp_path, monkeypatch):
    manifests = render(values)
    assert manifests["Deployment"]["spec"]["replicas"] == replicas
    if "store" in values.get("secret", {}) or "existing" in values.get("secret", {}):
        monkeypatch.setenv("RECSERVE_STORE", REDIS["store"])
    config = config_of(manifests, tmp_path, monkeypatch)
    given = values.get("config", {}).get("catalog_log")
    assert config.catalog_log == (given or ("redis" if replicas > 1 else "file"))
    if config.catalog_log == "file":
        for several in ({"replicas": 2}, {"autoscaling": {"enabled": True}}):
            with pytest.raises(helm.HelmError, match=r"config\.catalog_log is file, and up to"):
                render({**values, **several})


def test_an_ingress_sends_a_user_to_one_pod():
    """It is off by default, and what only operators may reach is not behind it."""
    assert "Ingress" not in render()
    values = {"enabled": True, "host": "feed.shop", "affinityHeader": "X-User-Hash"}
    manifests = render({"ingress": values, "config": {"max_body_bytes": 2097152}})
    check_schema(manifests["Ingress"])
    prefix = "nginx.ingress.kubernetes.io/"
    notes = manifests["Ingress"]["metadata"]["annotations"]
    assert notes[prefix + "upstream-hash-by"] == "$http_x_user_hash"
    assert notes[prefix + "proxy-body-size"] == "2097152"
    (rule,) = manifests["Ingress"]["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    backend = path["backend"]["service"]
    assert (rule["host"], path["path"], path["pathType"]) == ("feed.shop", "/v1", "Prefix")
    assert backend["name"] == manifests["Service"]["metadata"]["name"]
    assert backend["port"]["name"] == manifests["Service"]["spec"]["ports"][0]["name"]
    own = {prefix + "upstream-hash-by": "$arg_user", "a": "b"}
    notes = render({"ingress": {**values, "annotations": own}})["Ingress"]["metadata"][
        "annotations"
    ]
    assert own.items() <= notes.items()


def test_a_new_pod_is_ready_before_an_old_one_ends():
    strategy = render()["Deployment"]["spec"]["strategy"]
    assert strategy == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }


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


@pytest.mark.parametrize("store", ["", "redis://redis:6379/0"])
def test_the_cron_job_retrains_what_the_pods_record(tmp_path, monkeypatch, store):
    secret = {"apiKeys": [KEY], "signingKey": KEY, "adminKeys": [KEY], "store": store}
    manifests = render({"retrain": {"enabled": True}, "secret": secret})
    job = manifests["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    check_security(job)
    (container,) = job["containers"]
    assert container["args"] == ["retrain", "/etc/recserve/retrain.yaml"]
    (tmp_path / "retrain.yaml").write_text(manifests["ConfigMap"]["data"]["retrain.yaml"])
    variables = [one["name"] for one in container["env"]]
    assert ("RECSERVE_STORE" in variables) == bool(store)
    settings = read_config(tmp_path / "retrain.yaml", store or None)
    if store:
        monkeypatch.setenv("RECSERVE_STORE", store)
    served = config_of(manifests, tmp_path, monkeypatch)
    assert str(served.bundles_dir) == settings.bundles_dir
    assert str(served.event_log) == settings.event_log
    assert str(served.slate_log) == settings.slate_log
    assert settings.fleet == bool(store) and served.catalog_log == ("redis" if store else "file")
    assert settings.catalog_url == (store or None)
    assert settings.journal == (None if store else str(served.journal))
    (address,) = settings.metrics
    pods = manifests["Pods"]
    assert address == f"http://{pods['metadata']['name']}:{pods['spec']['ports'][0]['port']}"
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert pods["spec"]["selector"].items() <= labels.items()
    assert settings.url.startswith(f"http://{manifests['Service']['metadata']['name']}")
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    assert "/retrain" in mounts
    with pytest.raises(helm.HelmError, match=r"secret\.adminKeys is required"):
        render({"retrain": {"enabled": True}, "secret": {"apiKeys": [KEY]}})

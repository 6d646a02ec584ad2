"""KServe and KubeRay manifests: pod specifications by schema, Ray's part by Ray's own classes.

The schemas of the custom resources themselves are not part of Kubernetes and are not checked.
"""

import importlib

import pytest
import yaml

from recserve.cli.app import app as typer_app
from recserve.config import ServerConfig
from recserve.schemas.api import OPEN_PATHS
from tests.support.manifests import as_pod, check_drain, check_schema, check_security, probe_paths
from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"


def manifest(path):
    return yaml.safe_load((DEPLOY / path).read_text(encoding="utf-8"))


def ray_pods():
    cluster = manifest("ray/ray-service.yaml")["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_the_kserve_pod_is_restricted_and_drains(monkeypatch):
    monkeypatch.setenv("RECSERVE_API_KEYS", "0123456789abcdef")
    predictor = manifest("kserve/inference-service.yaml")["spec"]["predictor"]
    own = {"minReplicas", "maxReplicas", "scaleMetric", "scaleTarget"}
    pod = {name: value for name, value in predictor.items() if name not in own}
    check_schema(as_pod(pod))
    check_security(pod)
    monkeypatch.setenv("RECSERVE_SIGNING_KEY", "0123456789abcdef")
    for variable in pod["containers"][0]["env"]:
        if "value" in variable and variable["name"].startswith("RECSERVE_"):
            monkeypatch.setenv(variable["name"], variable["value"])
    flags = dict(one[2:].split("=", 1) for one in pod["containers"][0]["args"][1:])
    config = ServerConfig.load(flags)
    assert config.catalog_log == "redis"
    assert pod["containers"][0]["ports"][0]["containerPort"] == config.port
    check_drain(pod, config)
    assert probe_paths(pod) <= OPEN_PATHS


def test_ray_pods_are_restricted():
    head, workers = ray_pods()
    for pod, token in ((head, True), (workers, False)):
        check_schema(as_pod(pod))
        check_security(pod, read_only=False, token=token)


def test_replicas_get_the_keys_of_all():
    for pod in (manifest("kserve/inference-service.yaml")["spec"]["predictor"], *ray_pods()):
        found = {
            one["name"]: one["valueFrom"]["secretKeyRef"]
            for one in pod["containers"][0]["env"]
            if "valueFrom" in one
        }
        assert found == {
            "RECSERVE_API_KEYS": {"name": "recserve-keys", "key": "api-keys"},
            "RECSERVE_SIGNING_KEY": {"name": "recserve-keys", "key": "signing-key"},
        }


def applications():
    texts = {
        "serve.yaml": (DEPLOY / "ray" / "serve.yaml").read_text(encoding="utf-8"),
        "ray-service.yaml": manifest("ray/ray-service.yaml")["spec"]["serveConfigV2"],
    }
    return [pytest.param(yaml.safe_load(text), id=name) for name, text in texts.items()]


@pytest.mark.parametrize("config", applications())
def test_ray_accepts_the_application(config, monkeypatch):
    schema = pytest.importorskip("ray.serve.schema", reason="NO ray: its schema was not used")
    monkeypatch.setenv("RECSERVE_API_KEYS", "0123456789abcdef")
    monkeypatch.setenv("RECSERVE_SIGNING_KEY", "0123456789abcdef")
    (application,) = schema.ServeDeploySchema.model_validate(config).applications
    module, name = application.import_path.split(":")
    build = getattr(importlib.import_module(module), name)
    assert build(application.args)
    replica = importlib.import_module(module).ReplicaOptions.model_validate(application.args)
    assert replica.max_replicas > replica.min_replicas >= 2
    assert replica.server_config().store.startswith("redis://")
    assert replica.server_config().catalog_log == "redis"


def test_the_ray_cluster_can_hold_the_most_replicas():
    spec = manifest("ray/ray-service.yaml")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    per_worker = float(ray_pods()[1]["containers"][0]["resources"]["limits"]["cpu"])
    args = application["args"]
    assert args["cpus"] <= per_worker
    assert workers["minReplicas"] * per_worker >= args["min_replicas"] * args["cpus"]
    assert workers["maxReplicas"] * per_worker >= args["max_replicas"] * args["cpus"]


def test_the_ray_job_retrains():
    spec = manifest("ray/retrain-job.yaml")["spec"]
    pod = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    check_schema(as_pod(pod))
    check_security(pod, read_only=False)
    program, command, file = spec["entrypoint"].split()
    assert (program, command) == ("recserve", "retrain")
    assert command in {one.name for one in typer_app.registered_commands} | {
        one.callback.__name__ for one in typer_app.registered_commands
    }
    (container,) = pod["containers"]
    assert any(file.startswith(f"{one['mountPath']}/") for one in container["volumeMounts"])

"""Renders the chart in deploy/helm/moeserve for the tests of this folder."""

import functools
import importlib.util
import pathlib

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/moeserve"

_spec = importlib.util.spec_from_file_location("generate", ROOT / "deploy/kubernetes/generate.py")
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)

# Values that the tests render beside the chart's examples.
TLS_GATEWAY = {
    "tls": {"existingSecret": "moeserve-tls"},
    "gateway": {"enabled": True, "parentRefs": [{"name": "inference", "sectionName": "https"}],
                "http": {"hostnames": ["a.example.com"], "requestTimeout": ""},
                "grpc": {"hostnames": ["*.grpc.example.com"]},
                "backendTls": {"hostname": "moeserve.internal", "caConfigMap": "moeserve-ca"}},
}
CUSTOM = {
    "fullnameOverride": "other", "nameOverride": "llm", "replicas": 1, "preStopSleepSeconds": 0,
    "drainTimeout": 0,
    "image": {"repository": "registry.example/llm", "digest": "sha256:" + "a" * 64},
    "imagePullSecrets": [{"name": "pull"}], "ports": {"http": 9000, "grpc": 9001},
    "listenAddress": "[::]", "config": {"threads": 1, "log-format": "text"},
    "models": {"volume": {"persistentVolumeClaim": None, "emptyDir": {}}, "readOnly": False,
               "fill": {"enabled": True, "image": "fill:1", "command": ["fill"]}},
    "resources": {"limits": None}, "gpu": {"count": 2}, "service": {"annotations": {"a": "b"}},
    "headlessService": {"enabled": False}, "serviceAccount": {"create": False},
    "podDisruptionBudget": {"enabled": False}, "podAnnotations": {"a": "b"},
    "networkPolicy": {"extraEgress": [{"ports": [{"port": 443, "protocol": "TCP"}]}]},
    "podLabels": {"team": "a"}, "affinity": {"nodeAffinity": {}}, "priorityClassName": "high",
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone",
                                   "whenUnsatisfiable": "DoNotSchedule"}],
    "extraEnv": [{"name": "A", "value": "b"}], "minReadySeconds": 5,
    "extraVolumes": [{"name": "tmp", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    "inferencePool": {"enabled": True, "endpointPicker": {"service": "epp"},
                      "objectives": [{"name": "batch", "priority": -1}],
                      "objectivesApiVersion": "inference.networking.x-k8s.io/v1alpha2"},
}

RANKS = {
    "replicas": 3, "fullnameOverride": "group", "nameOverride": "llm", "preStopSleepSeconds": 0,
    "ranks": {"enabled": True, "size": 4, "sshKeysSecret": "keys-of-ranks", "livenessFailures": 4},
    "models": {"claimPerReplica": {"enabled": True}, "readOnly": False,
               "fill": {"enabled": True, "image": "fill:1"}},
    "image": {"tag": "ranks-7"}, "rollingUpdate": {"maxUnavailable": 0, "maxSurge": "25%"},
    "tls": {"existingSecret": "moeserve-tls", "clientCa": {"existingSecret": "moeserve-client-ca"}},
    "autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 5},
    "tracing": {"endpoint": "http://collector:4318", "headersSecret": {"name": "otel"}},
    "extraEnv": [{"name": "A", "value": "b"}, {"name": "OMPI_MCA_btl_tcp_if_include",
                                                "value": "eth1"}],
    "networkPolicy": {"extraEgress": [{"ports": [{"port": 443, "protocol": "TCP"}]}]},
}
RANKS_GATEWAY = {
    "ranks": {"enabled": True},
    "gateway": {"enabled": True, "parentRefs": [{"name": "inference"}],
                "http": {"hostnames": ["a.example.com"]},
                "grpc": {"hostnames": ["grpc.example.com"]}},
    "inferencePool": {"enabled": True, "endpointPicker": {"service": "epp"}},
}


def value_sets():
    """Returns {name: values}."""
    examples = {file.stem: generate.load_values(file)
                for file in sorted((CHART / "examples").glob("*.yaml"))}
    assert examples
    return {"default": {}, **examples, "tls-gateway": TLS_GATEWAY, "custom": CUSTOM,
            "ranks-tls": RANKS, "ranks-gateway": RANKS_GATEWAY}


def require_helm():
    if not generate.helm_program() and not generate.helm_library():
        pytest.skip("neither the program helm nor the Python package helm-python-sdk is here")


@functools.cache
def rendered(name):
    """Returns the objects of the value set `name`."""
    require_helm()
    return [yaml.safe_load(text) for text in generate.render(value_sets()[name])]


def of_kind(objects, *kinds):
    return [thing for thing in objects if thing["kind"] in kinds]


def one(objects, *kinds):
    found, = of_kind(objects, *kinds)
    return found


def config_map(objects):
    """Returns the ConfigMap with the configuration file."""
    found, = (thing for thing in of_kind(objects, "ConfigMap")
              if "moeserve.yaml" in thing["data"])
    return found


class Workload:
    """The Deployment, StatefulSet or LeaderWorkerSet among `objects`, and its parts: of a
    LeaderWorkerSet those of the leader, which serves. `claims` are templates of claims."""

    def __init__(self, objects):
        self.object = one(objects, "Deployment", "StatefulSet", "LeaderWorkerSet")
        spec = self.object["spec"]
        self.has_ranks = self.object["kind"] == "LeaderWorkerSet"
        if self.has_ranks:
            spec = spec["leaderWorkerTemplate"]
        self.template = spec["leaderTemplate" if self.has_ranks else "template"]
        self.claims = spec.get("volumeClaimTemplates", [])
        self.pod = self.template["spec"]
        self.container, = self.pod["containers"]
        self.ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        self.environment = {entry["name"]: entry for entry in self.container["env"]}
        self.config = yaml.safe_load(config_map(objects)["data"]["moeserve.yaml"])
        self.probes = {name: self.container[f"{name}Probe"]
                       for name in ("startup", "readiness", "liveness")}

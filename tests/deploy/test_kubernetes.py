"""Checks what the chart in deploy/helm/moeserve renders to, and the manifests in deploy/kubernetes.

No cluster is needed. test_kubernetes_server.py runs the program as the rendered pods would.
"""

import json
import re

import jsonschema
import pytest
import yaml

from kubernetes_chart import (CHART, ROOT, Workload, generate, of_kind, one, rendered,
                              require_helm, value_sets)

SETS = list(value_sets())
# Those of several pods for one model; test_kubernetes_ranks.py has more about them.
RANKS = [name for name in SETS if value_sets()[name].get("ranks", {}).get("enabled")]
# Manifests that are not rendered.
WRITTEN = {file: yaml.safe_load(file.read_text())
           for file in [ROOT / "deploy/kubernetes/score/mpijob.yaml"]}
# The oldest version that the chart names, and the newest that the validator has.
VERSIONS = ["1.30", "1.37"]
# Volumes of the kind "image" are newer than 1.30.
NEWER = {("full", "1.30")}
CRDS = yaml.safe_load((ROOT / "tests/deploy/kubernetes_crds.yaml").read_text())


def is_of_kubernetes(thing):
    group = thing["apiVersion"].rpartition("/")[0]
    return group in ("", "apps", "autoscaling", "networking.k8s.io", "policy")


def is_of_clients(policy):
    """Whether a NetworkPolicy is that of the pods that serve, not one between ranks."""
    return not re.search(r"-(workers|group-\d+)$", policy["metadata"]["name"])


def test_the_manifests_are_what_the_chart_renders():
    require_helm()
    wrong = generate.differences()
    assert not wrong, f"run deploy/kubernetes/generate.py: {wrong}"


def test_program_and_library_render_the_same():
    program, library = generate.helm_program(), generate.helm_library()
    if not program or not library:
        pytest.skip("the program helm and the Python package helm-python-sdk are not both here")
    for values in value_sets().values():
        def objects(text):
            found = [thing for thing in yaml.safe_load_all(text) if thing]
            return sorted(found, key=lambda thing: (thing["kind"], thing["metadata"]["name"]))
        assert (objects(generate.render_with_program(program, values)) ==
                objects(generate.render_with_library(library, values)))


@pytest.mark.parametrize("name", SETS)
def test_lint(name):
    library = generate.helm_library()
    if not library:
        pytest.skip("the Python package helm-python-sdk is not here")
    result = library.lint(CHART, value_sets()[name], strict=True)
    assert not result["errors"]
    # Severity 1 is information: the chart has no icon.
    assert [message for message in result["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", SETS)
def test_objects_have_the_fields_of_kubernetes(name, version):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    if (name, version) in NEWER:
        pytest.skip("needs a newer version")
    objects = [thing for thing in rendered(name) if is_of_kubernetes(thing)]
    assert len(objects) >= 4
    for thing in objects:
        kubernetes_validate.validate(thing, version, strict=True)


@pytest.mark.parametrize("name", SETS)
def test_custom_objects_have_the_fields_of_their_crds(name):
    for thing in rendered(name):
        if is_of_kubernetes(thing):
            continue
        schema = CRDS[f"{thing['apiVersion']} {thing['kind']}"]
        jsonschema.validate(thing, schema)


def test_every_custom_kind_is_rendered():
    kinds = {f"{thing['apiVersion']} {thing['kind']}"
             for name in SETS for thing in rendered(name) if not is_of_kubernetes(thing)}
    kinds |= {f"{thing['apiVersion']} {thing['kind']}" for thing in WRITTEN.values()}
    assert kinds == set(CRDS)


@pytest.mark.parametrize("name", SETS)
def test_names_and_namespaces(name):
    objects = rendered(name)
    identities = [(thing["kind"], thing["metadata"]["name"]) for thing in objects]
    assert len(identities) == len(set(identities))
    for thing in objects:
        assert thing["metadata"]["namespace"] == generate.NAMESPACE
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", thing["metadata"]["name"])


@pytest.mark.parametrize("name", SETS)
def test_the_pod_is_confined(name):
    pod = Workload(rendered(name)).pod
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    for forbidden in ("hostNetwork", "hostPID", "hostIPC", "hostUsers"):
        assert forbidden not in pod
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True
    # The user of the image.
    user = re.search(r"^USER (\d+):(\d+)$", (ROOT / "deploy/Dockerfile").read_text(), re.M)
    assert (security["runAsUser"], security["runAsGroup"]) == (int(user[1]), int(user[2]))
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"] + pod.get("initContainers", []):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["privileged"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", SETS)
def test_volumes_are_those_of_the_restricted_standard(name):
    """The Pod Security Standard "restricted" allows these; only an example uses the node's disk."""
    allowed = {"configMap", "csi", "emptyDir", "ephemeral", "image", "persistentVolumeClaim",
               "secret"}
    if name == "minimal":
        allowed.add("hostPath")
    for volume in Workload(rendered(name)).pod["volumes"]:
        source, = set(volume) - {"name"}
        assert source in allowed


def test_the_dashboard_is_the_one_of_grafana():
    boards = [thing for thing in of_kind(rendered("full"), "ConfigMap")
              if thing["metadata"]["labels"].get("grafana_dashboard") == "1"]
    board, = boards
    dashboard = json.loads(board["data"]["moeserve.json"])
    assert dashboard == json.loads(
        (ROOT / "deploy/grafana/dashboards/moeserve.json").read_text())


@pytest.mark.parametrize("name", SETS)
def test_nothing_needs_a_shell(name):
    container = Workload(rendered(name)).container
    # The entry point of the image, but for mpirun, which a script starts.
    assert ("command" in container) == (name in RANKS)
    hooks = container.get("lifecycle", {})
    assert set(hooks) <= {"preStop"}
    checks = [container[f"{probe}Probe"] for probe in ("startup", "readiness", "liveness")]
    for action in checks + list(hooks.values()):
        assert "exec" not in action


@pytest.mark.parametrize("name", SETS)
def test_the_grace_period_covers_the_hook_the_drain_and_a_stuck_engine(name):
    workload = Workload(rendered(name))
    hook = workload.container.get("lifecycle", {}).get("preStop", {})
    sleep = hook.get("sleep", {}).get("seconds", 0)
    assert ("lifecycle" in workload.container) == (sleep > 0)
    # After the drain, clients have five seconds to read, and a stuck engine ends ten seconds later.
    needed = sleep + workload.config["drain-timeout"] + 5 + 10
    assert workload.pod["terminationGracePeriodSeconds"] > needed


@pytest.mark.parametrize("name", SETS)
def test_probes_wait_long_enough(name):
    probes = Workload(rendered(name)).probes
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 1800
    # A pod that is not ready gets no requests before it is restarted.
    assert probes["readiness"]["failureThreshold"] < probes["liveness"]["failureThreshold"]
    for probe in probes.values():
        assert probe["timeoutSeconds"] <= probe["periodSeconds"]


@pytest.mark.parametrize("name", SETS)
def test_selectors_find_the_pods_and_only_these(name):
    objects = rendered(name)
    workload = Workload(objects)
    labels = workload.template["metadata"]["labels"]
    selectors = ([] if workload.has_ranks else
                 [workload.object["spec"]["selector"]["matchLabels"]])
    selectors += [service["spec"]["selector"] for service in of_kind(objects, "Service")]
    selectors += [policy["spec"]["podSelector"]["matchLabels"]
                  for policy in of_kind(objects, "NetworkPolicy") if is_of_clients(policy)]
    selectors += [thing["spec"]["selector"]["matchLabels"]
                  for thing in of_kind(objects, "PodDisruptionBudget", "InferencePool")]
    selectors += [spread["labelSelector"]["matchLabels"]
                  for spread in workload.pod["topologySpreadConstraints"]
                  if "labelSelector" in spread]
    assert len(selectors) >= 3
    for selector in selectors:
        assert selector == selectors[0]
    assert selectors[0].items() <= labels.items()
    for test in of_kind(objects, "Pod"):
        assert not selectors[0].items() <= test["metadata"]["labels"].items()


@pytest.mark.parametrize("name", SETS)
def test_ports_agree(name):
    objects = rendered(name)
    workload = Workload(objects)
    ports = workload.ports
    for variable, port in (("MOESERVE_HTTP", "http"), ("MOESERVE_GRPC", "grpc")):
        assert workload.environment[variable]["value"].rpartition(":")[2] == str(ports[port])
    for probe in workload.probes.values():
        assert probe["httpGet"]["port"] == "http"
    for service in of_kind(objects, "Service"):
        assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
        assert {port["targetPort"] for port in service["spec"]["ports"]} == set(ports)
    for policy in filter(is_of_clients, of_kind(objects, "NetworkPolicy")):
        opened = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
        assert sorted(opened) == sorted(ports)
    for pool in of_kind(objects, "InferencePool"):
        assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]


@pytest.mark.parametrize("name", SETS)
def test_references_have_targets(name):
    objects = rendered(name)
    workload = Workload(objects)
    things = {(thing["kind"], thing["metadata"]["name"]): thing for thing in objects}
    for volume in workload.pod["volumes"]:
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in things
    volumes = {volume["name"] for volume in workload.pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in workload.claims}
    for container in workload.pod["containers"] + workload.pod.get("initContainers", []):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    account = workload.pod["serviceAccountName"]
    assert account == "default" or ("ServiceAccount", account) in things
    if workload.object["kind"] == "StatefulSet":
        service = things["Service", workload.object["spec"]["serviceName"]]
        assert service["spec"]["clusterIP"] == "None"
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert things[target["kind"], target["name"]] is workload.object
        assert target["apiVersion"] == workload.object["apiVersion"]
        assert "replicas" not in workload.object["spec"]
    for route in of_kind(objects, "HTTPRoute", "GRPCRoute"):
        backend, = route["spec"]["rules"][0]["backendRefs"]
        thing = things[backend.get("kind", "Service"), backend["name"]]
        if thing["kind"] == "Service":
            port, = (port for port in thing["spec"]["ports"] if port["port"] == backend["port"])
            assert port["name"] == {"HTTPRoute": "http", "GRPCRoute": "grpc"}[route["kind"]]
    for policy in of_kind(objects, "BackendTLSPolicy"):
        target, = policy["spec"]["targetRefs"]
        assert (target["kind"], target["name"]) in things
    for objective in of_kind(objects, "InferenceObjective"):
        assert ("InferencePool", objective["spec"]["poolRef"]["name"]) in things
    for monitor in of_kind(objects, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        service, = (service for service in of_kind(objects, "Service")
                    if wanted <= service["metadata"]["labels"].items())
        # The alerts name the job.
        job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
        assert f'job="{job}"' in (ROOT / "deploy/alerts.yml").read_text()


@pytest.mark.parametrize("name", SETS)
def test_http_and_grpc_have_different_host_names(name):
    routes = of_kind(rendered(name), "HTTPRoute", "GRPCRoute")
    names = [host for route in routes for host in route["spec"]["hostnames"]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", SETS)
def test_tls_reaches_everything_that_connects(name):
    objects = rendered(name)
    workload = Workload(objects)
    tls = "MOESERVE_TLS_CERT" in workload.environment
    schemes = {probe["httpGet"]["scheme"] for probe in workload.probes.values()}
    schemes |= {monitor["spec"]["endpoints"][0]["scheme"].upper()
                for monitor in of_kind(objects, "ServiceMonitor")}
    assert schemes == {"HTTPS" if tls else "HTTP"}
    assert len(of_kind(objects, "BackendTLSPolicy")) == (
        1 if tls and of_kind(objects, "HTTPRoute") else 0)
    for service in of_kind(objects, "Service"):
        protocols = {port["name"]: port["appProtocol"] for port in service["spec"]["ports"]}
        assert protocols == ({"http": "https", "grpc": "https"} if tls else
                             {"http": "http", "grpc": "kubernetes.io/h2c"})


@pytest.mark.parametrize("name", SETS)
def test_egress_is_closed_but_for_what_is_named(name):
    values = value_sets()[name]
    for policy in filter(is_of_clients, of_kind(rendered(name), "NetworkPolicy")):
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        opened = [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]]
        wanted = [53, 53, 4318] if "tracing" in values else []
        wanted += [port["port"] for rule in values.get("networkPolicy", {}).get("extraEgress", [])
                   for port in rule["ports"]]
        assert opened == wanted


def test_a_changed_configuration_restarts_the_pods():
    def checksum(values):
        objects = [yaml.safe_load(text) for text in generate.render(values)]
        annotations = Workload(objects).template["metadata"]["annotations"]
        return annotations["checksum/config"]

    require_helm()
    sums = {checksum({}), checksum({"config": {"max-num-seqs": 8}}),
            checksum({"chatTemplate": "a"}), checksum({"chatTemplate": "b"})}
    assert len(sums) == 4
    assert checksum({"replicas": 7}) == checksum({})


def test_files_that_are_reloaded_are_mounted_as_folders():
    """A file that is mounted by subPath keeps its first contents."""
    for name in SETS:
        for mount in Workload(rendered(name)).container["volumeMounts"]:
            assert "subPath" not in mount


@pytest.mark.parametrize("values, message", [
    ({"apiKeys": {"existingSecret": ""}}, "allowOpen"),
    ({"tls": {"clientCa": {"existingSecret": "a"}}}, "tls.existingSecret"),
    ({"ports": {"http": 8081}}, "must differ"),
    ({"ports": {"http": 80}}, "ports/http"),
    ({"models": {"volume": {"emptyDir": {}}}}, "expected one source, found 2"),
    ({"models": {"fill": {"enabled": True}}}, "fill.image"),
    ({"models": {"served": []}}, "served"),
    ({"models": {"served": [{"name": "a=b", "path": "/models"}]}}, "name"),
    ({"gateway": {"enabled": True}}, "parentRefs"),
    ({"gateway": {"enabled": True, "parentRefs": [{"name": "a"}],
                  "http": {"hostnames": ["a.b"]}}}, "hostnames"),
    ({"gateway": {"enabled": True, "parentRefs": [{"name": "a"}], "http": {"hostnames": ["a.b"]},
                  "grpc": {"hostnames": ["a.b"]}}}, "both HTTP and gRPC"),
    ({"tls": {"existingSecret": "a"},
      "gateway": {"enabled": True, "parentRefs": [{"name": "a"}], "grpc": {"enabled": False}}},
     "backendTls"),
    ({"inferencePool": {"enabled": True}}, "endpointPicker.service"),
    ({"tls": {"existingSecret": "a"},
      "inferencePool": {"enabled": True, "endpointPicker": {"service": "a"}}}, "without TLS"),
    ({"autoscaling": {"enabled": True, "minReplicas": 9}}, "maxReplicas"),
    ({"tracing": {"endpoint": "https://a:1"}}, "endpoint"),
    ({"ranks": {"enabled": True, "sshKeysSecret": ""}}, "ranks.sshKeysSecret"),
    ({"ranks": {"enabled": True, "size": 1}}, "size"),
    ({"ranks": {"enabled": True, "sharedMemory": "much"}}, "sharedMemory"),
    ({"ranks": {"enabled": True}, "gpu": {"count": 1}}, "gpu.count"),
    ({"ranks": {"enabled": True}, "models": {"served": [
        {"name": "a", "path": "/a"}, {"name": "b", "path": "/b"}]}}, "one model"),
    ({"ranks": {"enabled": True}, "fullnameOverride": "a" * 45}, "at most 44"),
    ({"ranks": {"enabled": True}, "replicas": 200}, "at most 200 groups"),
    ({"config": {"ranks": "mpi"}}, "'ranks'"),
    ({"config": {"model": "/models"}}, "'model'"),
    ({"config": {"tls-cert": "a"}}, "'tls-cert'"),
    ({"config": {"max-num-seqs": {"a": 1}}}, "max-num-seqs"),
    ({"replica": 1}, "replica"),
    ({"image": {"digest": "sha256:1"}}, "digest"),
    ({"replicas": "2"}, "replicas"),
])
def test_wrong_values_are_refused(values, message):
    require_helm()
    with pytest.raises(generate.RenderError, match=re.escape(message)):
        generate.render(values)


def test_the_schema_knows_every_value():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(value, schema, path):
        if schema.get("additionalProperties") is not False or path == "models.volume":
            return
        missing = set(schema["properties"]) - set(value) - {"global", "claims"}
        assert not missing, f"values.yaml lacks {path}: {missing}"
        for key, inner in value.items():
            if isinstance(inner, dict):
                compare(inner, schema["properties"][key], f"{path}.{key}".lstrip("."))

    jsonschema.validate(values, schema)
    compare(values, schema, "")


def test_the_versions_are_those_of_the_program():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r"project\(moeserve VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    assert chart["appVersion"] == version[1]
    assert one(rendered("default"), "Deployment")["spec"]["template"]["spec"]["containers"][0][
        "image"].endswith(f":{version[1]}")


def test_hooks_are_not_part_of_the_manifests():
    files = list((ROOT / "deploy/kubernetes").glob("*/*.yaml"))
    assert len(files) > 10
    for file in set(files) - set(WRITTEN):
        text = file.read_text()
        assert "helm.sh" not in text and "managed-by" not in text, file
        yaml.safe_load(text)

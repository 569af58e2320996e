"""Checks what the chart renders for several pods that compute one model together, and the MPIJob."""

import json
import math
import re

import jsonschema
import pytest
import yaml

from kubernetes_chart import CHART, ROOT, Workload, generate, of_kind, one, rendered, value_sets
from test_kubernetes import CRDS, RANKS, VERSIONS, WRITTEN

SCRIPTS = "/usr/local/lib/moeserve/ranks/"
JOB, = WRITTEN.values()


def values(name):
    """Returns the values of the set `name` over the chart's."""
    def merged(below, above):
        both = isinstance(below, dict) and isinstance(above, dict)
        return ({key: merged(below.get(key), above[key]) if key in above else below[key]
                 for key in {**below, **above}} if both else above)

    return merged(yaml.safe_load((CHART / "values.yaml").read_text()), value_sets()[name])


def group(name):
    return one(rendered(name), "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]


def roles(name):
    """Returns the templates of the pods by their role."""
    return {role: group(name)[f"{role}Template"] for role in ("leader", "worker")}


def templates():
    """Yields every template of a pod that a custom object has."""
    for name in RANKS:
        yield from roles(name).values()
    for replica in JOB["spec"]["mpiReplicaSpecs"].values():
        yield replica["template"]


def container(template):
    found, = template["spec"]["containers"]
    return found


def matches(selector, labels):
    assert set(selector) == {"matchLabels"}
    return selector["matchLabels"].items() <= labels.items()


def labels_in_group(name, role, index):
    """Returns a pod's labels with those that the controller adds."""
    return roles(name)[role]["metadata"]["labels"] | {
        "leaderworkerset.sigs.k8s.io/name": one(rendered(name), "LeaderWorkerSet")["metadata"]["name"],
        "leaderworkerset.sigs.k8s.io/group-index": str(index),
        "leaderworkerset.sigs.k8s.io/worker-index": "0" if role == "leader" else "1"}


@pytest.mark.parametrize("version", VERSIONS)
def test_templates_have_the_fields_of_kubernetes(version):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for template in templates():
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"},
             "template": template}, version, strict=True)
    for name in RANKS:
        for claim in group(name).get("volumeClaimTemplates", []):
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim}, version, strict=True)


def test_the_job_has_the_fields_of_its_crd():
    jsonschema.validate(JOB, CRDS["kubeflow.org/v2beta1 MPIJob"])


@pytest.mark.parametrize("name", RANKS)
def test_a_replica_is_a_group_that_starts_again_together(name):
    objects = rendered(name)
    thing = one(objects, "LeaderWorkerSet")
    assert not of_kind(objects, "Deployment", "StatefulSet")
    assert group(name)["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert group(name)["size"] == values(name)["ranks"]["size"]
    if not values(name)["autoscaling"]["enabled"]:
        assert thing["spec"]["replicas"] == values(name)["replicas"]
    # The controller's headless Services are named like the groups' leaders.
    assert thing["spec"]["networkConfig"]["subdomainPolicy"] == "UniquePerReplica"
    services = {service["metadata"]["name"] for service in of_kind(objects, "Service")}
    leaders = {f"{thing['metadata']['name']}-{i}" for i in range(1000)}
    assert not services & leaders
    # Of the last worker's StatefulSet, the name with a hash is a label.
    assert len("a" * 44 + "-200-" + "0123456789") <= 63


@pytest.mark.parametrize("name", RANKS)
def test_leader_and_worker_differ_only_in_what_they_do(name):
    leader, worker = (roles(name)[role] for role in ("leader", "worker"))
    assert container(leader)["command"] == [SCRIPTS + "leader.sh"]
    assert container(worker)["command"] == [SCRIPTS + "worker.sh"]
    assert "args" not in container(worker) and "lifecycle" not in container(worker)
    for field in ("image", "imagePullPolicy", "resources", "securityContext"):
        assert container(leader)[field] == container(worker)[field]
    different = {"containers", "topologySpreadConstraints", "volumes"}
    for field in set(leader["spec"]) - different:
        assert leader["spec"][field] == worker["spec"][field]
    # Only the leader has certificates; both read the same files of models, options and keys.
    for_clients = {"tls", "client-ca"}
    for pod in (leader, worker):
        assert {mount["name"] for mount in container(pod)["volumeMounts"]} == (
            {volume["name"] for volume in pod["spec"]["volumes"]} |
            {claim["metadata"]["name"] for claim in group(name).get("volumeClaimTemplates", [])})
    names = [{mount["name"] for mount in container(pod)["volumeMounts"]}
             for pod in (leader, worker)]
    assert names[0] - for_clients == names[1] and {"config", "models", "ssh"} <= names[1]


def test_every_pod_is_confined():
    user = re.search(r"^USER (\d+):(\d+)$", (ROOT / "deploy/Dockerfile").read_text(), re.M)
    for template in templates():
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert (security["runAsUser"], security["runAsGroup"]) == (int(user[1]), int(user[2]))
        assert security["fsGroup"] == int(user[2])  # reads the key
        security = container(template)["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        # The scripts write there, and nowhere else.
        mounts = {mount["mountPath"]: mount["name"]
                  for mount in container(template)["volumeMounts"]}
        memory, = (volume for volume in pod["volumes"] if volume["name"] == mounts["/dev/shm"])
        assert memory["emptyDir"]["medium"] == "Memory" and memory["emptyDir"]["sizeLimit"]


def test_the_image_has_the_scripts_and_their_port():
    image = (ROOT / "deploy/Dockerfile").read_text()
    assert f"COPY deploy/ranks {SCRIPTS.rstrip('/')}\n" in image
    assert "MOESERVE_SSH_PORT:-2222" in (ROOT / "deploy/ranks/ssh.sh").read_text()
    for template in templates():
        script, = container(template)["command"]
        assert (ROOT / "deploy/ranks" / script.removeprefix(SCRIPTS)).exists()
        if script.endswith("worker.sh"):
            assert [port["containerPort"] for port in container(template)["ports"]] == [2222]
            assert container(template)["readinessProbe"]["tcpSocket"] == {"port": "ssh"}


@pytest.mark.parametrize("name", RANKS)
def test_the_key_is_where_the_scripts_look(name):
    default = re.search(r"MOESERVE_SSH_KEY:-([^}]*)}",
                        (ROOT / "deploy/ranks/ssh.sh").read_text())[1]
    for pod in roles(name).values():
        volume, = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "ssh")
        assert volume["secret"]["secretName"] == values(name)["ranks"]["sshKeysSecret"]
        assert volume["secret"]["defaultMode"] == 0o440
        mount, = (mount for mount in container(pod)["volumeMounts"] if mount["name"] == "ssh")
        assert f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}" == default


@pytest.mark.parametrize("name", RANKS)
def test_the_image_is_the_one_for_ranks(name):
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    tag = values(name)["image"]["tag"] or f"{chart['appVersion']}-ranks"
    for pod in roles(name).values():
        assert container(pod)["image"] == f"moeserve:{tag}"
    assert Workload(rendered(name)).config["ranks"] == "mpi"


@pytest.mark.parametrize("name", RANKS)
def test_only_leaders_get_requests(name):
    objects = rendered(name)
    labels = {role: labels_in_group(name, role, 0) for role in ("leader", "worker")}
    selectors = [{"matchLabels": service["spec"]["selector"]}
                 for service in of_kind(objects, "Service")]
    selectors += [thing["spec"]["selector"]
                  for thing in of_kind(objects, "PodDisruptionBudget", "InferencePool")]
    assert len(selectors) >= 3
    for selector in selectors:
        assert matches(selector, labels["leader"]) and not matches(selector, labels["worker"])
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"] == {
            "apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet",
            "name": one(objects, "LeaderWorkerSet")["metadata"]["name"]}


def allows(policy, direction, peer):
    """Returns the ports at which a NetworkPolicy allows traffic with a peer of these labels."""
    ports = []
    for rule in policy["spec"].get(direction, []):
        peers = rule.get("from" if direction == "ingress" else "to")
        if peers is None or any(set(each) == {"podSelector"} and matches(each["podSelector"], peer)
                                for each in peers):
            ports += [port["port"] for port in rule.get("ports", [{"port": "all"}])]
    return ports


@pytest.mark.parametrize("name", RANKS)
def test_groups_are_open_inside_and_closed_to_others(name):
    policies = of_kind(rendered(name), "NetworkPolicy")
    assert all(policy["spec"]["policyTypes"] == ["Ingress", "Egress"] for policy in policies)

    def opened(direction, pod, peer):
        return [port for policy in policies if matches(policy["spec"]["podSelector"], pod)
                for port in allows(policy, direction, peer)]

    pods = [(role, index) for role in ("leader", "worker") for index in (0, 1)]
    of_clients = {"http", "grpc"} if not values(name)["networkPolicy"]["from"] else set()
    for role, index in pods:
        pod = labels_in_group(name, role, index)
        # Without a policy that selects it, a pod would be open.
        assert any(matches(policy["spec"]["podSelector"], pod) for policy in policies)
        for other_role, other_index in pods:
            peer = labels_in_group(name, other_role, other_index)
            for direction in ("ingress", "egress"):
                assert ("all" in opened(direction, pod, peer)) == (index == other_index)
        assert set(opened("ingress", pod, {})) == (of_clients if role == "leader" else set())
        assert {53} <= set(opened("egress", pod, {})) <= {53, 443, "4318", 4318}


@pytest.mark.parametrize("name", RANKS)
def test_every_group_has_a_policy(name):
    given = values(name)
    count = (given["autoscaling"]["maxReplicas"] if given["autoscaling"]["enabled"] else
             given["replicas"])
    surge = given["rollingUpdate"]["maxSurge"]
    count += math.ceil(count * int(surge[:-1]) / 100) if isinstance(surge, str) else surge
    policies = of_kind(rendered(name), "NetworkPolicy")
    for index in range(count):
        assert sum(matches(policy["spec"]["podSelector"], labels_in_group(name, "worker", index))
                   for policy in policies) == 2
    assert len(policies) == 2 + count


@pytest.mark.parametrize("name", RANKS)
def test_a_lost_group_is_noticed_soon(name):
    probes = Workload(rendered(name)).probes
    liveness = probes["liveness"]
    assert liveness["httpGet"]["path"] == "/health/live"
    assert liveness["failureThreshold"] == values(name)["ranks"]["livenessFailures"]
    if name == "ranks":
        assert (liveness["failureThreshold"], liveness["periodSeconds"]) == (2, 5)
    sleep = values(name)["preStopSleepSeconds"]
    assert sleep < liveness["terminationGracePeriodSeconds"] <= sleep + 5
    assert "livenessProbe" not in container(roles(name)["worker"])


def test_ranks_get_the_variables_of_the_values():
    environment = Workload(rendered("ranks-tls")).environment
    assert environment["MOESERVE_RANKS_EXPORT"]["value"] == "A OMPI_MCA_btl_tcp_if_include"
    assert environment["A"]["value"] == "b"
    assert "MOESERVE_RANKS_EXPORT" in (ROOT / "deploy/ranks/leader.sh").read_text()


def test_a_group_can_have_nodes_of_its_own():
    for name in RANKS:
        annotations = one(rendered(name), "LeaderWorkerSet")["metadata"].get("annotations", {})
        topology = values(name)["ranks"]["exclusiveTopology"]
        assert annotations == (
            {"leaderworkerset.sigs.k8s.io/exclusive-topology": topology} if topology else {})


def test_without_ranks_nothing_of_them_is_rendered():
    for name in set(value_sets()) - set(RANKS):
        text = json.dumps(rendered(name))
        assert "leaderworkerset" not in text and "ranks" not in text and "/dev/shm" not in text


def test_the_job_is_what_its_scripts_read():
    replicas = JOB["spec"]["mpiReplicaSpecs"]
    for replica in replicas.values():
        environment = {entry["name"]: entry["value"]
                       for entry in container(replica["template"])["env"]}
        # The operator's name for the key, whatever its type.
        assert environment["MOESERVE_SSH_KEY"] == f"{JOB['spec']['sshAuthMountPath']}/id_rsa"
        variables = "".join((ROOT / "deploy/ranks" / name).read_text()
                            for name in ("ssh.sh", "leader.sh"))
        assert all(name in variables for name in environment)
    assert JOB["spec"]["slotsPerWorker"] == 1
    version = one(rendered("default"), "Deployment")["metadata"]["labels"]["app.kubernetes.io/version"]
    for template in (replica["template"] for replica in replicas.values()):
        assert container(template)["image"] == f"moeserve:{version}-ranks"
    assert JOB["metadata"]["namespace"] == generate.NAMESPACE

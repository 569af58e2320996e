"""Runs the program with the arguments, environment and files of the pods that the chart in
deploy/helm/moeserve renders, and checks that what other objects name is there: probes, ports,
metrics."""

import importlib.util
import json
import re
import shutil
import signal
import ssl
import subprocess
import urllib.error
import urllib.request

import grpc
import pytest
import yaml

from kubernetes_chart import (CHART, ROOT, Workload, config_map, generate, of_kind, one, rendered,
                              value_sets)

SETS = list(value_sets())
MODEL = ROOT / "deploy/models/mh-moe"
KEY = "a-key-of-sufficient-length-0123456789"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}

_spec = importlib.util.spec_from_file_location("clients", ROOT / "tests/clients/conftest.py")
clients = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(clients)


def make_certificate(folder):
    """Writes tls.crt and tls.key, a certificate for localhost that is its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", folder / "tls.key", "-out", folder / "tls.crt", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True)


class Pod:
    """The server's container of a rendered pod, with its files in a folder of the test.

    Paths of the container are replaced by those in the folder, and models by a small one. The option
    `device` is dropped, because the program may be built without CUDA.
    """

    def __init__(self, objects, folder):
        self.folder = folder
        self.workload = Workload(objects)
        values = config_map(objects)["data"]
        for volume in self.workload.pod["volumes"]:
            if "configMap" in volume:
                self._write(volume["name"], values)
            elif "secret" in volume:
                self._write_secret(volume["name"])
        mounts = {mount["mountPath"]: folder / mount["name"]
                  for mount in self.workload.container["volumeMounts"]}
        self._mounts = {path: target for path, target in mounts.items() if target.exists()}
        # The longest names first.
        self._models = sorted({source.split("=", 1)[1] for source in self.workload.config["model"]},
                              key=len, reverse=True)
        config = folder / "config/moeserve.yaml"
        text = self._here(config.read_text())
        config.write_text(re.sub(r"^device: .*\n", "", text, flags=re.M))

    def _write(self, volume, files):
        (self.folder / volume).mkdir()
        for name, text in files.items():
            (self.folder / volume / name).write_text(text)

    def _write_secret(self, volume):
        if volume == "keys":
            self._write(volume, {"keys": KEY + "\n"})
            (self.folder / volume / "keys").chmod(0o440)
        elif volume == "tls":
            (self.folder / volume).mkdir()
            make_certificate(self.folder / volume)
        elif volume == "ssh":
            self._write(volume, {"ssh-privatekey": ""})  # for the scripts, which are not run here
        elif volume == "client-ca":
            (self.folder / volume).mkdir()
            # Volumes are in this order: the server's certificate is there.
            shutil.copy(self.folder / "tls/tls.crt", self.folder / volume / "ca.crt")
        else:
            raise AssertionError(f"no contents for the volume {volume}")

    def _here(self, text):
        for path in self._models:
            text = re.sub(rf"=({re.escape(path)})$", f"={MODEL}", text, flags=re.M)
        for path, target in self._mounts.items():
            text = text.replace(path, str(target))
        return text

    def environment(self):
        out = {}
        for name, entry in self.workload.environment.items():
            if "value" in entry:
                out[name] = self._here(entry["value"])
            elif "resourceFieldRef" in entry["valueFrom"]:
                field = entry["valueFrom"]["resourceFieldRef"]
                assert field["resource"] == "limits.cpu" and field["divisor"] == "1"
                out[name] = self.workload.container["resources"]["limits"]["cpu"]
            elif "secretKeyRef" in entry["valueFrom"]:
                out[name] = "authorization=token"
            else:
                raise AssertionError(entry)
        return out

    def arguments(self):
        environment = self.environment()
        return [re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], self._here(argument))
                for argument in self.workload.container["args"]]

    def run(self, arguments, **overrides):
        """Runs the program to its end in the pod's environment."""
        return subprocess.run([clients.binary(), *arguments], env=self.environment() | overrides,
                              capture_output=True, text=True, timeout=60)


class RunningPod(Pod):
    """A pod whose server runs on free ports of loopback."""

    def __enter__(self):
        environment = self.environment() | {"MOESERVE_HTTP": "127.0.0.1:0",
                                            "MOESERVE_GRPC": "127.0.0.1:0"}
        self._process = subprocess.Popen([clients.binary(), *self.arguments()], env=environment,
                                         stdout=subprocess.PIPE, text=True)
        addresses = {}
        while len(addresses) < 2:
            line = self._process.stdout.readline()
            assert line, f"the server ended with status {self._process.wait()}"
            kind, _, address = line.strip().partition(" listening on ")
            addresses[kind] = address
        self.http, self.grpc = addresses["http"], addresses["grpc"]
        return self

    def __exit__(self, *_):
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(timeout=60) == 0
        self._process.stdout.close()

    def get(self, path, scheme="HTTP", headers=None, body=None):
        """Returns (status, text), as a kubelet would without checking certificates."""
        context = None
        if scheme == "HTTPS":
            context = ssl.create_default_context(cafile=self.folder / "tls/tls.crt")
        request = urllib.request.Request(f"{scheme.lower()}://{self.http}{path}", body,
                                         {"Content-Type": "application/json"} | (headers or {}))
        try:
            with urllib.request.urlopen(request, context=context, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("name", SETS)
def test_the_server_accepts_its_options(name, tmp_path):
    pod = Pod(rendered(name), tmp_path)
    serve, *options = pod.arguments()
    assert serve == "serve"
    done = pod.run(["config", "show", *options])
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    # The addresses of the environment count, and every option of the file does.
    assert shown["http"] == pod.environment()["MOESERVE_HTTP"]
    assert shown["grpc"] == pod.environment()["MOESERVE_GRPC"]
    for option, value in yaml.safe_load((tmp_path / "config/moeserve.yaml").read_text()).items():
        listed = shown[option] if isinstance(shown[option], list) else [shown[option]]
        assert listed == (value if isinstance(value, list) else [value]), option
    if "MOESERVE_CPUS" in pod.environment():
        assert str(shown["threads"]) == pod.environment()["MOESERVE_CPUS"]


def test_the_file_alone_is_checked(tmp_path):
    pod = Pod(rendered("full"), tmp_path)
    file = tmp_path / "config/moeserve.yaml"
    assert pod.run(["config", "check", file]).returncode == 0
    file.write_text(file.read_text() + "drain-time: 1\n")
    done = pod.run(["config", "check", file])
    assert done.returncode == 1 and "drain-timeout" in done.stderr


def test_options_that_the_chart_sets_exist():
    """Values may not name these options. A misspelled name would not be noticed otherwise."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    managed = schema["properties"]["config"]["propertyNames"]["not"]["enum"]
    help = subprocess.run([clients.binary(), "serve", "--help"], capture_output=True, text=True)
    for option in managed:
        assert re.search(rf"--{option}\b", help.stdout), option


@pytest.mark.parametrize("name", ["default", "tls", "gateway", "full"])
def test_the_server_answers_what_the_objects_name(name, tmp_path):
    objects = rendered(name)
    with RunningPod(objects, tmp_path) as pod:
        for probe in pod.workload.probes.values():
            get = probe["httpGet"]
            assert pod.get(get["path"], get["scheme"])[0] == 200
        assert pod.run(["health"], MOESERVE_HTTP=pod.http).returncode == 0
        scheme = pod.workload.probes["readiness"]["httpGet"]["scheme"]
        assert pod.get("/v1/models", scheme)[0] == (403 if name == "tls" else 401)
        metrics = pod.get("/metrics", scheme)[1]
        names = set(re.findall(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{| )", metrics, re.M))
        for monitor in of_kind(objects, "ServiceMonitor"):
            endpoint, = monitor["spec"]["endpoints"]
            assert pod.get(endpoint["path"], endpoint["scheme"].upper())[0] == 200
        for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
            metric, = scaler["spec"]["metrics"]
            assert metric["pods"]["metric"]["name"] in names
        for rule in of_kind(objects, "PrometheusRule"):
            used = set(re.findall(r"\bmoeserve_[a-z0-9_]+", json.dumps(
                [each["expr"] for group in rule["spec"]["groups"] for each in group["rules"]])))
            assert len(used) > 5 and used <= names
        if scheme == "HTTP":
            check_serving(pod)
        if of_kind(objects, "InferencePool"):
            check_endpoint_picker(pod, metrics)


def check_serving(pod):
    """Sends a request over HTTP, and asks for the health over gRPC."""
    for source in pod.workload.config["model"]:
        body = json.dumps({"model": source.split("=")[0], "prompt": "In", "max_tokens": 2}).encode()
        assert pod.get("/v1/completions", headers=AUTHORIZED, body=body)[0] == 200
    with grpc.insecure_channel(pod.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=30) == b"\x08\x01"  # status: SERVING


def check_endpoint_picker(pod, metrics):
    """Checks the metrics by which an endpoint picker chooses, and the labels that it reads."""
    sample = r"^{}\{{([^}}]*)\}} ([0-9.e+-]+)$"
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running",
                 "vllm:kv_cache_usage_perc"):
        found = re.findall(sample.format(name), metrics, re.M)
        # Pickers take one sample, so a pool has one model.
        assert len(found) == 1 and 0 <= float(found[0][1]) <= 1
        assert f"# TYPE {name} gauge" in metrics
    labels, = re.findall(sample.format("vllm:cache_config_info"), metrics, re.M)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', labels[0]))
    assert int(labels["block_size"]) > 0 and int(labels["num_gpu_blocks"]) > 0


def test_routes_lead_to_the_api_and_not_to_metrics():
    done = subprocess.run([clients.binary(), "serve", "--model", MODEL, "--print-routes"],
                          capture_output=True, text=True, check=True)
    paths = [line.split()[1] for line in done.stdout.splitlines() if not line.startswith("RPC")]
    route = one(rendered("gateway"), "HTTPRoute")
    prefixes = [match["path"]["value"] for match in route["spec"]["rules"][0]["matches"]]
    assert len(prefixes) == 16

    def covers(prefix, path):
        return path == prefix or path.startswith(prefix + "/")

    for prefix in prefixes:
        assert any(covers(prefix, path) for path in paths), prefix
    outside = {path for path in paths if not any(covers(prefix, path) for prefix in prefixes)}
    assert outside == {"/", "/dashboard/*", "/health", "/health/live", "/health/ready", "/metrics",
                       "/ping", "/server_info", "/version"}


def test_without_vllm_names_there_are_no_metrics_for_a_picker(tmp_path):
    with RunningPod(rendered("default"), tmp_path) as pod:
        assert "vllm:" not in pod.get("/metrics")[1]


def test_keys_are_reloaded_in_the_mounted_folder(tmp_path):
    with RunningPod(rendered("default"), tmp_path) as pod:
        assert pod.get("/v1/models", headers=AUTHORIZED)[0] == 200
        (tmp_path / "keys/new").write_text("another-key-of-sufficient-length-0123\n")
        (tmp_path / "keys/new").replace(tmp_path / "keys/keys")
        assert clients.wait_for(lambda: pod.get("/v1/models", headers=AUTHORIZED)[0] == 401,
                                seconds=20)


def test_the_rule_of_the_adapter_is_for_the_metric_of_the_autoscaler(tmp_path):
    """README.md documents a rule for prometheus-adapter."""
    text = (CHART / "README.md").read_text()
    block, = re.findall(r"^    rules:\n(?:^    .*\n)+", text, re.M)
    rule, = yaml.safe_load(block)["rules"]["custom"]
    scaler = one(rendered("full"), "HorizontalPodAutoscaler")
    metric = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert rule["seriesQuery"].startswith(metric + "{")
    assert rule.get("name", {}).get("as", metric) == metric
    # The adapter fills in the names of the series and its labels.
    query = rule["metricsQuery"].replace("<<.Series>>", metric)
    query = query.replace("<<.LabelMatchers>>", 'pod="a"').replace("<<.GroupBy>>", "pod")
    assert query == f'sum({metric}{{pod="a"}}) by (pod)'
    assert generate.load_values(CHART / "values.yaml")["autoscaling"]["metric"] == metric


def test_clients_of_grpc_balance_over_the_pods(tmp_path):
    """The headless Service resolves to all pods; here, a list of addresses stands for it."""
    def calls(pod):
        sample = 'moeserve_grpc_requests_total{method="GetModelInfo",code="OK"} '
        found, = re.findall(rf"^{re.escape(sample)}(\d+)$", pod.get("/metrics")[1], re.M)
        return int(found)

    policy = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with RunningPod(rendered("default"), tmp_path / "a") as first, \
            RunningPod(rendered("default"), tmp_path / "b") as second:
        target = f"ipv4:{first.grpc},{second.grpc}"
        with grpc.insecure_channel(target, [("grpc.service_config", policy)]) as channel:
            call = channel.unary_unary("/moeserve.v1.Inference/GetModelInfo")

            def both_are_reached():
                call(b"", timeout=30, metadata=[("authorization", f"Bearer {KEY}")])
                return min(calls(first), calls(second)) >= 5

            assert clients.wait_for(both_are_reached, seconds=20)

"""Runs Prometheus, which scrapes servers under traffic. Every query of the Grafana dashboard must
return data, and Prometheus must be able to evaluate every rule of alerts.yml.

Needs the program `prometheus` (Debian's package of that name) in PATH.
"""

import concurrent.futures
import importlib.util
import json
import math
import pathlib
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import grpc
import pytest
import yaml

import test_files

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
# The values that Grafana substitutes for its variables.
VARIABLES = {"__rate_interval": "10s", "instance": ".+", "model": "test-model", "block": ".+"}
PATIENCE = 20  # seconds until all expected data must exist


class Traffic:
    """Sends varied requests to several servers until stopped."""

    def __init__(self, clients, servers):
        self._clients = clients
        self._stop = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor()
        self._loops = [self._pool.submit(self._run, server, loop) for server in servers
                       for loop in (self._complete, self._complete, self._call)]

    def stop(self):
        self._stop.set()
        for loop in self._loops:
            loop.result()
        self._pool.shutdown()

    def _run(self, server, loop):
        count = 0
        while not self._stop.is_set():
            loop(server, count)
            count += 1
            time.sleep(0.02)

    def _complete(self, server, count):
        body = {"prompt": "In the beginning God created the heaven and the earth " * 3,
                "max_tokens": 8 + count % 16, "n": 1 + count % 2}
        self._clients.post(server, "/v1/completions", body)
        if count % 10 == 0:
            with pytest.raises(urllib.error.HTTPError):
                self._clients.post(server, "/v1/completions", {"prompt": 7})

    def _call(self, server, count):
        with grpc.insecure_channel(server.grpc) as channel:
            channel.unary_unary("/moeserve.v1.Inference/GetModelInfo")(b"", timeout=30)


class Prometheus:
    """Runs Prometheus and queries its HTTP API."""

    def __init__(self, program, folder, targets):
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
        config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = "127.0.0.1:%d" % probe.getsockname()[1]
        self._log = open(folder / "log", "w+")
        self._process = subprocess.Popen(
            [program, f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={self._address}"],
            stdout=self._log, stderr=subprocess.STDOUT)

    def stop(self):
        self._process.terminate()
        self._process.wait(timeout=30)
        self._log.close()

    def ready(self):
        assert self._process.poll() is None, pathlib.Path(self._log.name).read_text()
        try:
            return urllib.request.urlopen(f"http://{self._address}/-/ready").status == 200
        except OSError:
            return False

    def get(self, path, **parameters):
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"http://{self._address}/api/v1/{path}?{query}") as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{parameters}: {error.read().decode()}")

    def values(self, expression):
        """Returns the current values of an expression, without NaN."""
        result = self.get("query", query=expression)["result"]
        numbers = [float(sample["value"][1]) for sample in result]
        return [number for number in numbers if not math.isnan(number)]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """Runs a Prometheus that scrapes two servers under traffic. One server exports the metrics that
    are used for models with thousands of experts."""
    program = shutil.which("prometheus")
    if not program:
        pytest.skip("prometheus (Debian's package of that name) is not here")
    spec = importlib.util.spec_from_file_location("clients", ROOT / "tests/clients/conftest.py")
    clients = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(clients)
    servers = [clients.start_server()]
    traffic = running = None
    try:
        servers.append(clients.start_server("--moe-metrics=top"))
        traffic = Traffic(clients, servers)
        running = Prometheus(program, tmp_path_factory.mktemp("prometheus"),
                             [server.http for server in servers])
        assert clients.wait_for(running.ready, seconds=30)
        yield running
    finally:
        if running:
            running.stop()
        if traffic:
            traffic.stop()
        for server in servers:
            clients.stop_server(server)


def eventually(check):
    """Waits until `check`, which returns a list of missing items, returns an empty list."""
    end = time.monotonic() + PATIENCE
    while (missing := check()) and time.monotonic() < end:
        time.sleep(0.5)
    assert not missing


def dashboard_queries():
    """Yields (panel title, expression) as Grafana would send the expression."""
    for panel in test_files.panels():
        # A panel that is repeated per layer queries one layer, other panels query all layers.
        layer = "0" if "$layer" in panel["title"] else ".+"
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in (*VARIABLES.items(), ("layer", layer)):
                expression = expression.replace(f"${name}", value)
            assert "$" not in expression
            yield panel["title"], expression


def test_every_panel_has_data(prometheus):
    queries = list(dashboard_queries())
    assert len(queries) > 30
    eventually(lambda: [query for query in queries if not prometheus.values(query[1])])


def test_every_variable_has_values(prometheus):
    dashboard = json.loads(test_files.DASHBOARD.read_text())
    for variable in dashboard["templating"]["list"]:
        if variable["type"] != "query":
            continue
        metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
        for name, value in VARIABLES.items():
            metric = metric.replace(f"${name}", value)
        eventually(lambda: [] if prometheus.get(f"label/{label}/values", **{"match[]": metric})
                   else [(variable["name"], metric)])


def test_every_alert_can_be_evaluated(prometheus):
    def rules():
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    assert rules()
    eventually(lambda: [rule["name"] for rule in rules() if rule["health"] == "unknown"])
    for rule in rules():
        assert rule["health"] == "ok", (rule["name"], rule.get("lastError"))
        assert rule["state"] != "firing", rule["name"]


def test_every_selector_of_an_alert_has_data(prometheus):
    selectors = set()
    for group in test_files.load_yaml(DEPLOY / "alerts.yml")["groups"]:
        for rule in group["rules"]:
            found = re.findall(r"\b(?:moeserve_\w+|up)\b(?:\{[^}]*\})?", rule["expr"])
            assert found, rule["alert"]
            selectors.update(found)
    eventually(lambda: [selector for selector in selectors if not prometheus.values(selector)])


def test_scrapes_succeed_quickly(prometheus):
    eventually(lambda: [] if prometheus.values("min(up)") == [1.0] else ["up"])
    # The bounds are loose, because other processes may use the machine.
    slowest, = prometheus.values("max(max_over_time(scrape_duration_seconds[1m]))")
    assert slowest < 1.0
    largest, = prometheus.values("max(scrape_samples_scraped)")
    assert 500 < largest < 10_000

"""Tests that the files in deploy/ agree with each other, the source tree and a running server.

These tests neither build nor run an image; deploy/test-image.sh does.
"""

import fnmatch
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import urllib.request

import grpc
import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/moeserve.json"

# The server exports these metrics only for models with thousands of experts, in place of a series
# per expert.
ONLY_OF_LARGE_MODELS = {"moeserve_moe_hot_expert_share_ratio"}
# Prometheus adds these labels and series.
OWN_LABELS = {"instance", "job"}
OWN_SERIES = {"up"}

METRIC = re.compile(r"\b((?:moeserve|process)_[a-z0-9_]+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'([a-z_]+)\s*(=~|!=|!~|=)\s*"([^"]*)"')


def load_yaml(path):
    return yaml.safe_load(path.read_text())


def panels():
    return [p for p in json.loads(DASHBOARD.read_text())["panels"] if p["type"] != "row"]


def expressions():
    """Yields every PromQL expression of the dashboard and the alerts, with its location."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"]
    for group in load_yaml(DEPLOY / "alerts.yml")["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


@pytest.fixture(scope="module")
def served():
    """Returns {name: [labels]} for all samples of a server after HTTP and gRPC calls."""
    spec = importlib.util.spec_from_file_location("clients", ROOT / "tests/clients/conftest.py")
    clients = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(clients)
    # Only a model with two stacks has the label `stack`.
    server = clients.start_server("--model", str(ROOT / "deploy/models/moa-translator"), name=None,
                                  folder=ROOT / "deploy/models/mh-moe")
    try:
        clients.post(server, "/v1/completions", {"prompt": "In the beginning", "max_tokens": 4})
        with grpc.insecure_channel(server.grpc) as channel:
            channel.unary_unary("/moeserve.v1.Inference/GetModelInfo")(b"", timeout=30)
        # The server counts a gRPC call when the call has ended, which can be after the client has
        # received the response.
        def scrape():
            with urllib.request.urlopen(f"{server.url}/metrics") as answer:
                return answer.read().decode()
        assert clients.wait_for(lambda: "moeserve_grpc_requests_total{" in scrape())
        text = scrape()
    finally:
        clients.stop_server(server)
    samples = {}
    for line in text.splitlines():
        match = re.match(r"([a-z0-9_]+)(?:\{(.*)\})? ", line)
        if match and not line.startswith("#"):
            labels = dict(re.findall(r'([a-z_]+)="([^"]*)"', match[2] or ""))
            samples.setdefault(match[1], []).append(labels)
    return samples


def metric_uses(expression):
    """Returns (name, [(label, operator, value)]) for each metric in an expression."""
    # The prefix in METRIC distinguishes metrics from functions and durations.
    return [(m[1], MATCHER.findall(m[2] or "")) for m in METRIC.finditer(expression)]


def test_every_metric_exists(served):
    for where, expression in expressions():
        uses = metric_uses(expression)
        assert uses or OWN_SERIES & set(re.findall(r"[a-z_]+", expression)), where
        for name, _ in uses:
            if name not in ONLY_OF_LARGE_MODELS:
                assert name in served, f"{where}: no server has {name}"


def test_conditional_metrics_are_in_the_source(served):
    source = (ROOT / "server/metrics/expert_metrics.cc").read_text()
    for name in ONLY_OF_LARGE_MODELS:
        assert name not in served, f"{name} is no exception"
        assert f'"{name.removeprefix("moeserve_")}"' in source


def test_every_label_exists(served):
    for where, expression in expressions():
        uses = [use for use in metric_uses(expression) if use[0] in served]
        for name, matchers in uses:
            for label, operator, value in matchers:
                if label in OWN_LABELS:
                    continue
                known = {sample[label] for sample in served[name] if label in sample}
                assert known, f"{where}: {name} has no label {label}"
                # Status codes that have not occurred have no samples.
                if "$" not in value and label != "code":
                    wanted = value.split("|") if operator == "=~" else [value]
                    assert set(wanted) <= known, f"{where}: {name} has no {label} {value}"
        for group in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression):
            for label in re.findall(r"[a-z_]+", group):
                if label in OWN_LABELS:
                    continue
                if uses:
                    assert any(label in s for name, _ in uses for s in served[name]), (
                        f"{where}: nothing has a label {label}")


def test_legends_name_labels_that_are_kept():
    for panel in panels():
        for target in panel["targets"]:
            kept = re.findall(r"\bby\s*\(([^)]*)\)", target["expr"])
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert not kept or any(label in group for group in kept), panel["title"]


def test_dashboard_is_well_formed():
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    cells = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in cells, f"{panel['title']} covers another panel"
                cells.add((x, y))
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for where, expression in expressions():
        used = set(re.findall(r"\$(\w+)", expression)) - {"__rate_interval"}
        assert used <= variables, where
    source = load_yaml(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")
    assert source["datasources"][0]["type"] == "prometheus"


def test_alerts_say_what_happened():
    names = set()
    for group in load_yaml(DEPLOY / "alerts.yml")["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]
            names.add(rule["alert"])
    assert len(names) == sum(1 for where, _ in expressions() if where.startswith("alert "))


def dockerfile():
    """Returns (instruction, rest) for each instruction, with continuation lines joined."""
    text = (DEPLOY / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    return [line.split(None, 1) for line in text.splitlines() if line.strip()]


def copied_paths():
    for instruction, rest in dockerfile():
        if instruction == "COPY" and "--from" not in rest:
            yield from rest.split()[:-1]


def is_ignored(path):
    """Returns whether .dockerignore excludes `path`: the last matching pattern decides."""
    ignored = False
    parts = pathlib.PurePosixPath(path)
    candidates = [str(parts), *(str(parent) for parent in parts.parents if str(parent) != ".")]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        names = candidates + [parts.name] if "**/" in line else candidates
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            ignored = not line.startswith("!")
    return ignored


def test_what_the_dockerfile_copies_is_there():
    copied = list(copied_paths())
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert not is_ignored(path), f".dockerignore leaves out {path}"
    assert is_ignored("build") and is_ignored(".git") and is_ignored("tests")
    assert is_ignored("deploy/models/dense/model.safetensors")


def test_the_dockerfile_copies_all_that_is_built():
    lists = (ROOT / "CMakeLists.txt").read_text()
    needed = set(re.findall(r"add_subdirectory\((\w+)\)", lists)) - {"tests"}
    assert needed <= set(copied_paths())
    scripts = re.findall(r"\bdeploy/\w+\.sh", (DEPLOY / "Dockerfile").read_text())
    assert set(scripts) <= set(copied_paths())


def test_image_settings():
    """Checks the last value of each instruction; stages after `runtime` must not change it."""
    settings = {instruction: rest for instruction, rest in dockerfile()}
    assert settings["USER"].split(":")[0].isdigit() and settings["USER"] != "0"
    assert json.loads(settings["ENTRYPOINT"]) == ["moeserve"]
    assert settings["HEALTHCHECK"].endswith('CMD ["moeserve", "health"]')
    assert "CMD-SHELL" not in settings["HEALTHCHECK"] and settings["STOPSIGNAL"] == "SIGTERM"
    # Stages with other packages install them as root, and none stays root.
    users = [rest for instruction, rest in dockerfile() if instruction in ("FROM", "USER")]
    for user, following in zip(users, [*users[1:], ""]):
        assert user != "0:0" or following == settings["USER"]
    last = [rest.split()[-1] for instruction, rest in dockerfile() if instruction == "FROM"][-1]
    assert last == "cpu"


def test_the_image_for_ranks_has_what_its_scripts_need():
    text = (DEPLOY / "Dockerfile").read_text()
    stage = re.search(r"^FROM runtime AS ranks\n(.*?)(?=^FROM )", text, re.M | re.S)[1]
    packages = {"mpirun": "openmpi-bin", "ssh": "openssh-client", "/usr/sbin/sshd": "openssh-server"}
    scripts = "".join(path.read_text() for path in (DEPLOY / "ranks").glob("*.sh"))
    for program, package in packages.items():
        assert program in scripts and package in stage
    # Beside the program, where it looks for it, and where the chart looks for the scripts.
    assert "/usr/local/lib/moeserve/" in stage and "/usr/local/bin/moeserve" in text
    assert "COPY deploy/ranks /usr/local/lib/moeserve/ranks" in stage
    for script in ("leader.sh", "worker.sh"):
        assert (DEPLOY / "ranks" / script).stat().st_mode & 0o111 == 0o111
    # Host keys of the package would be the same in all containers.
    assert "/etc/ssh/ssh_host_*" in stage


def test_image_labels():
    labels = dict(re.findall(r'org\.opencontainers\.image\.([a-z.]+)="([^"]*)"',
                             next(rest for name, rest in dockerfile() if name == "LABEL")))
    assert set(labels) == {"title", "description", "version", "revision", "created", "source",
                           "licenses", "base.name", "base.digest"}
    arguments = dict(rest.split("=", 1) for name, rest in dockerfile() if name == "ARG")
    for value in labels.values():
        assert set(re.findall(r"\$\{(\w+)\}", value)) <= set(arguments)
    # Without arguments, the version is that of the sources and nothing depends on the clock.
    version = re.search(r"project\(moeserve VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    assert arguments["VERSION"] == version[1]
    assert arguments["CREATED"] == "1970-01-01T00:00:00Z"
    assert "date" not in {word for _, rest in dockerfile() for word in rest.split()}


def test_compose():
    compose = load_yaml(DEPLOY / "compose.yaml")
    services = compose["services"]
    server = services["server"]
    build = server["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).exists()
    stages = [rest.split()[-1] for instruction, rest in dockerfile() if instruction == "FROM"]
    assert build["target"] in stages
    assert server["read_only"] is True and server["cap_drop"] == ["ALL"]
    for name, service in services.items():
        assert "no-new-privileges:true" in service["security_opt"], name
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), f"{name} opens {port} to everybody"
        for volume in service["volumes"]:
            host = re.sub(r"^\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
            if host.startswith("."):
                assert (DEPLOY / host).exists(), f"{name}: {host}"
            else:
                assert host in compose["volumes"], f"{name}: {host}"


def test_prometheus_scrapes_the_server():
    compose = load_yaml(DEPLOY / "compose.yaml")
    prometheus = load_yaml(DEPLOY / "prometheus.yml")
    target, = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    service, port = target.split(":")
    assert service in compose["services"]
    listens = next(rest for instruction, rest in dockerfile() if instruction == "ENV")
    assert f"MOESERVE_HTTP=0.0.0.0:{port}" in listens
    mounted = " ".join(compose["services"]["prometheus"]["volumes"])
    for rules in prometheus["rule_files"]:
        assert (DEPLOY / rules).exists()
        assert f"/etc/prometheus/{rules}:" in mounted
    # An alert selects the job by its name.
    assert 'job="moeserve"' in (DEPLOY / "alerts.yml").read_text()
    assert prometheus["scrape_configs"][0]["job_name"] == "moeserve"


def test_grafana_finds_its_dashboard():
    mounted = {volume.split(":")[1]: volume.split(":")[0]
               for volume in load_yaml(DEPLOY / "compose.yaml")["services"]["grafana"]["volumes"]}
    provider, = load_yaml(DEPLOY / "grafana/provisioning/dashboards/moeserve.yaml")["providers"]
    folder = DEPLOY / mounted[provider["options"]["path"]]
    assert DASHBOARD in [path.resolve() for path in folder.glob("*.json")]


def test_alerts_fire_when_they_should():
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool (of Debian's package prometheus) is not here")
    done = subprocess.run([promtool, "test", "rules", ROOT / "tests/deploy/alerts_test.yml"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

#!/usr/bin/env python3
"""Runs the pod of base/deployment.yaml with podman, as far as podman knows Kubernetes.

    deploy/kubernetes/test_pod.py IMAGE [MODEL]

IMAGE is a local image and MODEL a checkpoint folder (default: deploy/models/mh-moe). The pod gets its
arguments, files, volumes, user and confinement from the manifests, and a Secret with a key that this
script makes. It uses the machine's network on free ports. Not tested: probes, hooks, resources and
ports, which need a cluster. Needs podman and PyYAML; exits with status 1 and a message if a check
fails.
"""

import base64
import json
import os
import pathlib
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import yaml

FOLDER = pathlib.Path(__file__).resolve().parent
# podman makes volumes with these names, which must not be somebody else's.
SECRET = f"moeserve-test-keys-{os.getpid()}"
CONFIG = f"moeserve-test-config-{os.getpid()}"
POD = f"moeserve-test-{os.getpid()}"
START_SECONDS = 60
STOP_SECONDS = 60


class Failure(Exception):
    """A check failed."""


def check(holds, message):
    if not holds:
        raise Failure(message)


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1:%d" % probe.getsockname()[1]


def load(name):
    return yaml.safe_load((FOLDER / "base" / name).read_text())


def adapted(deployment, image, model, http, grpc):
    """Returns the Deployment with what podman lacks replaced or left out."""
    deployment["metadata"]["name"] = POD
    deployment["spec"]["replicas"] = 1
    pod = deployment["spec"]["template"]["spec"]
    container, = pod["containers"]
    container["image"] = image
    container["imagePullPolicy"] = "Never"
    for field in ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle",
                  "resources"):
        del container[field]
    replaced = {"MOESERVE_HTTP": http, "MOESERVE_GRPC": grpc, "MOESERVE_CPUS": "2"}
    container["env"] = [{"name": entry["name"], "value": replaced[entry["name"]]}
                        for entry in container["env"]]
    # podman expands no variables in arguments.
    container["args"] = [re.sub(r"\$\((\w+)\)", lambda match: replaced[match[1]], argument)
                         for argument in container["args"]]
    for volume in pod["volumes"]:
        if volume["name"] == "models":
            del volume["persistentVolumeClaim"]
            volume["hostPath"] = {"path": str(model), "type": "Directory"}
        elif "secret" in volume:
            volume["secret"] |= {"secretName": SECRET, "optional": False}  # podman needs the default
        elif "configMap" in volume:
            volume["configMap"]["name"] = CONFIG
    return deployment


class Podman:
    """Runs podman. Inside a container, limits cannot be raised and networks cannot be made, so pods
    share this machine's."""

    def __init__(self, folder):
        settings = folder / "containers.conf"
        runtime = 'runtime = "runc"\n' if shutil.which("runc") else ""
        settings.write_text(
            '[containers]\nnetns = "host"\n'
            'default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n'
            f'[engine]\n{runtime}cgroup_manager = "cgroupfs"\n')
        self._environment = os.environ | {"CONTAINERS_CONF": str(settings)}

    def __call__(self, *arguments, may_fail=False):
        done = subprocess.run(["podman", *map(str, arguments)], capture_output=True, text=True,
                              env=self._environment)
        check(may_fail or done.returncode == 0, f"podman {arguments[0]}: {done.stderr}")
        return done.stdout.strip()


def request(http, path, key=None, body=None):
    """Returns (status, text); status 0 if nobody answers."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        with urllib.request.urlopen(urllib.request.Request(
                f"http://{http}{path}", body, headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def check_server(podman, container, http, key):
    end = time.monotonic() + START_SECONDS
    while request(http, "/health/ready")[0] != 200:
        check(time.monotonic() < end, "not ready: " + podman("logs", container, may_fail=True))
        time.sleep(0.1)
    podman("exec", container, "moeserve", "health")
    check(request(http, "/v1/models")[0] == 401, "no key is asked for")
    body = json.dumps({"model": "model", "prompt": "In the beginning", "max_tokens": 4}).encode()
    status, text = request(http, "/v1/completions", key, body)
    check(status == 200, f"a completion: {status} {text}")
    print("ok   ready, 401 without the key, a completion with it")


def check_confinement(podman, container):
    status = podman("exec", container, "cat", "/proc/1/status")
    for line in (r"Uid:\s+10001\s+10001\s+10001\s+10001", r"Gid:\s+10001\s+10001\s+10001\s+10001",
                 r"CapEff:\s+0+", r"CapBnd:\s+0+", r"NoNewPrivs:\s+1"):
        check(re.search(rf"^{line}$", status, re.M), f"process 1 has not {line}:\n{status}")
    check(podman("inspect", "--format", "{{.HostConfig.ReadonlyRootfs}}", container) == "true",
          "the root file system is writable")
    print("ok   user 10001, no capabilities, no new privileges, a read-only root file system")


def run(image, model, folder):
    podman = Podman(folder)
    http, grpc = free_address(), free_address()
    deployment = adapted(load("deployment.yaml"), image, model, http, grpc)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET},
              "data": {"keys": base64.b64encode(secrets.token_hex(24).encode()).decode()}}
    config = load("configmap.yaml")
    config["metadata"]["name"] = CONFIG
    manifests = folder / "manifests.yaml"
    manifests.write_text(yaml.safe_dump_all([secret, config, deployment]))
    try:
        podman("play", "kube", "--network", "host", manifests)
        container, = podman("ps", "--quiet", "--filter", f"name={POD}-pod-0-server").split()
        # podman 4.3 does not decode Secrets, so the key is what the pod sees.
        key = podman("exec", container, "cat", "/etc/moeserve/keys/keys")
        check_server(podman, container, http, key)
        check_confinement(podman, container)
        podman("stop", "--time", STOP_SECONDS, container)
        code = podman("inspect", "--format", "{{.State.ExitCode}}", container)
        check(code == "0", f"exit status {code} after SIGTERM")
        print("ok   exit status 0 after SIGTERM")
    finally:
        podman("play", "kube", "--down", manifests, may_fail=True)
        podman("secret", "rm", SECRET, may_fail=True)
        podman("volume", "rm", SECRET, CONFIG, may_fail=True)


def main():
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    model = pathlib.Path(sys.argv[2] if len(sys.argv) == 3 else FOLDER.parent / "models/mh-moe")
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(sys.argv[1], model.resolve(), pathlib.Path(folder))
    except Failure as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Writes the plain manifests in this folder, and the chart's copies of the alerts and the dashboard.

    deploy/kubernetes/generate.py [--check]

    --check   writes nothing; exits with status 1 and names the files that differ

The manifests are what the chart in deploy/helm/moeserve renders to, without Helm's own labels. They
are rendered by the program `helm` if it is in PATH (or at MOESERVE_HELM), else by the Python
package helm-python-sdk, which contains Helm's library.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import yaml

FOLDER = pathlib.Path(__file__).resolve().parent
CHART = FOLDER.parent / "helm/moeserve"
RELEASE = NAMESPACE = "moeserve"

# The folders with manifests, and the values that they are rendered with.
SETS = {"base": None, "gateway": CHART / "examples/gateway.yaml",
        "monitoring": CHART / "examples/full.yaml"}
# Of a set, only these objects are written: kinds, with the end of the name.
ONLY = {"monitoring": {("ServiceMonitor", ""), ("PrometheusRule", ""), ("ConfigMap", "dashboard")}}
# Files of the chart that are copies, and what they are copies of.
COPIES = {CHART / "files/alerts.yml": FOLDER.parent / "alerts.yml",
          CHART / "files/dashboard.json": FOLDER.parent / "grafana/dashboards/moeserve.json"}
# Labels that are only true of objects that Helm has installed.
HELM_LABELS = re.compile(r"^ *(?:app\.kubernetes\.io/managed-by|helm\.sh/chart): .*\n", re.M)
HEADER = "# Written by deploy/kubernetes/generate.py from the chart in deploy/helm/moeserve.\n"


class RenderError(Exception):
    """The chart refuses the values. The text is Helm's."""


def helm_program():
    """Returns the path of the program `helm`, or None."""
    return os.environ.get("MOESERVE_HELM") or shutil.which("helm")


def helm_library():
    """Returns the module helm_python, or None."""
    try:
        import helm_python
    except ImportError:
        return None
    return helm_python


def render_with_program(program, values):
    """Renders the chart with `values` (a dict) and returns the YAML of all objects."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        done = subprocess.run(
            [program, "template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", file.name],
            capture_output=True, text=True)
    if done.returncode != 0:
        raise RenderError(done.stderr)
    return done.stdout


def render_with_library(library, values):
    """As render_with_program."""
    try:
        with library.Chart.load(CHART) as chart:
            chart.validate_schema(values)
            files = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    except library.HelmError as error:
        raise RenderError(str(error)) from error
    return "\n---\n".join(text for name, text in sorted(files.items()) if name.endswith(".yaml"))


def render(values):
    """Returns the text of each object that the chart renders to with `values` (a dict)."""
    if program := helm_program():
        text = render_with_program(program, values)
    elif library := helm_library():
        text = render_with_library(library, values)
    else:
        sys.exit("neither the program helm nor the Python package helm-python-sdk is here")
    texts = re.split(r"^---$\n?", text, flags=re.M)
    texts = [re.sub(r"^# Source: .*\n", "", text, flags=re.M).strip() + "\n" for text in texts]
    return [text for text in texts if yaml.safe_load(text) is not None]


def load_values(file):
    return {} if file is None else yaml.safe_load(file.read_text())


def manifests(name):
    """Yields (file name, text) for the set of manifests `name`."""
    names = []
    for text in render(load_values(SETS[name])):
        thing = yaml.safe_load(text)
        if "helm.sh/hook" in thing["metadata"].get("annotations", {}):
            continue
        suffix = thing["metadata"]["name"].removeprefix(RELEASE).strip("-")
        if name in ONLY and (thing["kind"], suffix) not in ONLY[name]:
            continue
        file = thing["kind"].lower() + (f"-{suffix}" if suffix else "") + ".yaml"
        names.append(file)
        yield file, HEADER + HELM_LABELS.sub("", text)
    assert len(names) == len(set(names))
    resources = "".join(f"- {file}\n" for file in sorted(names))
    yield "kustomization.yaml", (
        f"{HEADER}apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"namespace: {NAMESPACE}\nresources:\n{resources}")


def wanted():
    """Returns {path: text} of all files that are generated."""
    files = {copy: original.read_text() for copy, original in COPIES.items()}
    for name in SETS:
        files |= {FOLDER / name / file: text for file, text in manifests(name)}
    return files


def differences():
    """Returns the paths of files that are missing, differ or should not be there."""
    files = wanted()
    there = {path for name in SETS for path in (FOLDER / name).glob("*")}
    wrong = [path for path, text in files.items()
             if not path.exists() or path.read_text() != text]
    return sorted(wrong + list(there - set(files)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, name what differs")
    if parser.parse_args().check:
        wrong = differences()
        for path in wrong:
            print(f"{path} is not what the chart renders to; run deploy/kubernetes/generate.py")
        return 1 if wrong else 0
    # The chart renders its copies, so they come first.
    for copy, original in COPIES.items():
        shutil.copyfile(original, copy)
    files = wanted()
    for name in SETS:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Functions that the CPU benchmarks in this folder share: they run `moeserve bench`, compute
medians and print tables."""

import json
import pathlib
import statistics
import subprocess
import tempfile


def bench(program, arguments, timeout=1800):
    """Runs `moeserve bench` once and returns its JSON."""
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        command = [str(program), "bench", "--json", output.name, *map(str, arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=timeout)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-2000:]}")
        return json.loads(pathlib.Path(output.name).read_text())


def cases(report):
    """Returns {name: case} for the cases of a report of `moeserve bench`."""
    return {case["name"]: case for case in report["cases"]}


def summary(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values),
            "runs": list(values)}


def spread(s, digits=1):
    """Formats median and range: "12.3 (11.9-12.8)". """
    return f"{s['median']:.{digits}f} ({s['min']:.{digits}f}-{s['max']:.{digits}f})"


def table(header, rows):
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def read_once(path):
    """Reads a file, or the weight files of a folder, into the page cache."""
    path = pathlib.Path(path)
    names = ("*.safetensors", "*.bin")
    for file in [path] if path.is_file() else sorted(f for n in names for f in path.glob(n)):
        with open(file, "rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass

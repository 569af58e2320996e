"""Runs of `moeserve bench` and their medians, for the scripts beside it."""

import json
import pathlib
import statistics
import subprocess
import tempfile


def bench(program, arguments, timeout=1800):
    """The JSON of one `moeserve bench` run."""
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        command = [str(program), "bench", "--json", output.name, *map(str, arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=timeout)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-2000:]}")
        return json.loads(pathlib.Path(output.name).read_text())


def cases(report):
    """The cases of a report by name."""
    return {case["name"]: case for case in report["cases"]}


def summary(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values),
            "runs": list(values)}


def spread(s, digits=1):
    """"12.3 (11.9-12.8)" """
    return f"{s['median']:.{digits}f} ({s['min']:.{digits}f}-{s['max']:.{digits}f})"


def table(header, rows):
    """A markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def read_once(path):
    """Brings a file, or the files of a folder, into the page cache."""
    path = pathlib.Path(path)
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        with open(file, "rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass

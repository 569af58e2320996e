#!/usr/bin/env python3
"""Keeps what runs of the fuzz targets have found: keep.py [TARGET...]

Merges the new inputs of every target that has run (build/fuzz/corpus) with the kept ones, writes the
smallest set that reaches the same code to corpus/TARGET.tar.xz, and adds the runs to record.json. A kept
corpus stays below MAX_BYTES; the largest inputs are left out.

    keep.py --show                                prints the record as a table
    keep.py --record TARGET LOG USER SYSTEM FAILED  is called by run.sh after every run
"""

import fcntl
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import pack_corpus

HERE = pathlib.Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "fuzz"
RECORD = HERE / "record.json"
MAX_INPUT = 4096
MAX_BYTES = 100 << 10


def last_number(pattern, log):
    found = re.findall(pattern, log)
    return int(found[-1]) if found else 0


def record(target, log_path, user, system, failed):
    """Writes the record of one run, from the log of libFuzzer."""
    log = pathlib.Path(log_path).read_text(errors="replace")
    run = {
        "target": target,
        "cpu_seconds": round(float(user) + float(system)),
        "inputs": last_number(r"stat::number_of_executed_units:\s+(\d+)", log),
        "edges": last_number(r" cov: (\d+)", log),
        "features": last_number(r" ft: (\d+)", log),
        "failures": int(failed),
    }
    # Without final statistics, the last line of progress has the number of inputs.
    run["inputs"] = run["inputs"] or last_number(r"(?m)^#(\d+)\s", log)
    (BUILD / "runs" / f"{target}-{time.time_ns()}.json").write_text(json.dumps(run))


def read_record():
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def add_runs(targets):
    """Adds the runs of targets to the record, and removes their files."""
    total = read_record()
    for path in sorted((BUILD / "runs").glob("*.json")):
        run = json.loads(path.read_text())
        target = run.pop("target")
        if target not in targets:
            continue
        sums = total.setdefault(target, {"cpu_seconds": 0, "inputs": 0, "failures": 0})
        for name in ("cpu_seconds", "inputs", "failures"):
            sums[name] += run[name]
        for name in ("edges", "features"):
            sums[name] = run[name] or sums.get(name, 0)
        path.unlink()
    for target in targets:
        if target in total:
            total[target]["kept_inputs"] = pack_corpus.count(target)
    if not total:
        return
    lines = [f"  {json.dumps(name)}: {json.dumps(total[name])}" for name in sorted(total)]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def merge(target):
    """Writes the smallest set of inputs that reaches the code of the new and the kept ones."""
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        kept, new = pathlib.Path(folder) / "kept", pathlib.Path(folder) / "new"
        new.mkdir()
        pack_corpus.unpack(target, kept)
        found = BUILD / "corpus" / target
        found.mkdir(parents=True, exist_ok=True)
        findings = BUILD / "findings"
        findings.mkdir(exist_ok=True)
        program = BUILD / "tests" / "fuzz" / f"{target}_fuzz"
        result = subprocess.run([program, "-merge=1", "-use_counters=0", f"-max_len={MAX_INPUT}",
                                 "-timeout=20", f"-artifact_prefix={findings}/{target}-", new, kept, found],
                                capture_output=True, text=True, errors="replace", check=False)
        if result.returncode != 0:
            sys.exit(f"{target}: merging failed:\n{result.stderr[-2000:]}")
        pack_corpus.pack(target, new, MAX_BYTES)


def show():
    print(f"{'target':16} {'CPU min':>8} {'inputs':>12} {'edges':>7} {'kept':>6} {'failures':>8}")
    for target, r in read_record().items():
        print(f"{target:16} {r['cpu_seconds'] / 60:8.1f} {r['inputs']:12,} {r.get('edges', 0):7,} "
              f"{r.get('kept_inputs', 0):6} {r['failures']:8}")


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["--record"]:
        record(*arguments[1:])
    elif arguments == ["--show"]:
        show()
    else:
        runs = {p.name.rsplit("-", 1)[0] for p in (BUILD / "runs").glob("*.json")}
        targets = arguments or sorted(runs)
        with open(BUILD / "keep.lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for target in targets:
                merge(target)
            add_runs(targets)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measures ranks_bench between processes over several transports, beside one process.

    transports.py BUILD_FOLDER [--models small,medium] [--ranks 2] [--rounds 7] [--json FILE]
                  [--over threads,memory,loopback,namespaces] [--mpirun mpirun]

threads: threads of one process. memory: processes, and shared memory. loopback: processes, and TCP
over the loopback interface. namespaces: TCP between network namespaces, one for each rank, which
needs root. Appends the lines of ranks_bench to FILE, prints a table of the ratios with what is
required of two ranks, and compares all times with the predictions of scale_model.py. The status is
1 if bits or bytes were wrong, 2 if a ratio or a prediction is not as required. The machine should
be otherwise idle.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "ranks")]

import namespaces
import scale_model

# Ratios for rows divided: of prompts, of decoding.
REQUIRED = {"threads": (0.85, 0.85), "memory": (0.85, 0.85), "loopback": (0.75, 0.70),
            "namespaces": (0.75, 0.70)}
# Steps of the decoding, fewer for the larger model.
STEPS = {"small": 8, "medium": 4}
# ob1 is the messaging layer that the choice of btl belongs to. The one process needs all cores.
COMMON = ["--mca", "pml", "ob1", "--bind-to", "none"]


def launcher(mpirun, over, ranks, spaces):
    """The beginning of a command that runs ranks as processes."""
    if over == "namespaces":
        return [*spaces.launcher(mpirun, ranks), *COMMON]
    command = [mpirun, "--allow-run-as-root", "--oversubscribe", *COMMON]
    if over == "memory":
        # Containers often forbid that a process reads the memory of another one.
        command += ["--mca", "btl", "vader,self", "--mca", "btl_vader_single_copy_mechanism",
                    "none"]
    else:
        command += ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]
    return [*command, "-n", str(ranks)]


def command_of(over, arguments, spaces, words):
    bench = str(pathlib.Path(arguments.build).resolve() / "tests/ranks_bench")
    if over == "threads":
        return [bench, "--ranks", str(arguments.ranks), *words]
    mpi = str(pathlib.Path(arguments.build).resolve() / "libmoeserve_mpi.so")
    return [*launcher(arguments.mpirun, over, arguments.ranks, spaces), bench, "--ranks", "mpi",
            "--mpi", mpi, *words]


def measure(arguments, file):
    """Runs everything; returns whether bits and bytes were right."""
    good = True
    spaces = None
    try:
        if "namespaces" in arguments.over:
            reason = namespaces.why_not()
            if reason:
                sys.exit(f"--over namespaces: {reason}")
            spaces = namespaces.Namespaces(arguments.ranks)
        for model in arguments.models:
            for over in arguments.over:
                words = ["--model", model, "--rounds", str(arguments.rounds), "--json", str(file),
                         "--name", over, "--steps", str(STEPS.get(model, 4)), *arguments.more]
                print(f"## {model}, {over}", flush=True)
                done = subprocess.run(command_of(over, arguments, spaces, words), check=False)
                good = good and done.returncode == 0
    finally:
        if spaces is not None:
            spaces.close()
    return good


def ratios_table(cases):
    """The lines of a table of rows-divided ratios, and whether all are as required."""
    lines = ["| model, work, over | ranks | ratio | required | reached |", "|---|---|---|---|---|"]
    good = True
    for case in cases:
        model, work, over, _, way = case["name"].split(", ")
        if way != "rows divided":
            continue
        required = REQUIRED[over][work == "decode"] if case["ranks"] == 2 else None
        reached = required is None or case["ratio"] >= required
        good = good and reached
        lines.append(f"| {model}, {work}, {over} | {case['ranks']} | {case['ratio']:.2f} "
                     f"({case['least_ratio']:.2f} to {case['most_ratio']:.2f}) | "
                     f"{required or ''} | {'' if required is None else 'yes' if reached else 'no'} "
                     "|")
    return lines, good


def parse(words):
    def names(text):
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build")
    parser.add_argument("--models", type=names, default=["small", "medium"])
    parser.add_argument("--over", type=names,
                        default=["threads", "memory", "loopback", "namespaces"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("more", nargs="*", help="words for ranks_bench, after --")
    arguments = parser.parse_args(words)
    for over in arguments.over:
        if over not in REQUIRED:
            parser.error(f"--over: expected some of {', '.join(REQUIRED)}, found {over}")
    return arguments


def main(words):
    arguments = parse(words)
    with tempfile.TemporaryDirectory() as folder:
        file = (arguments.json or pathlib.Path(folder) / "runs.jsonl").resolve()
        before = len(scale_model.read_cases(file)) if file.exists() else 0
        good = measure(arguments, file)
        cases = scale_model.read_cases(file)[before:] if file.exists() else []
        lines, reached = ratios_table(cases)
        print("\n" + "\n".join(lines) + "\n")
        predicted = scale_model.check_cases(cases)
    return 1 if not good or not cases else 0 if reached and predicted else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

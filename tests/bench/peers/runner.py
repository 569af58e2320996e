"""Functions that the scripts run_*.py share. Each of them measures one engine on one model folder,
is run by the Python that has the engine, and needs no other package.

The script's arguments are those of `moeserve bench`. It prints a JSON object per line: one for each
case, {"case": "decode 4", "tokens_per_second": 12.3, "distinct_tokens": 0.97}, and one with the
versions of the packages, {"setup": {...}}. All that the engine prints goes to standard error.
"distinct_tokens" is the mean share of different tokens among those of one step: if it is small, the
sequences are alike and select the same experts.

Like `moeserve bench --rounds 1`, a script runs every case twice and measures the second run. A
sequence of a decode case starts with a prompt of its own of --context random tokens. Its first
token belongs to the prompt; the --tokens steps after it are measured. Tokens are chosen greedily,
which costs an engine the least time.
"""

import argparse
import ctypes.util
import importlib.metadata
import json
import os
import pathlib
import random
import sys
import time

RESTARTED = "PEER_RUNNER_RESTARTED"


def arguments(description, add=lambda parser: None):
    """Parses the command line; `add` adds the script's own options to the parser."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="folder of the model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=512, help="0: no prompt case")
    parser.add_argument("--batch", default="1,4,16,32", help="sequences that decode together")
    parser.add_argument("--context", type=int, default=16, help="prompt of the decode cases")
    parser.add_argument("--tokens", type=int, default=32, help="steps that are measured")
    parser.add_argument("--cache", type=pathlib.Path, required=True,
                        help="folder for what the engine compiles, kept for later runs")
    add(parser)
    a = parser.parse_args()
    a.model, a.cache = a.model.resolve(), a.cache.resolve()
    a.batches = [int(b) for b in a.batch.split(",")]
    a.cpus = sorted(os.sched_getaffinity(0))[:a.threads]
    a.longest = max(a.prompt, a.context + a.tokens) + 1
    return a


def libraries(package):
    """Returns the libraries to load before Python: tcmalloc, if the system has it, and the OpenMP
    library of the package intel-openmp, if it is installed beside `package`."""
    found = []
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    if tcmalloc:
        found.append(tcmalloc)
    try:
        root = pathlib.Path(importlib.metadata.distribution(package).locate_file(""))
    except importlib.metadata.PackageNotFoundError:
        return found
    openmp = root.parents[1] / "libiomp5.so"  # lib/pythonX.Y/site-packages is three folders down
    if openmp.exists():
        found.append(str(openmp))
    return found


def restart(environment, preload=()):
    """Starts the script again with more variables and with preloaded libraries, because libraries
    read them when they are loaded. Returns only in the restarted script."""
    if os.environ.get(RESTARTED):
        return
    changed = dict(os.environ, **environment, **{RESTARTED: "1"})
    if preload:
        changed["LD_PRELOAD"] = ":".join(preload)
    os.execve(sys.executable, [sys.executable, *sys.argv], changed)


class Output:
    """Standard output, kept for results; what others print goes to standard error."""

    def __init__(self):
        self.file = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def write(self, **values):
        print(json.dumps(values), file=self.file, flush=True)

    def setup(self, packages, seconds):
        """Writes versions, preloaded libraries and the time that loading the model took."""
        self.write(setup={
            "versions": {p: importlib.metadata.version(p) for p in packages},
            "preloaded": [pathlib.Path(p).name
                          for p in os.environ.get("LD_PRELOAD", "").split(":") if p],
            "load_seconds": round(seconds, 1)})


def random_tokens(count, vocabulary):
    return [random.randrange(vocabulary) for _ in range(count)]


def vocabulary(folder):
    return json.loads((folder / "config.json").read_text())["vocab_size"]


def now():
    return time.perf_counter()


def measure(a, output, generate):
    """Runs all cases and writes their rates. `generate(sequences, context, steps)` processes
    prompts of `context` random tokens and lets every sequence generate `steps` + 1 tokens. It
    returns (seconds for the prompts and first tokens, seconds for the other tokens, tokens), with
    a list of the other tokens for each sequence."""
    if a.prompt:
        generate(1, a.prompt, 0)
        seconds = generate(1, a.prompt, 0)[0]
        output.write(case=f"prompt {a.prompt}", tokens_per_second=a.prompt / seconds)
    for batch in a.batches:
        generate(batch, a.context, a.tokens)
        _, seconds, tokens = generate(batch, a.context, a.tokens)
        # Fewer tokens if the prompts of the sequences did not end in the same step.
        counts = [len(t) for t in tokens]
        if counts != [a.tokens] * batch:
            raise RuntimeError(f"decode {batch}: expected {a.tokens} tokens for each sequence, "
                               f"found {counts}")
        distinct = sum(len(set(step)) for step in zip(*tokens))
        output.write(case=f"decode {batch}", tokens_per_second=sum(counts) / seconds,
                     distinct_tokens=distinct / sum(counts))


def leave():
    """Ends the process at once: some engines do not end their threads."""
    sys.stderr.flush()
    os._exit(0)

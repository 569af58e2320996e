"""The engines of cpu_peers.py: where each finds its weights, how it is run, and how its results are
read."""

import dataclasses
import json
import pathlib
import re
import signal
import subprocess
import tempfile

from cpu_common import bench, cases

# What each type of ours is compared with: the GGUF files, and the suffix of the other folders.
GGUF = {"bf16": ["bf16"], "int8": ["q8_0"], "int8-channel": ["q8_0"],
        "int4": ["q4_0", "q4_k"], "int4-k": ["q4_0", "q4_k"]}
FOLDER = {"bf16": "bf16", "int8": "int8", "int8-channel": "int8", "int4": "int4", "int4-k": "int4"}
RUNNERS = pathlib.Path(__file__).resolve().parent
LLAMA_STREAM = 64  # generated tokens of llama-bench


@dataclasses.dataclass(frozen=True)
class Work:
    """The cases that every engine runs."""
    prompt: int = 512      # tokens; 0: no prompt case
    batches: tuple = (1, 4, 16, 32)
    context: int = 16      # tokens of a prompt before decoding
    tokens: int = 32       # decoded tokens of each sequence

    def cases(self):
        prompt = [f"prompt {self.prompt}"] if self.prompt else []
        return prompt + [f"decode {b}" for b in self.batches]

    def arguments(self):
        return ["--prompt", self.prompt, "--batch", ",".join(map(str, self.batches)),
                "--context", self.context, "--tokens", self.tokens]


@dataclasses.dataclass
class Outcome:
    """One run of an engine."""
    rates: dict = dataclasses.field(default_factory=dict)   # {case: tokens per second}
    details: dict = dataclasses.field(default_factory=dict)
    probes: list = dataclasses.field(default_factory=list)  # of the machine, by moeserve
    error: str = ""  # why cases are missing
    log: str = ""    # the end of what a failed engine printed


@dataclasses.dataclass
class Engine:
    name: str           # in the table, such as "vLLM int8"
    model: pathlib.Path  # file or folder of the weights
    measure: object     # () -> Outcome


def call(command, timeout):
    """Runs a command in an empty folder, because some engines write logs into the working folder.
    Returns (standard output, both outputs, error); error is empty if the command succeeded."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True,
                                  stderr=subprocess.PIPE, timeout=timeout, cwd=folder,
                                  errors="replace")
        except OSError as error:
            return "", "", f"cannot run {command[0]}: {error.strerror}"
        except subprocess.TimeoutExpired as expired:
            out, err = ((s or b"").decode(errors="replace")
                        for s in (expired.stdout, expired.stderr))
            return out, out + err, f"not finished after {timeout} s"
    both = done.stdout + done.stderr
    return done.stdout, both, "" if done.returncode == 0 else reason(done.returncode, both)


def reason(status, log):
    """Returns one line that says why a process with this exit status and log failed: the last one
    that names an error, else the last one."""
    if status < 0:
        hint = ", perhaps for lack of memory" if -status == signal.SIGKILL else ""
        return f"ended by {signal.Signals(-status).name}{hint}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # vLLM puts "[rank0]: " before each line of an exception.
    pattern = r"(?:\[rank0\]:\s*)?((?:[\w.]*(?:Error|Exception)\b|error:).*)"
    errors = [m[1] for m in (re.match(pattern, line) for line in lines) if m]
    return (errors or lines or [f"status {status}"])[-1]


def run_script(python, script, model, work, threads, cache, timeout):
    """Runs one of the scripts run_*.py, a list with its options, with the Python of the engine."""
    out, log, error = call([python, RUNNERS / script[0], *script[1:], "--model", model, "--threads",
                            threads, "--cache", cache, *work.arguments()], timeout)
    outcome = Outcome(error=error, log=log[-4000:] if error else "")
    for line in out.splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if "setup" in values:
            outcome.details.update(values["setup"])
        elif "case" in values:
            outcome.rates[values["case"]] = values["tokens_per_second"]
            if "distinct_tokens" in values:
                outcome.details.setdefault("distinct_tokens", {})[values["case"]] = \
                    values["distinct_tokens"]
    return complete(outcome, work, log)


def complete(outcome, work, log):
    missing = [case for case in work.cases() if case not in outcome.rates]
    if missing and not outcome.error:
        outcome.error, outcome.log = f"no result for {', '.join(missing)}", log[-4000:]
    return outcome


def run_llama(folder, model, options, work, threads, timeout):
    """Runs llama-bench and llama-batched-bench of one folder."""
    outcome = Outcome()
    out, log, error = call(
        [folder / "llama-bench", "-m", model, "-p", work.prompt, "-n",
         LLAMA_STREAM if 1 in work.batches else 0, "-t", threads, "-r", 1, "-o", "json", *options],
        timeout)
    if error:
        return Outcome(error=error, log=log[-4000:])
    try:
        # Some builds print other lines before the list.
        for test in json.loads(out[out.index("[\n"):]):
            case = f"prompt {work.prompt}" if test["n_prompt"] else "decode 1"
            outcome.rates[case] = test["avg_ts"]
    except (ValueError, KeyError, TypeError):
        return Outcome(error="llama-bench: no list of results", log=log[-4000:])
    batches = [b for b in work.batches if b != 1]
    if batches:
        # Some options take a value in llama-bench, but none in llama-batched-bench.
        flags = [o for o in options if o.startswith("-")]
        length = max(2048, max(batches) * (work.context + work.tokens))
        out, log, outcome.error = call(
            [folder / "llama-batched-bench", "-m", model, "-c", length, "-b", 2048, "-ub", 512,
             "-npp", work.context, "-ntg", work.tokens, "-npl", ",".join(map(str, batches)), "-t",
             threads, "-tb", threads, *flags], timeout)
        if outcome.error:
            outcome.log = log[-4000:]
        # The columns are PP, TG, B, N_KV, T_PP, S_PP, T_TG, S_TG, T and S.
        for line in log.splitlines():
            cells = [c.strip() for c in line.strip().strip("|").split("|")]
            if len(cells) == 10 and re.fullmatch(r"\d+", cells[2]):
                outcome.rates[f"decode {cells[2]}"] = float(cells[7])
    return complete(outcome, work, log)


def run_moeserve(program, shape, kind, work, threads, timeout):
    """Runs `moeserve bench`. Its outcome has two probes, of the start and of the end, each with read
    bandwidth in bytes and arithmetic in operations per second; the arithmetic is that of the
    products of type `kind`. The cost of a case is that of a step, or of the whole prompt."""
    report = bench(program, ["--synthetic", shape, "--dtype", kind, "--threads", threads,
                             "--rounds", 1, *work.arguments()], timeout)
    found = {name: case for name, case in cases(report).items() if name in work.cases()}
    bounded = {name: case for name, case in found.items() if "share" in case}
    product = "bf16" if kind == "bf16" else "int8"
    return Outcome(
        {name: case["tokens_per_second"] for name, case in found.items()},
        {"share": {name: case["share"] for name, case in bounded.items()},
         "cost": {name: {"bytes": case["bytes_per_step"],
                         "operations": case["operations_per_step"]}
                  for name, case in bounded.items()},
         "steady": {name: case["steady_rounds"] for name, case in bounded.items()}},
        [{"read_bandwidth": bandwidth, "arithmetic": peaks.get(product) or peaks["f32"]}
         for bandwidth, peaks in zip(report["read_bandwidth_runs"], report["peaks_runs"])])


def peers(a, shape, kind, threads, work):
    """Returns the engines that the options `a` name, for one shape and type of ours."""
    models = a.models.resolve()
    found = []

    def script(name, python, folder, *command):
        if not python:
            return
        cache = models / "cache" / re.sub(r"\W+", "-", name)
        model = models / f"{shape}-{folder}"
        # The link itself, not its target, tells Python the environment.
        python = pathlib.Path(python).absolute()
        found.append(Engine(f"{name} {FOLDER[kind]}", model, lambda: run_script(
            python, command, model, work, threads, cache, a.timeout)))

    def llama(name, folder, options):
        if not folder:
            return
        for file in GGUF[kind]:
            model = models / f"{shape}-{file}.gguf"
            found.append(Engine(f"{name} {file}", model, lambda model=model: run_llama(
                folder.resolve(), model, options, work, threads, a.timeout)))

    llama("llama.cpp", a.llama, [])
    llama("ik", a.ik, [])
    llama("ik -rtr", a.ik, ["-rtr", "1"])
    script("vLLM", a.vllm, f"hf-{FOLDER[kind]}", "run_vllm.py", "--kernels", "plain")
    script("vLLM zentorch", a.zentorch, f"hf-{FOLDER[kind]}", "run_vllm.py", "--kernels",
           "zentorch")
    script("OpenVINO", a.openvino, f"openvino-{FOLDER[kind]}", "run_openvino.py")
    if kind == "bf16":
        script("transformers", a.transformers, f"hf-{FOLDER[kind]}", "run_transformers.py")
    elif a.transformers:
        found.append(Engine("transformers", models, lambda: Outcome(
            error="run_transformers.py measures bf16 only")))
    return found

"""Measures the values in results/serving.md, "Many users at once": medians over several runs.

    python3 tests/bench/serving.py build/release/moeserve [--runs 5] [--seconds 20] [CASE ...]

Cases: mixed, batch, prefix, overload, streams. Without CASE, all cases run. Every run measures each
case once. The machine should be otherwise idle.
"""

import argparse
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

MODELS = pathlib.Path(__file__).resolve().parents[2] / "deploy/models"
MIXED = ["--prompt-tokens", "16:256", "--output-tokens", "16:256"]
LONG = ["--long-share", "0.1", "--long-prompt-tokens", "256:4000"]


class Bench:
    def __init__(self, program, seconds):
        self.program = program
        self.seconds = str(seconds)

    def load(self, *arguments):
        """Runs `moeserve bench load` once and returns its JSON report."""
        with tempfile.NamedTemporaryFile() as report:
            command = [self.program, "bench", "load", "--json", report.name, *arguments]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True)
            if done.returncode != 0:
                sys.exit(f"{' '.join(command)}\n{done.stdout}")
            return json.load(report)

    def timed(self, *arguments):
        return self.load("--seconds", self.seconds, *arguments)


class Server:
    def __init__(self, program, model, *options):
        self.process = subprocess.Popen(
            [program, "serve", "--model", MODELS / model, "--http", "127.0.0.1:0", "--grpc",
             "127.0.0.1:0", "--log-level", "error", *options], stdout=subprocess.PIPE, text=True)
        self.url = "http://" + re.match(r"http listening on (\S+)",
                                        self.process.stdout.readline())[1] + "/v1"

    def status(self, name):
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{name}:\s+(\d+)", text)[1])

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(timeout=60) != 0:
            sys.exit("the server did not end well")


def milliseconds(report, latency, which="p99", group="all"):
    return 1e3 * report[group][latency + "_seconds"][which]


def mixed(bench, model="mh-moe"):
    """Measures the latency for 64 clients with short prompts, without and with long ones."""
    load = ["--model", MODELS / model, "--clients", "64", *MIXED]
    short = bench.timed(*load)
    both = bench.timed(*load, *LONG)
    out = {}
    for name, report in (("short", short), ("mixed", both)):
        out[f"{name} ITL p50 ms"] = milliseconds(report, "inter_token_latency", "p50")
        out[f"{name} ITL p99 ms"] = milliseconds(report, "inter_token_latency")
        out[f"{name} TTFT p99 ms"] = milliseconds(report, "time_to_first_token", group="normal")
        out[f"{name} tokens/s, in and out"] = (report["input_tokens_per_second"] +
                                               report["output_tokens_per_second"])
        out[f"{name} refused"] = sum(e["count"] for e in report["errors"].values())
    out["ITL p99, mixed to short"] = out["mixed ITL p99 ms"] / out["short ITL p99 ms"]
    out["longest wait for a first token s"] = both["all"]["time_to_first_token_seconds"]["max"]
    return out


def batch(bench):
    """Measures decoding in the engine: share of the bandwidth bound, share of time in the model."""
    out = {}
    for clients, tokens in ((1, 64), (32, 96)):
        report = bench.load("--synthetic", "medium", "--dtype", "bf16", "--threads", "2",
                            "--bandwidth", "--clients", str(clients), "--requests",
                            str(3 if clients == 1 else clients), "--prompt-tokens", "16",
                            "--output-tokens", str(tokens))
        name = f"MEDIUM bf16, {clients} at once: "
        out[name + "tokens/s"] = report["output_tokens_per_second"]
        out[name + "% of the bandwidth bound"] = 100 * report["share_of_bandwidth_bound"]
        out[name + "% inside the model"] = 100 * report["server"]["forward_share_of_steps"]
    for clients in (1, 32):
        report = bench.timed("--model", MODELS / "smoe", "--clients", str(clients),
                             "--prompt-tokens", "16:64", "--output-tokens", "64:256")
        name = f"smoe, {clients} at once: "
        out[name + "tokens/s"] = report["output_tokens_per_second"]
        out[name + "% inside the model"] = 100 * report["server"]["forward_share_of_steps"]
    return out


def prefix(bench):
    """Measures the time to first token of prompts with 1,000 shared tokens, cached and uncached."""
    out = {}
    for model in ("smoe", "mh-moe", "dense"):
        load = ["--model", MODELS / model, "--clients", "1", "--requests", "60",
                "--prefix-tokens", "1000", "--prompt-tokens", "16", "--output-tokens", "1"]
        cached = milliseconds(bench.load(*load), "time_to_first_token", "p50")
        plain = milliseconds(bench.load(*load, "--no-prefix-cache"), "time_to_first_token", "p50")
        out[f"{model}: without ms"] = plain
        out[f"{model}: with ms"] = cached
        out[f"{model}: times shorter"] = plain / cached
    return out


def overload(bench, model="mh-moe"):
    """Sends requests for 60 s at ten times the peak rate of a closed loop, with a queue of 64."""
    # The model has one thread, because the clients and the connections need the other core.
    server = Server(bench.program, model, "--max-queue", "64", "--threads", "1")
    load = ["--url", server.url, "--prompt-tokens", "32:128", "--output-tokens", "128:256"]
    # 128 clients are as many as the server's running (64) and queued (64) requests.
    peak = bench.timed(*load, "--clients", "128")
    over = bench.load("--seconds", "60", *load, "--rate", str(10 * peak["requests_per_second"]))
    server.stop()
    requests = over["requests"]
    return {
        "capacity requests/s": peak["requests_per_second"],
        "throughput, % of capacity": 100 * (over["full_load_output_tokens_per_second"] /
                                            peak["full_load_output_tokens_per_second"]),
        "refused": over["refusals"]["count"],
        "refused in ms, p99": 1e3 * over["refusals"]["p99"],
        "refused without Retry-After": over["refusals"]["count"] -
                                       over["retry_after_seconds"]["count"],
        "other errors": sum(e["count"] for e in over["errors"].values()) -
                        over["refusals"]["count"],
        "not answered exactly once": requests["unanswered"] + requests["answered_twice"],
        "accepted TTFT p50 ms, capacity": milliseconds(peak, "time_to_first_token", "p50"),
        "accepted TTFT p50 ms, overload": milliseconds(over, "time_to_first_token", "p50"),
        "accepted TTFT p99 ms, capacity": milliseconds(peak, "time_to_first_token"),
        "accepted TTFT p99 ms, overload": milliseconds(over, "time_to_first_token"),
        "accepted ITL p99 ms, capacity": milliseconds(peak, "inter_token_latency"),
        "accepted ITL p99 ms, overload": milliseconds(over, "inter_token_latency"),
    }


def streams(bench, model="mh-moe"):
    """Opens 1,000 streams that no client reads, then runs 200 active clients in addition."""
    server = Server(bench.program, model)
    start = {"threads": server.status("Threads"), "MiB": server.status("VmRSS") / 1024}
    most = dict(start)
    stop = threading.Event()

    def watch():
        while not stop.wait(0.05):
            most["threads"] = max(most["threads"], server.status("Threads"))
            most["MiB"] = max(most["MiB"], server.status("VmRSS") / 1024)

    watcher = threading.Thread(target=watch)
    watcher.start()
    report = bench.timed("--url", server.url, "--idle-streams", "1000", "--clients", "200",
                         "--prompt-tokens", "16:128", "--output-tokens", "64:128")
    stop.set()
    watcher.join()
    server.stop()
    idle = report["idle_streams"]
    return {
        "idle streams opened": idle["opened"],
        "idle streams lost": idle["lost"],
        "active requests completed": report["requests"]["completed"],
        "active requests failed": sum(e["count"] for e in report["errors"].values()),
        "threads at start": start["threads"],
        "threads at most": most["threads"],
        "MiB at start": start["MiB"],
        "MiB at most": most["MiB"],
    }


CASES = {case.__name__: case for case in (mixed, batch, prefix, overload, streams)}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json")
    args = parser.parse_args()
    bench = Bench(args.program, args.seconds)
    names = args.cases or list(CASES)
    runs = {name: [] for name in names}
    for number in range(args.runs):
        for name in names:
            begin = time.monotonic()
            runs[name].append(CASES[name](bench))
            print(f"run {number + 1}, {name}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
    for name in names:
        print(f"\n{name}: {CASES[name].__doc__}")
        print(f"  {'':44} {'median':>10} {'least':>10} {'most':>10}")
        for key in runs[name][0]:
            values = [run[key] for run in runs[name]]
            print(f"  {key:44} {statistics.median(values):10.2f} {min(values):10.2f} "
                  f"{max(values):10.2f}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(runs, indent=1))
    print(f"\n{os.cpu_count()} cores, {args.runs} runs of {args.seconds:g} s")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Records the observable behavior of a moeserve program, or compares two recordings.

Recordings made before and after a refactoring must be identical. README.md in this folder lists
what is recorded.
"""

import argparse
import json
import pathlib
import re
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import bundled_models
import cases
import commands
import compare
import running
import wrong_cases

ROOT = running.ROOT
NO_DRAFTS = ["--draft-tokens", "0"]
ROUTED_FLAGS = ["--routing-records", "--routing-control", "--hidden-samples", "200",
                "--moe-expert-weights", "--chat-template",
                str(ROOT / "tests/chat/templates/chatml.jinja")]
# Without --max-prompt-rows, the number of rows per step that repeated prompts receive would depend
# on time, and so would the number of drafted tokens without --draft-tokens.
OTHER_FLAGS = ["--strict-fields", "--metrics-compat", "vllm,sglang", "--moe-metrics", "top",
               "--kv-cache-dtype", "int8", "--max-prompt-rows", "64",
               "--no-prefix-cache", "--max-model-len", "256", "--max-logprobs", "5",
               "--no-dashboard", "--served-model-name", "first", "--served-model-name", "second"]
KEY = "a-key-of-the-tests"


class Recording:
    """Writes the files of one recording. A file has one record per line."""

    def __init__(self, folder):
        self._folder = folder
        self.records = 0

    def write(self, name, records):
        """Writes records as they come."""
        with (self._folder / f"{name}.jsonl").open("w") as out:
            for record in records:
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
                self.records += 1


def http_records(server, model, shape, requests):
    """Yields records of HTTP requests that the engine processes in the same steps in each run, and
    records of the statistics after them."""
    for key, path, body in requests:
        yield server.record_http(key, "POST", path, body)
    for i, fields in enumerate(wrong_cases.wrong_fields(shape)):
        body = {"prompt": "a", "max_tokens": 2, "temperature": 0, **fields}
        yield server.record_http(f"wrong {i:03}", "POST", wrong_cases.COMPLETIONS, body)
    for i, body in enumerate(wrong_cases.wrong_chats()):
        yield server.record_http(f"wrong chat {i:02}", "POST", wrong_cases.CHATS,
                                 {"max_tokens": 2, "temperature": 0, **body})
    for i, (path, headers, body) in enumerate(wrong_cases.raw_posts()):
        yield server.record_http(f"raw {i:02}", "POST", path, body, headers)
    for i, (path, body) in enumerate(wrong_cases.tokenizer_posts()):
        yield server.record_http(f"tokenizer {i:02}", "POST", path, body)
    for method, path in wrong_cases.plain_gets(model.name):
        yield server.record_http(f"{method} {path}", method, path)
    for path in page_files(server):
        yield server.record_http(f"GET {path}", "GET", path)
    yield from statistics_records(server, shape, "")


def page_files(server):
    """Returns the dashboard's files, found by following the references from "/"."""
    found, waiting = set(), ["/"]
    while waiting:
        status, _, data = server.http("GET", waiting.pop())
        names = re.findall(r"[\w-]+\.(?:js|css|svg)\b", data.decode()) if status == 200 else []
        new = {f"/dashboard/{name}" for name in names} - found
        found |= new
        waiting += sorted(new)
    return sorted(found)


def statistics_records(server, shape, key):
    """Yields records of the expert statistics and the metrics."""
    for path in wrong_cases.statistics_gets(shape) + ["/v1/experts/profile"]:
        yield server.record_http(f"{key}GET {path}", "GET", path)
    yield from server.record_metrics(f"{key}metrics")


def grpc_records(server, model, shape, requests):
    """Yields records of `requests` sent over gRPC if gRPC can express them, and of other gRPC
    calls."""
    pb = server.pb
    for number, (key, _, body) in enumerate(requests):
        request = cases.grpc_request(number, body, pb)
        if request is not None:
            yield server.record_grpc(key, "Generate", request)
    for i, request in enumerate(wrong_cases.wrong_grpc(shape, pb)):
        yield server.record_grpc(f"wrong {i:03}", "Generate", request)
    for i, (method, request) in enumerate(wrong_cases.other_grpc(pb)):
        yield server.record_grpc(f"{method} {i:02}", method, request)
    for service in ("", "moeserve.v1.Inference", f"model/{model.name}", "model/other"):
        yield server.record_health(service)
    yield from statistics_records(server, shape, "after gRPC: ")


def other_records(server, shape):
    """Yields records of a server with API keys, strict fields, no routing records and other
    metrics."""
    key = {"Authorization": f"Bearer {KEY}"}
    base = {"prompt": "In the beginning God created", "max_tokens": 8, "temperature": 0}
    bodies = [
        base, {**base, "model": "second", "logprobs": 5, "stream": True}, {**base, "logprobs": 6},
        {**base, "no_such_field": 1}, {**base, "return_routing": True},
        {**base, "return_routed_experts": True}, {**base, "routing_control": {"top_k": 1}},
        {**base, "return_routing": False, "routing_control": {}}, {**base, "max_tokens": 250},
        {**base, "prompt": list(range(1, 300))}, {**base, "n": 3, "seed": 4, "temperature": 1},
        # The samples exceed the KV cache, so some are preempted and recomputed.
        {**base, "n": 8, "seed": 5, "temperature": 1, "max_tokens": 150, "ignore_eos": True},
        {**base, "prompt": list(range(1, 300)), "truncate_prompt_tokens": -1, "logprobs": 1},
    ]
    post = wrong_cases.COMPLETIONS
    yield server.record_http("no key", "POST", post, base)
    yield server.record_http("wrong key", "POST", post, base, {"Authorization": "Bearer other"})
    for i, body in enumerate(bodies):
        yield server.record_http(f"other {i:02}", "POST", post, body, key)
    user = {"role": "user", "content": "Tell me."}
    for more in ({}, {"name": "Ann"}, {"mood": "good"}):
        yield server.record_http(f"chat {more}", "POST", wrong_cases.CHATS,
                                 {"messages": [{**user, **more}]}, key)
    for path in ("/v1/models", "/", "/health", "/v1/experts/collapse", "/v1/experts/stats"):
        yield server.record_http(f"GET {path}", "GET", path, headers=key)
    pb = server.pb
    metadata = [("authorization", f"Bearer {KEY}")]
    request = pb.GenerateRequest(text=base["prompt"], logprobs=2,
                                 sampling=pb.SamplingParams(temperature=0, max_tokens=8))
    yield server.record_grpc("gRPC no key", "Generate", request)
    yield server.record_grpc("gRPC", "Generate", request, metadata)
    request.return_routing = True
    yield server.record_grpc("gRPC routing", "Generate", request, metadata)
    request.return_routing = False
    request.routing_control.top_k = 1
    yield server.record_grpc("gRPC control", "Generate", request, metadata)
    yield server.record_grpc("gRPC info", "GetModelInfo", pb.GetModelInfoRequest(), metadata)
    yield from server.record_metrics("metrics")


def record_model(recording, binary, model, dtypes, count, stubs, scratch):
    """Writes the files of one model."""
    shape = cases.shape_of(model)
    generator = cases.Generator(shape)
    requests = generator.requests(count)
    several = generator.lists_of_prompts()
    log = scratch / "server.log"
    for dtype in dtypes:
        name = f"{model.name}.{dtype}"
        with running.Server(binary, model, stubs, log, "--dtype", dtype, *ROUTED_FLAGS,
                            *NO_DRAFTS) as server:
            recording.write(f"{name}.http", http_records(server, model, shape, requests))
            recording.write(f"{name}.grpc", grpc_records(server, model, shape, requests))
            recording.write(f"{name}.prompts", (server.record_http(key, "POST", path, body)
                                                for key, path, body in several))
        if server.status != 0:
            raise RuntimeError(f"{name}: the server ended with status {server.status}")
    keys = scratch / "keys"
    keys.write_text(KEY + "\n")
    with running.Server(binary, model, stubs, log, "--dtype", "bf16", "--api-key-file", keys,
                        "--kv-cache-memory", shape["small_cache"], *OTHER_FLAGS,
                        *NO_DRAFTS) as server:
        server.default_headers = {"Authorization": f"Bearer {KEY}"}
        recording.write(f"{model.name}.other", other_records(server, shape))
    if running.RANKS is not None:
        return  # tests/ranks compares commands
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        runner = commands.Commands(binary, folder)
        commands.prepare(runner, model)
        recording.write(f"{model.name}.commands", commands.model_records(runner, model))


def record(binary, out, models, dtypes, count):
    """Writes a recording of `binary` into a new folder."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise RuntimeError(f"{out} is not empty")
    recording = Recording(out)
    settings = {"models": sorted(model.name for model in models), "dtypes": dtypes,
                "requests": count, "seed": cases.SEED}
    recording.write("settings", [{"key": "settings", "request": None, "answer": settings}])
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        stubs = running.make_stubs(scratch)
        recording.write("help", commands.Commands(binary, scratch).help())
        for model in models:
            record_model(recording, binary, model, dtypes, count, stubs, scratch)
            print(f"{time.monotonic() - start:6.1f} s  {model.name}", flush=True)
    print(f"{recording.records} records in {out}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compare", action="store_true",
                        help="compare two recordings; exit status 1 if they differ")
    parser.add_argument("first", type=pathlib.Path, metavar="BINARY|BEFORE")
    parser.add_argument("second", type=pathlib.Path, metavar="OUT_FOLDER|AFTER")
    parser.add_argument("--models", type=pathlib.Path, nargs="+", metavar="DIR",
                        help="checkpoint folders; default: the decoders of deploy/models")
    parser.add_argument("--requests", type=int, default=200, help="number per model")
    parser.add_argument("--ranks", type=int,
                        help="processes that compute each model, started by mpirun: servers only, "
                        "and without their memory, so that recordings with 1 and more are equal")
    parser.add_argument("--dtypes", default="f32,bf16,int8")
    parser.add_argument("--ignore", action="append", default=[], metavar="PART",
                        help="with --compare: skip files whose names contain this")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    if arguments.compare:
        return compare.compare(arguments.first, arguments.second, arguments.ignore)
    running.RANKS = arguments.ranks
    models = arguments.models
    if models is None:
        models = bundled_models.folders()
    record(arguments.first.resolve(), arguments.second, models, arguments.dtypes.split(","),
           arguments.requests)
    return 0


if __name__ == "__main__":
    sys.exit(main())

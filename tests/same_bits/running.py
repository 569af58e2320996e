"""Runs a server for a recording and sends it HTTP and gRPC requests."""

import hashlib
import http.client
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import grpc

import exact

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Headers that are not recorded: the date varies, and the length follows from the body.
DROPPED_HEADERS = {"date", "content-length"}
LONGEST_TEXT = 4000
JSON_TYPE = {"Content-Type": "application/json"}


def environment():
    """Returns this process's environment without the variables that moeserve reads."""
    return {key: value for key, value in os.environ.items() if not key.startswith("MOESERVE_")}


def make_stubs(folder):
    """Generates Python modules from moeserve.proto in this source tree. Returns (module with the
    messages, module with the service stubs)."""
    from grpc_tools import protoc

    status = protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"--python_out={folder}",
                          f"--grpc_python_out={folder}", "moeserve/v1/moeserve.proto"])
    if status != 0:
        raise RuntimeError("protoc failed")
    sys.path.insert(0, str(folder))
    return (importlib.import_module("moeserve.v1.moeserve_pb2"),
            importlib.import_module("moeserve.v1.moeserve_pb2_grpc"))


# How many ranks compute the model of a server, and what starts them. None: one process, of which
# the memory is recorded, too.
RANKS = None
MPIEXEC = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca",
           "btl_vader_single_copy_mechanism", "none"]


class Server:
    """Runs `moeserve serve` until the `with` block ends."""

    def __init__(self, binary, model, stubs, log, *flags):
        self.pb, services = stubs
        self._calls = 0
        self._log = pathlib.Path(log)
        self.default_headers = {}  # headers that metrics_text() sends
        launcher = [*MPIEXEC, "-n", str(RANKS)] if (RANKS or 1) > 1 else []
        ranked = ["--ranks", "mpi"] if (RANKS or 1) > 1 else []
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [*launcher, binary, "serve", "--model", model, "--http", "127.0.0.1:0", "--grpc",
                 "127.0.0.1:0", "--threads", "2", *ranked, *flags],
                stdout=subprocess.PIPE, stderr=errors, text=True, env=environment())
        addresses = {}
        while len(addresses) < 2:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(
                    f"the server of {model} ended: {self._process.wait()}\n{self.log_end()}")
            kind, _, address = line.strip().partition(" listening on ")
            addresses[kind] = address
        self._http = http.client.HTTPConnection(addresses["http"], timeout=120)
        self._channel = grpc.insecure_channel(addresses["grpc"])
        self._stub = services.InferenceStub(self._channel)
        time.sleep(0.1)  # the server samples its statistics once before the first request

    def __enter__(self):
        return self

    def log_end(self):
        """Returns the last lines of the server's log."""
        return self._log.read_text(errors="replace")[-8000:]

    def __exit__(self, kind, *_):
        self._channel.close()
        self._http.close()
        # mpirun would kill its processes after SIGTERM.
        self._process.send_signal(signal.SIGUSR1 if (RANKS or 1) > 1 else signal.SIGTERM)
        try:
            self.status = self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.status = self._process.wait()
        if kind is not None or self.status != 0:
            print(f"status {self.status}, the end of the server's log:\n{self.log_end()}",
                  file=sys.stderr, flush=True)

    def _next_id(self):
        self._calls += 1
        return f"call-{self._calls}"

    def http(self, method, path, body=None, headers=None):
        """Sends one HTTP request. Returns the response (status, headers, bytes)."""
        headers = {"X-Request-Id": "unrecorded", **(headers or {})}
        if isinstance(body, dict):
            body = json.dumps(body).encode()
            headers = {**JSON_TYPE, **headers}
        self._http.request(method, path, body, headers)
        answer = self._http.getresponse()
        return answer.status, answer.getheaders(), answer.read()

    def record_http(self, key, method, path, body=None, headers=None):
        """Sends one HTTP request. Returns the request and the response as a record."""
        shown = body.decode("latin-1") if isinstance(body, bytes) else body
        request = {"method": method, "path": path}
        if headers:
            request["headers"] = headers
        if body is not None:
            request["body"] = shown
        status, answer_headers, data = self.http(
            method, path, body, {**(headers or {}), "X-Request-Id": self._next_id()})
        kept = [[name, value] for name, value in answer_headers
                if name.lower() not in DROPPED_HEADERS]
        return {"key": key, "request": request,
                "answer": {"status": status, "headers": kept,
                           "body": self._body(dict(answer_headers), data)}}

    @staticmethod
    def _body(headers, data):
        kind = headers.get("Content-Type", "")
        if kind.startswith("text/event-stream"):
            return exact.join_stream(data.decode())
        if kind.startswith("application/json") and data:
            return exact.hide_identity(exact.parse(data.decode()))
        if len(data) > LONGEST_TEXT or b"\0" in data:
            return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        return data.decode("utf-8", "backslashreplace")

    def record_grpc(self, key, method, request, metadata=()):
        """Makes one gRPC call. Returns the request and the response as a record."""
        call_id = self._next_id()
        answer = {"messages": None}
        call = None
        try:
            metadata = [("x-request-id", call_id), *metadata]
            if method == "Generate":
                call = self._stub.Generate(request, metadata=metadata)
                answer["messages"] = exact.join_messages(call)
            else:
                response, call = getattr(self._stub, method).with_call(request, metadata=metadata)
                answer["messages"] = exact.hide_identity(exact.message(response))
        except grpc.RpcError as error:
            call = error
        answer["code"] = call.code().name
        answer["details"] = call.details()
        # The values of names that end in -bin are bytes, which JSON does not have.
        answer["trailers"] = [[name, value.hex() if isinstance(value, bytes) else value]
                              for name, value in call.trailing_metadata()]
        return {"key": key, "request": {"method": method, "message": exact.message(request)},
                "answer": answer}

    def record_health(self, service):
        """Calls gRPC's health service. Encodes the messages here, because they are short."""
        check = self._channel.unary_unary("/grpc.health.v1.Health/Check")
        request = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
        try:
            answer = check(request).hex()
        except grpc.RpcError as error:
            answer = error.code().name
        return {"key": f"health {service}", "request": service, "answer": answer}

    def metrics_text(self, accept="text/plain"):
        """Returns /metrics once it agrees with /v1/experts/stats. The server updates the expert
        metrics only once per second, so the last steps may be missing at first."""
        for _ in range(100):
            text = self.http("GET", "/metrics",
                             headers={**self.default_headers, "Accept": accept})[2].decode()
            stats = json.loads(self.http("GET", "/v1/experts/stats",
                                         headers=self.default_headers)[2])
            layers = stats["layers"]
            # Models with two stacks have one more label.
            stack = {"stack": stats["stack"]} if "stack" in stats else {}
            agree = stats["activated_parameters_per_token"] == exact.metric(
                text, "moeserve_moe_activated_parameters_per_token", **stack)
            if agree and layers:
                agree = layers[0]["tokens"] == exact.metric(
                    text, "moeserve_moe_layer_tokens_total", layer=layers[0]["layer"],
                    block=layers[0]["block"], **stack)
            if agree:
                return text
            time.sleep(0.05)
        raise RuntimeError("/metrics does not come to agree with /v1/experts/stats")

    def record_metrics(self, key):
        """Yields records of /metrics in both formats."""
        for accept in ("text/plain", "application/openmetrics-text"):
            text = self.metrics_text(accept)
            yield {"key": f"{key} {accept}", "request": "/metrics",
                   "answer": exact.metrics(text, RANKS is None)}

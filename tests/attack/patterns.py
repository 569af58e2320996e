"""What the attackers of attack.py do. Every pattern is a function of a Target and ends after about
PATTERN_SECONDS; what it opened, it leaves open until then. The server may refuse or close anything."""

import base64
import gzip
import http.client
import json
import random
import socket
import struct
import sys
import time

from handshakes import HANDSHAKES, tls_context

sys.path.insert(0, __file__.rsplit("/", 2)[0] + "/clients")
import http2  # noqa: E402
from test_heavy_constraints import HEAVY  # noqa: E402
from test_template_shares import SLOW  # noqa: E402

PATTERN_SECONDS = 8
GENERATE = b"/moeserve.v1.Inference/Generate"
WATCH = b"/grpc.health.v1.Health/Watch"
MIB = 1 << 20


class Target:
    """The server as one attacker sees it. Both ports take TLS if `tls` is true."""

    def __init__(self, http_address, grpc_address, key, source, stopping, tls):
        self.host, port = http_address.rsplit(":", 1)
        self.http_port = int(port)
        self.grpc_address, self.grpc_port = grpc_address, int(grpc_address.rsplit(":", 1)[1])
        self.key, self.source, self.stopping = key, source, stopping
        self.opened = []
        self.end = 0.0
        self.tls = tls_context("http/1.1") if tls else None
        self.tls_http2 = tls_context("h2") if tls else None

    def begin(self):
        self.end = time.monotonic() + PATTERN_SECONDS

    def finish(self):
        for connection in self.opened:
            try:
                connection.close()
            except OSError:
                pass
        self.opened = []

    def more(self):
        return time.monotonic() < self.end and not self.stopping.is_set()

    def hold(self):
        """Waits for the end of the pattern."""
        while self.more():
            time.sleep(0.1)

    def connect(self, port, receive=0):
        """Opens a connection, without a handshake, whose kernel buffers `receive` bytes, if that is
        given."""
        connection = socket.socket()
        if receive:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        connection.settimeout(2)
        connection.bind((self.source, 0))
        connection.connect((self.host, port))
        self.opened.append(connection)
        return connection

    def http(self, receive=0):
        connection = self.connect(self.http_port, receive)
        if self.tls is not None:
            self.opened.remove(connection)
            connection = self.tls.wrap_socket(connection)
            self.opened.append(connection)
        return connection

    def http2(self, acknowledge=True):
        client = http2.Connection(self.grpc_address, acknowledge=acknowledge, source=self.source,
                                  tls=self.tls_http2)
        self.opened.append(client)
        return client

    def head(self, length, path="/v1/completions", extra=""):
        return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.key}\r\n"
                f"Content-Type: application/json\r\n{extra}Content-Length: {length}\r\n\r\n").encode()

    def request(self, body, path="/v1/completions", extra=""):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.head(len(data), path, extra) + data

    def post(self, body, path="/v1/completions", extra=""):
        """Sends a request and reads what comes until the answer ends or two seconds pass."""
        connection = self.http()
        try:
            connection.sendall(self.request(body, path, extra))
            response = http.client.HTTPResponse(connection)
            response.begin()
            response.read()
        except (OSError, http.client.HTTPException):
            pass  # refused
        finally:
            connection.close()
            self.opened.remove(connection)


# Descriptors and silent connections (A1, A4).

def silent_connections(target):
    for count in range(400):
        if not target.more():
            break
        target.connect(target.grpc_port if count % 4 == 0 else target.http_port)
    target.hold()


def slow_heads_and_bodies(target):
    clients = []
    for number in range(100):
        client = target.http()
        client.sendall(target.head(1000) if number % 2 else b"GET / HTTP/1.1\r\nX-A: ")
        clients.append(client)
    while target.more():
        for client in list(clients):
            try:
                client.sendall(b"1")
            except OSError:
                clients.remove(client)
        time.sleep(1)


def connection_churn(target):
    while target.more():
        target.http().close()
        target.connect(target.grpc_port).close()
        target.opened.clear()


# Memory (A2).

def large_answers(target):
    while target.more():
        prompt = [random.randrange(5, 200) for _ in range(1000)]
        target.post({"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 20, "n": 128})
        target.post({"prompt": prompt[:60], "max_tokens": 1, "echo": True, "logprobs": 20, "n": 64})


def unfinished_bodies(target):
    for _ in range(8):
        client = target.http()
        try:
            client.sendall(target.head(15 * MIB) + b"x" * (15 * MIB - 1))
        except OSError:
            pass
    target.hold()


def json_of_small_values(target):
    for element in (b"{}", b"[]", b'""', b'{"a":1}', b"[[[[[[[["):
        if target.more():
            values = b",".join([element] * (15 * MIB // (len(element) + 1)))
            target.post(b'{"prompt":[' + values + b"]}")


def gzip_bombs(target):
    bombs = [gzip.compress(text, 9) for text in (b" " * (64 * MIB), b"[" * (15 * MIB),
                                                 b'{"prompt": "' + b"ab" * (7 * MIB) + b'"}')]
    bombs += [bombs[0][:-9], bytes(20) + bombs[1], gzip.compress(b"") * 50000]
    while target.more():
        target.post(random.choice(bombs), extra="Content-Encoding: gzip\r\n")


def bodies_without_keys(target):
    clients = [target.http() for _ in range(50)]
    for number, client in enumerate(clients):
        length = 4096 if number % 2 else 15 * MIB
        client.sendall(b"POST /ping HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
                       % length)
    while target.more():
        for client in list(clients):
            try:
                client.sendall(b"1")
            except OSError:
                clients.remove(client)
        time.sleep(1)


def unread_answers(target):
    body = {"prompt": "a b " * 25000, "return_token_strs": True}
    for _ in range(40):
        if not target.more():
            break
        client = target.http(receive=4096)
        client.sendall(target.request(body, "/tokenize"))
    target.hold()


# HTTP/2 (A5).

def rapid_resets(target):
    while target.more():
        client = target.http2()
        while target.more() and not client.closed:
            stream = client.open(GENERATE)
            client.send(http2.frame(http2.RST_STREAM, 0, stream, b"\0\0\0\x08"))


def continuation_flood(target):
    while target.more():
        client = target.http2()
        client.send(http2.frame(http2.HEADERS, 0, 1, http2.call_headers(GENERATE)))
        while target.more() and not client.closed:
            client.send(http2.frame(http2.CONTINUATION, 0, 1, http2.header(b"x-a", b"b" * 100)))


def unacknowledged_settings(target):
    for _ in range(8):
        client = target.http2(acknowledge=False)
        for _ in range(500):
            if not target.more() or client.closed:
                break
            stream = client.open(WATCH)
            client.send(http2.frame(http2.DATA, http2.END_STREAM, stream, http2.message(b"")))
    target.hold()


def watch_streams(target):
    for _ in range(6):
        client = target.http2()
        for _ in range(250):
            if client.closed:
                break
            stream = client.open(WATCH)
            client.send(http2.frame(http2.DATA, http2.END_STREAM, stream, http2.message(b"")))
    target.hold()


def unfinished_messages(target):
    for _ in range(4):
        client = target.http2()
        for _ in range(100):
            stream = client.open(GENERATE)
            if not target.more() or not client.send_data(stream, b"\0\0\xf0\0\0" + b"x" * 60000):
                break
    target.hold()


def frame_floods(target):
    floods = [http2.frame(http2.PING, http2.ACK, 0, b"12345678"), http2.frame(http2.SETTINGS, 0, 0),
              http2.frame(http2.PING, 0, 0, b"12345678"),
              http2.frame(http2.WINDOW_UPDATE, 0, 0, b"\0\0\0\1"), http2.frame(2, 0, 3, b"\0" * 5),
              http2.frame(http2.DATA, 0, 1), b"\xff" * 100]
    while target.more():
        client = target.http2()
        flood = random.choice(floods) * 50
        while target.more() and not client.closed:
            client.send(flood)


# Names of requests (A7).

def reused_request_ids(target):
    """Takes the ids that the honest clients use, and leaves."""
    while target.more():
        extra = f"X-Request-Id: honest-{random.randrange(10)}\r\n"
        body = {"prompt": "The", "max_tokens": 64, "stream": True, "request_id": "honest-1"}
        client = target.http()
        client.sendall(target.request(body, extra=extra))
        client.recv(100)
        client.close()
        target.opened.clear()


# Readers (A8).

def slow_readers(target):
    body = {"prompt": "The", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    clients = [target.http(receive=2048) for _ in range(16)]
    for client in clients:
        client.sendall(target.request(body))
        client.setblocking(False)
    while target.more():
        for client in clients:
            try:
                client.recv(100)
            except OSError:
                pass
        time.sleep(0.05)


# Templates, patterns, tokenizers (A10).

def hostile_templates(target):
    big = "a" * MIB
    templates = ["{% set d = {} %}{% for i in range(99999) %}{{ d[s] }}{% endfor %}",
                 "{{ (s * 100).isupper() }}", "{% for i in range(9999) %}{{ s.upper() }}{% endfor %}",
                 "{{ s * 1000 * 1000 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
                 "{{ s.split('') }}", "{{ range(10**9) | list }}", "{{ '%9999999d' % 1 }}",
                 "{% for a in s %}{% for b in s %}{% for c in s %}x{% endfor %}{% endfor %}{% endfor %}"]
    while target.more():
        target.post({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
                     "chat_template": random.choice(templates), "chat_template_kwargs": {"s": big}},
                    "/v1/chat/completions")


def slow_templates(target):
    """Templates just within the limit on their work."""
    while target.more():
        template, values = random.choice(SLOW)
        target.post({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
                     "chat_template": template, "chat_template_kwargs": {"a": values}},
                    "/v1/chat/completions")


def heavy_constraints(target):
    """Constraints of which every token leaves very many ways open, until a key's tokens are gone."""
    while target.more():
        target.post({"prompt": "a", "max_tokens": 40, "temperature": 1, "n": 2,
                     **random.choice(list(HEAVY.values()))})


def long_names(target):
    """Names that an error must not return whole."""
    name = "n" * MIB
    authorization = (b"authorization", b"Bearer " + target.key.encode())
    length = b"\x80\x80\x06"  # 98,304 as a varint
    tensor = {"name": name, "datatype": "BYTES", "shape": [1], "data": ["x"]}
    while target.more():
        target.post({"inputs": [tensor]}, "/v2/models/m/infer")
        target.post({"inputs": [{**tensor, "name": "text_input", "datatype": name}]},
                    "/v2/models/m/infer")
        for body in ({"model": name, "prompt": "x"}, {"prompt": "x", name: 1},
                     {"prompt": "x", "routing_control": {name: 1}},
                     {"prompt": "x", "guided_json": {"type": name}}):
            target.post(body)
        target.post({"messages": [{"role": name, "content": "x"}]}, "/v1/chat/completions")
        target.post({"model": name}, "/v1/models/load")
        client = target.http2()
        for path in (GENERATE, b"/inference.GRPCInferenceService/ModelInfer"):
            stream = client.open(path, extra=[authorization])
            client.send_data(stream, http2.message(b"\x0a" + length + b"n" * 98304))
            client.send(http2.frame(http2.DATA, http2.END_STREAM, stream))
        client.read(0.2)
        client.close()
        target.opened.clear()


def hostile_patterns(target):
    deep = {"type": "object"}
    for _ in range(12):  # doubles at each level
        deep = {"type": "object", "properties": {"a": deep, "b": {"anyOf": [deep, {}]}}}
    constraints = [{"guided_regex": "(a|a){0,20}b|a"}, {"guided_regex": "(((a{1,99}){1,99}){1,99})"},
                   {"guided_regex": "(.*)*" * 200}, {"guided_regex": "[" * 5000},
                   {"guided_json": deep}, {"guided_json": {"$ref": "#"}},
                   {"guided_json": {"type": "array", "minItems": 10**9}},
                   {"guided_choice": ["x" * 1000 + str(i) for i in range(5000)]}]
    while target.more():
        target.post({"prompt": "x", "max_tokens": 4, **random.choice(constraints)})


def hostile_texts(target):
    texts = ["a" * MIB, "\u0301" * (MIB // 2), "<|" * (MIB // 2), " \n" * (MIB // 2), "\U0001f600" * 99999]
    while target.more():
        target.post({"prompt": random.choice(texts)}, "/tokenize")


# Neighbours (A11).

def low_priorities(target):
    while target.more():
        for priority in (-1000, -1, 0):
            target.post({"prompt": "The", "max_tokens": 256, "priority": priority, "n": 16})


def heavy_requests(target):
    """What a key may do, as much of it as its limits allow."""
    while target.more():
        target.post({"prompt": list(range(5, 1500)), "max_tokens": 500, "ignore_eos": True})


def unknown_keys(target):
    key, target.key = target.key, "a-wrong-key-0123456789"
    try:
        while target.more():
            target.post({"prompt": "x"})
            target.post({}, "/v1/models/load")
    finally:
        target.key = key


# Protocol faults (A12).

def malformed_requests(target):
    heads = [b"GET / HTTP/9.9\r\n\r\n", b"\0" * 3000, b"GET " + b"a" * 100000, b"\x16\x03\x01\0\xff",
             b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
             b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
             b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n"]
    bodies = [b"", b"{", b"[" * 100000, b'{"prompt": 1e999}', b'{"prompt": "\\ud800"}', b"\xff\xfe",
              b'{"n": 99999999999999999999}', b'{"prompt": [-1, 4294967296]}', b'{"a":1,"a":2}']
    while target.more():
        if random.random() < 0.5:
            client = target.http()
            client.sendall(random.choice(heads))
            client.close()
            target.opened.clear()
        else:
            target.post(random.choice(bodies),
                        random.choice(["/v1/completions", "/v1/chat/completions", "/tokenize",
                                       "/v2/models/m/infer", "/v1/models/load"]))


def doubled_headers(target):
    extra = f"Authorization: Bearer {target.key}\r\n"
    while target.more():
        target.post({"prompt": "x"}, extra=extra)
        target.post({"prompt": "x"}, extra="Host: evil.example\r\n")
        target.post({"prompt": "x"}, extra="Content-Length: 3\r\n")


def half_closed_and_reset(target):
    body = {"prompt": "The", "max_tokens": 64, "stream": True}
    while target.more():
        for reset in (False, True):
            client = target.http()
            client.sendall(target.request(body))
            if reset:
                client.sendall(b"GET / HTTP/1.1\r\n" * 5000)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            else:
                client.shutdown(socket.SHUT_WR)
        time.sleep(0.1)


def malformed_calls(target):
    """Messages that are no protobuf, unknown encodings, second messages, wrong lengths."""
    authorization = (b"authorization", b"Bearer " + target.key.encode())
    messages = [http2.message(b"\xff" * 50), b"\1\0\0\0\5hello", http2.message(b"") * 100,
                b"\0\xff\xff\xff\xff", b"\2" * 10, b"", http2.message(b"\x0a\xff\xff\xff\xff\x0f")]
    paths = [GENERATE, b"/moeserve.v1.Inference/Tokenize", b"/inference.GRPCInferenceService/ModelInfer",
             b"/inference.GRPCInferenceService/ModelStreamInfer", b"/none/None", b"bad", WATCH,
             b"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"]
    while target.more():
        client = target.http2()
        for _ in range(40):
            if client.closed:
                break
            extra = [authorization] if random.random() < 0.7 else []
            extra += random.choice([[], [(b"grpc-encoding", b"none-such")],
                                    [(b"grpc-timeout", b"-1S")], [authorization]])
            stream = client.open(random.choice(paths), extra=extra)
            client.send(http2.frame(http2.DATA, random.choice([0, http2.END_STREAM]), stream,
                                    random.choice(messages)))
        client.read(0.2)
        client.close()
        target.opened.clear()


def malformed_tensors(target):
    raw = base64.b64encode(b"x" * 1000).decode()
    bodies = [{"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [10**9], "data": []}]},
              {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [-1], "data": [raw]}]},
              {"inputs": [{"name": raw, "datatype": raw, "shape": [1], "data": [[[[1]]]]}] * 1000}]
    while target.more():
        target.post(random.choice(bodies), "/v2/models/m/infer")


PATTERNS = [silent_connections, slow_heads_and_bodies, connection_churn, large_answers,
            unfinished_bodies, json_of_small_values, gzip_bombs, bodies_without_keys,
            unread_answers, rapid_resets, continuation_flood, unacknowledged_settings,
            watch_streams, unfinished_messages, frame_floods, reused_request_ids, slow_readers,
            hostile_templates, hostile_patterns, hostile_texts, low_priorities, heavy_requests,
            unknown_keys, malformed_requests, doubled_headers, half_closed_and_reset,
            malformed_calls, malformed_tensors, slow_templates, heavy_constraints, long_names,
            *HANDSHAKES]


def run(target, number, names, counts):
    """Runs the patterns with these names, in a random order, until the attack stops. Counts the
    runs of each."""
    random.seed(number)
    known = {pattern.__name__: pattern for pattern in PATTERNS}
    order = []
    while not target.stopping.is_set():
        order = order or random.sample(range(len(names)), len(names))
        index = order.pop()
        target.begin()
        try:
            known[names[index]](target)
        except OSError:
            time.sleep(0.1)  # the server closed or refused a connection
        finally:
            target.finish()
        with counts.get_lock():
            counts[index] += 1

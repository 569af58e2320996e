"""Sends requests to a server, with TLS and a key if it has them, and makes answers comparable."""

import http.client
import json
import pathlib
import ssl
import sys

import grpc

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "same_bits"))
import exact  # noqa: E402

# What differs from answer to answer. Whether a prefix was in the cache depends on other requests.
VOLATILE = {"id", "call_id", "item_id", "created", "created_at", "system_fingerprint",
            "cached_tokens", "cache_read_input_tokens", "reused", "model_version", "obfuscation",
            "sequence_number"}
TIMEOUT = 120  # seconds


class Refused(Exception):
    """The server answered with another status than 200, or ended a stream with an error."""

    def __init__(self, status, text):
        super().__init__(f"{status}: {text[:300]}")
        self.status = status


class Unexpected(Exception):
    """An answer that should have been another."""


def expect(condition, text):
    if not condition:
        raise Unexpected(text)


class Session:
    """One client. `ca` is the file of the authority of a server with TLS; the certificate that the
    server shows must be valid. `v1` and `v2` are the pairs of modules (messages, stubs) of the
    services. A session is for one thread at a time."""

    def __init__(self, server, v1, v2, key=None, ca=None):
        self.host, port = server.http.split(":")
        self.port, self.grpc_address = int(port), server.grpc
        self.v1, self.v2 = v1, v2
        self.key = key
        self.ca = ca
        self.tls = ssl.create_default_context(cafile=str(ca)) if ca else None
        self.calls = 0
        self.channel = None

    def connect(self):
        if self.tls is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT)
        return http.client.HTTPSConnection(self.host, self.port, context=self.tls, timeout=TIMEOUT)

    def send(self, connection, method, path, body=None):
        """Sends a request and returns the response, which is not read yet."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        connection.request(method, path, data, headers)
        return connection.getresponse()

    def request(self, method, path, body=None):
        """Returns (status, bytes), over a connection of its own."""
        connection = self.connect()
        try:
            response = self.send(connection, method, path, body)
            return response.status, response.read()
        finally:
            connection.close()

    def answer(self, path, body):
        """Returns the comparable answer to a request with a JSON body. Refused on errors."""
        status, data = self.request("POST", path, body)
        if status != 200:
            raise Refused(status, data.decode(errors="replace"))
        text = data.decode()
        if body.get("stream") or path.endswith("generate_stream"):
            return joined_stream(path, text)
        return comparable(exact.parse(text))

    def get(self, path):
        """Returns the JSON at `path`."""
        status, data = self.request("GET", path)
        if status != 200:
            raise Refused(status, data.decode(errors="replace"))
        return json.loads(data)

    def metric(self, name, model=None, **labels):
        """Returns the sum of the samples of a metric, of one model or of all."""
        if model:
            labels["model"] = model
        text = self.request("GET", "/metrics")[1].decode()
        return exact.metric(text, f"moeserve_{name}", **labels)

    @property
    def metadata(self):
        return [("authorization", f"Bearer {self.key}")] if self.key else []

    def grpc_channel(self):
        """Returns a channel, a new one after some calls, whose handshake meets the certificate of
        that time."""
        self.calls += 1
        if self.channel is not None and self.calls % 20 == 0:
            self.close()
        if self.channel is None:
            # Without this option, channels of one process share a connection.
            options = [("grpc.use_local_subchannel_pool", 1)]
            if self.ca:
                credentials = grpc.ssl_channel_credentials(self.ca.read_bytes())
                self.channel = grpc.secure_channel(self.grpc_address, credentials, options)
            else:
                self.channel = grpc.insecure_channel(self.grpc_address, options)
        return self.channel

    def close(self):
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def inference(self):
        return self.v1[1].InferenceStub(self.grpc_channel())

    def open_inference(self):
        return self.v2[1].GRPCInferenceServiceStub(self.grpc_channel())

    def generate(self, request):
        """Returns the comparable answer to a call of Generate."""
        stream = self.inference().Generate(request, timeout=TIMEOUT, metadata=self.metadata)
        return comparable(exact.join_messages(stream))

    def call(self, method, request):
        """Returns the comparable answer to another call of the service."""
        send = getattr(self.inference(), method)
        return comparable(exact.message(send(request, timeout=TIMEOUT, metadata=self.metadata)))


def comparable(value):
    """Leaves out what differs from answer to answer."""
    if isinstance(value, dict):
        if "cache_read_input_tokens" in value:  # in the Messages API the other one is without these
            value = {**value, "input_tokens": value["input_tokens"]
                     + value["cache_read_input_tokens"]}
        return {key: comparable(item) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return value


def events(text):
    """Returns the data of the events of a stream. Refused if it has an error or was cut."""
    out = []
    for block in text.split("\n\n"):
        for line in block.split("\n"):
            if line.startswith("data: ") and line != "data: [DONE]":
                out.append(exact.parse(line.removeprefix("data: ")))
            if line.startswith("event: error"):
                raise Refused(200, block)
    if any("error" in event and event["error"] is not None for event in out):
        raise Refused(200, text[-300:])
    return out


def joined_stream(path, text):
    """Joins the events of a stream, because where it is cut into events depends on time."""
    if path.endswith("responses"):
        return joined_response(events(text))
    if path.endswith("messages"):
        return joined_message(events(text))
    if path.endswith("generate_stream"):
        return joined_generate(events(text))
    if not text.rstrip().endswith("data: [DONE]"):
        raise Refused(200, "the stream was cut")
    return joined_choices(events(text))


def merge(old, new, key=""):
    """Appends a delta to what came before."""
    if old is None or new is None:
        return new if old is None else old
    if key == "routing":
        return exact.join(old, new, "routing")
    if isinstance(new, dict):
        return {name: merge(old.get(name), new.get(name), name) for name in {**old, **new}}
    if key == "tool_calls":
        calls = {call["index"]: call for call in old}
        for call in new:
            calls[call["index"]] = merge(calls.get(call["index"]), call)
        return [calls[index] for index in sorted(calls)]
    if isinstance(new, list):
        return old + new
    if isinstance(new, str) and key in ("text", "content", "reasoning_content", "reasoning",
                                        "arguments"):
        return old + new
    return new


def joined_choices(chunks):
    """Joins the chunks of a completion or a chat."""
    choices, rest = {}, {}
    for chunk in chunks:
        chunk = comparable(chunk)
        for choice in chunk.pop("choices", []):
            index = choice["index"]
            choices[index] = merge(choices.get(index), choice)
        rest = merge(rest, {key: value for key, value in chunk.items() if value is not None})
    return {"choices": [choices[index] for index in sorted(choices)], **rest}


def joined_response(all_events):
    """Returns the response of the last event, and the joined deltas."""
    last = all_events[-1]
    if last["type"] not in ("response.completed", "response.incomplete"):
        raise Refused(200, f"the stream ended with {last['type']}")
    deltas = {}
    for event in all_events:
        if event["type"].endswith(".delta"):
            place = f"{event['type']} {event['output_index']}"
            deltas[place] = deltas.get(place, "") + event["delta"]
    return {"response": comparable(last["response"]), "deltas": deltas}


def joined_message(all_events):
    """Joins the events of the Messages API."""
    if all_events[-1]["type"] != "message_stop":
        raise Refused(200, "the stream was cut")
    blocks, ends = {}, []
    for event in all_events:
        kind = event["type"]
        if kind == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"], joined="")
        elif kind == "content_block_delta":
            delta = event["delta"]
            piece = delta.get("text", delta.get("partial_json", delta.get("thinking", "")))
            blocks[event["index"]]["joined"] += piece
        elif kind == "message_delta":
            ends.append(event)
    return comparable({"blocks": blocks, "ends": ends})


def joined_generate(all_events):
    """Joins the events of generate_stream."""
    out = {"text": "".join(event.get("text_output", "") for event in all_events)}
    return {**out, "last": comparable({k: v for k, v in all_events[-1].items()
                                       if k != "text_output"})}

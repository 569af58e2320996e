"""Tests what the gRPC port answers to clients that break HTTP/2 or gRPC's protocol."""

import gzip
import http.client
import pathlib
import random
import re
import struct
import zlib

import grpc
import pytest

import http2
from conftest import generates, start_server, stop_server

TOKENIZE = b"/moeserve.v1.Inference/Tokenize"
GENERATE = b"/moeserve.v1.Inference/Generate"
METADATA = b"/inference.GRPCInferenceService/ServerMetadata"
INFER_STREAM = b"/inference.GRPCInferenceService/ModelStreamInfer"
HEALTH = b"/grpc.health.v1.Health/Check"
REFLECTION = b"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = "3", "8", "12", "13"
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, COMPRESSION_ERROR = 1, 3, 6, 9
GARBAGE = b"\xff\xff\xff"
TEXT = b"\x12\x03The"  # a TokenizeRequest
MEMORY = 64  # MiB of --request-memory; calls over gRPC may hold a quarter as much


@pytest.fixture(scope="module")
def small_server():
    server = start_server("--request-memory", str(MEMORY))
    yield server
    assert stop_server(server) == 0


@pytest.fixture
def client(small_server, protos):
    """A connection to the server, beside another one whose calls must go on working."""
    connection = http2.Connection(small_server.grpc)
    yield connection
    connection.close()
    assert generates(small_server, protos)


def memory(server):
    text = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) // 1024


def test_the_calls_of_these_tests_are_in_order(client):
    answer = client.answer(client.call(TOKENIZE, http2.message(TEXT)))
    assert (answer[":status"], answer["grpc-status"]) == ("200", "0")
    assert client.answer(client.call(METADATA, http2.message(b"")))["grpc-status"] == "0"


@pytest.mark.parametrize("path, type_", [
    (TOKENIZE, "moeserve.v1.TokenizeRequest"),
    (GENERATE, "moeserve.v1.GenerateRequest"),
    (b"/moeserve.v1.Inference/Score", "moeserve.v1.ScoreRequest"),
    (METADATA, "inference.ServerMetadataRequest"),
    (b"/inference.GRPCInferenceService/ModelInfer", "inference.ModelInferRequest"),
    (b"/inference.GRPCInferenceService/RepositoryModelLoad",
     "inference.RepositoryModelLoadRequest"),
    (INFER_STREAM, "inference.ModelInferRequest"),
    (REFLECTION, "grpc.reflection.v1.ServerReflectionRequest"),
    (HEALTH, "grpc.health.v1.HealthCheckRequest"),
    (b"/grpc.health.v1.Health/Watch", "grpc.health.v1.HealthCheckRequest")])
def test_bytes_that_are_no_message(client, path, type_):
    answer = client.answer(client.call(path, http2.message(GARBAGE)))
    assert answer["grpc-status"] == INVALID_ARGUMENT, answer
    assert answer["x-error-code"] == "invalid_message"
    assert type_ in answer["grpc-message"] and path.decode()[1:] in answer["grpc-message"]
    assert "grpc-status-details-bin" in answer


def test_text_that_is_not_utf8(client):
    answer = client.answer(client.call(TOKENIZE, http2.message(b"\x12\x02\xc3\x28")))
    assert answer["grpc-status"] == INVALID_ARGUMENT
    assert "TokenizeRequest" in answer["grpc-message"]


def test_a_stream_ends_after_the_requests_before_a_faulty_message(client):
    """A request that the model does not know, then garbage."""
    unknown = b"\x0a\x05other"
    stream = client.call(INFER_STREAM, http2.message(unknown) + http2.message(GARBAGE))
    answer = client.answer(stream)
    assert answer["grpc-status"] == INVALID_ARGUMENT
    assert any(kind == http2.DATA and b"other" in payload
               for kind, _, of, payload in client.frames() if of == stream)


# Encodings and compressed messages.

def test_an_unknown_encoding(client):
    answer = client.answer(client.open(TOKENIZE, extra=[(b"grpc-encoding", b"snappy")]))
    assert answer["grpc-status"] == UNIMPLEMENTED
    assert "snappy" in answer["grpc-message"]
    assert answer["grpc-accept-encoding"] == "identity, deflate, gzip"


def test_a_compressed_message_without_an_encoding(client):
    answer = client.answer(client.call(TOKENIZE, http2.message(gzip.compress(TEXT), flag=1)))
    assert answer["grpc-status"] == INTERNAL
    assert "grpc-encoding" in answer["grpc-message"]


@pytest.mark.parametrize("encoding, compress", [(b"gzip", gzip.compress),
                                                (b"deflate", zlib.compress)])
def test_compressed_messages(client, encoding, compress):
    extra = [(b"grpc-encoding", encoding)]
    whole = compress(TEXT)
    for data, status in [
            (http2.message(whole, flag=1), "0"),
            (http2.message(TEXT), "0"),
            (http2.message(b"", flag=1), "0"),
            (http2.message(whole[:-1], flag=1), INVALID_ARGUMENT),
            (http2.message(whole + b"x", flag=1), INVALID_ARGUMENT),
            (http2.message(whole[:-1] + bytes([whole[-1] ^ 1]), flag=1), INVALID_ARGUMENT),
            (http2.message(TEXT, flag=1), INVALID_ARGUMENT)]:
        answer = client.answer(client.call(TOKENIZE, data, extra=extra))
        assert answer["grpc-status"] == status, (data, answer)
    for path in [HEALTH, METADATA]:
        answer = client.answer(client.call(path, http2.message(compress(b""), flag=1), extra=extra))
        assert answer["grpc-status"] == "0"


@pytest.mark.parametrize("path", [TOKENIZE, INFER_STREAM, HEALTH, REFLECTION])
def test_messages_that_inflate_beyond_the_limit(small_server, client, path):
    """64 KiB that stand for 64 MiB, in one field and in many."""
    bombs = [gzip.compress(b"\x12" + b"\x80\x80\x80\x20" + b"\0" * (64 << 20)),
             gzip.compress(b"\x3a\x00" * (32 << 20))]
    before = memory(small_server)
    for bomb in bombs:
        assert len(bomb) < 100000
        streams = []
        for _ in range(3):
            streams.append(client.open(path, extra=[(b"grpc-encoding", b"gzip")]))
            client.send_data(streams[-1], http2.message(bomb, flag=1))
        for stream in streams:
            assert client.answer(stream)["grpc-status"] == RESOURCE_EXHAUSTED
    assert memory(small_server) < before + 48


def test_inflated_messages_are_charged(small_server, client):
    """Messages of 15 MiB, of which the memory for calls holds one."""
    text = b"\x12\x80\x80\xc0\x07" + b"a" * (15 << 20)
    data = http2.message(gzip.compress(text), flag=1)
    before = memory(small_server)
    streams = [client.open(GENERATE, extra=[(b"grpc-encoding", b"gzip")]) for _ in range(8)]
    for stream in streams:
        assert client.send_data(stream, data)
        client.send(http2.frame(http2.DATA, http2.END_STREAM, stream))
    codes = [client.answer(stream)["grpc-status"] for stream in streams]
    assert set(codes) <= {INVALID_ARGUMENT, RESOURCE_EXHAUSTED}
    assert memory(small_server) < before + 128


def test_the_python_library_may_compress(small_server, protos):
    pb, rpc = protos
    with grpc.insecure_channel(small_server.grpc, compression=grpc.Compression.Gzip) as channel:
        request = pb.TokenizeRequest(text="The " * 1000)
        assert len(rpc.InferenceStub(channel).Tokenize(request).token_ids) > 900
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", compression=grpc.Compression.Gzip) == b"\x08\x01"


# The number and size of messages.

@pytest.mark.parametrize("path", [TOKENIZE, GENERATE, METADATA, HEALTH])
def test_calls_with_one_message(client, path):
    for data in [b"", http2.message(b"") * 2, http2.message(b"") * 3]:
        answer = client.answer(client.call(path, data))
        assert answer["grpc-status"] == INVALID_ARGUMENT, data
        assert "expects one message" in answer["grpc-message"]


def test_messages_behind_the_first_are_not_kept(small_server, client):
    """A client that never stops sending messages to a call that takes one is answered at once."""
    before = memory(small_server)
    stream = client.open(TOKENIZE)
    client.send(http2.frame(http2.DATA, 0, stream, http2.message(TEXT)))
    client.send(http2.frame(http2.DATA, 0, stream, http2.message(TEXT)))
    assert client.answer(stream)["grpc-status"] == INVALID_ARGUMENT
    client.send_data(stream, http2.message(b"x" * 60000) * 100)
    assert memory(small_server) < before + 16


def test_a_message_that_will_be_too_long(client):
    """Its prefix alone, and then its first bytes, which the client need not send."""
    for path in [TOKENIZE, INFER_STREAM]:
        for length in [(16 << 20) + 1, 0xffffffff]:
            stream = client.open(path)
            client.send(http2.frame(http2.DATA, 0, stream, http2.message(b"", length=length)))
            answer = client.answer(stream)
            assert answer["grpc-status"] == RESOURCE_EXHAUSTED
            assert str(length) in answer["grpc-message"]
            client.send(http2.frame(http2.DATA, 0, stream, b"x" * 1000))


def test_a_truncated_message(client):
    for data in [http2.message(TEXT, length=100), b"\0\0", http2.message(TEXT) + b"\0"]:
        answer = client.answer(client.call(TOKENIZE, data))
        assert answer["grpc-status"] == INTERNAL
        assert "within a message" in answer["grpc-message"]


def test_an_unknown_flag(client):
    answer = client.answer(client.call(TOKENIZE, http2.message(TEXT, flag=2)))
    assert answer["grpc-status"] == INTERNAL


# Header fields.

@pytest.mark.parametrize("changed, status, code, text", [
    ({b"te": None}, "200", INVALID_ARGUMENT, "te"),
    ({b":method": b"GET"}, "405", UNIMPLEMENTED, "GET"),
    ({b"content-type": b"application/json"}, "415", INVALID_ARGUMENT, "application/json"),
    ({b"content-type": None}, "415", INVALID_ARGUMENT, "content-type"),
    ({b":path": b"/moeserve.v1.Inference/Nothing"}, "200", UNIMPLEMENTED, "Nothing"),
    ({b":path": b"/"}, "200", UNIMPLEMENTED, "/"),
    ({b":authority": None}, "400", INVALID_ARGUMENT, "authority"),
    ({b"grpc-timeout": b"-5S"}, "200", INVALID_ARGUMENT, "-5S"),
    ({b"grpc-timeout": b"999999999S"}, "200", INVALID_ARGUMENT, "grpc-timeout"),
    ({b"grpc-timeout": b"5"}, "200", INVALID_ARGUMENT, "grpc-timeout"),
    ({b"x-data-bin": b"@@@"}, "200", INVALID_ARGUMENT, "x-data-bin"),
    ({b"grpc-timeout": b"99999999H"}, "200", "0", ""),
    ({b":authority": None, b"host": b"localhost"}, "200", "0", ""),
    ({b"x-data-bin": b"AAE,AA=="}, "200", "0", ""),
    ({b":method": None}, None, PROTOCOL_ERROR, None),
    ({b":path": None}, None, PROTOCOL_ERROR, None),
    ({b":scheme": None}, None, PROTOCOL_ERROR, None),
    ({b"te": b"gzip"}, None, PROTOCOL_ERROR, None),
    ({b"Upper-Case": b"x"}, None, PROTOCOL_ERROR, None),
    ({b"connection": b"close"}, None, PROTOCOL_ERROR, None),
    ({b"x": b"a\r\nb"}, None, PROTOCOL_ERROR, None),
    ({b":unknown": b"x"}, None, PROTOCOL_ERROR, None)])
def test_header_fields(client, changed, status, code, text):
    answer = client.answer(client.call(TOKENIZE, http2.message(TEXT), changed=changed))
    if text is None:
        assert answer["reset"] == code, answer
    else:
        assert (answer[":status"], answer["grpc-status"]) == (status, code), answer
        assert text in answer.get("grpc-message", "")
        assert code == "0" or "grpc-status-details-bin" in answer
    # The connection goes on.
    assert client.answer(client.call(TOKENIZE, http2.message(TEXT)))["grpc-status"] == "0"


@pytest.mark.parametrize("extra, code", [
    ([(b"grpc-timeout", b"5S"), (b"grpc-timeout", b"6S")], INVALID_ARGUMENT),
    ([(b"grpc-encoding", b"gzip"), (b"grpc-encoding", b"identity")], INVALID_ARGUMENT),
    ([(b":path", TOKENIZE)], PROTOCOL_ERROR),
    ([(b":method", b"POST")], PROTOCOL_ERROR)])
def test_repeated_header_fields(client, extra, code):
    answer = client.answer(client.open(TOKENIZE, extra=extra))
    assert answer.get("grpc-status", answer.get("reset")) == code


def test_header_fields_that_expand(small_server, client):
    """A block of 20 KiB whose fields would have 40 MB."""
    before = memory(small_server)
    value = b"v" * 3900
    length = len(value) - 127
    entry = b"\x40\x01a\x7f" + bytes([length % 128 + 128, length // 128]) + value
    block = http2.call_headers(TOKENIZE) + entry + b"\xbe" * 10000
    for _ in range(20):
        stream = client.next_stream
        client.next_stream += 2
        client.send(http2.frame(http2.HEADERS, http2.END_HEADERS, stream, block))
        assert client.answer(stream)["grpc-status"] == RESOURCE_EXHAUSTED
    assert memory(small_server) < before + 16


def test_padding(client):
    data = http2.message(TEXT)
    stream = client.open(TOKENIZE)
    client.send(http2.frame(http2.DATA, http2.END_STREAM | http2.PADDED, stream,
                            b"\x20" + data + b"\0" * 32))
    assert client.answer(stream)["grpc-status"] == "0"


# Frames of HTTP/2.

def settings(number, value):
    return http2.frame(http2.SETTINGS, 0, 0, struct.pack(">HI", number, value))


def window(stream, increment):
    return http2.frame(http2.WINDOW_UPDATE, 0, stream, struct.pack(">I", increment))


@pytest.mark.parametrize("data, code", [
    (window(0, 0x7fffffff), FLOW_CONTROL_ERROR),
    (window(0, 0), PROTOCOL_ERROR),
    (settings(2, 2), PROTOCOL_ERROR),
    (settings(4, 0x80000000), FLOW_CONTROL_ERROR),
    (settings(5, 100), PROTOCOL_ERROR),
    (http2.frame(http2.SETTINGS, 0, 0, b"12345"), FRAME_SIZE_ERROR),
    (http2.frame(http2.PING, 0, 0, b"1"), FRAME_SIZE_ERROR),
    (http2.frame(http2.DATA, 0, 99, b"x"), PROTOCOL_ERROR),
    (http2.frame(http2.DATA, 0, 0, b"x"), PROTOCOL_ERROR),
    (http2.frame(http2.RST_STREAM, 0, 99, b"\0\0\0\x08"), PROTOCOL_ERROR),
    (http2.frame(http2.HEADERS, http2.END_HEADERS, 2, http2.call_headers(TOKENIZE)),
     PROTOCOL_ERROR),
    (http2.frame(http2.PUSH_PROMISE, http2.END_HEADERS, 1, b"\0\0\0\x02"), PROTOCOL_ERROR),
    (http2.frame(http2.HEADERS, http2.END_HEADERS, 3, b"\xff\xff\xff\xff\xff"),
     COMPRESSION_ERROR)])
def test_frames_that_end_the_connection(client, data, code):
    client.call(TOKENIZE, http2.message(TEXT))
    client.send(data)
    assert client.goaway_code() == code


@pytest.mark.parametrize("increment, code", [(0, PROTOCOL_ERROR), (0x7fffffff, FLOW_CONTROL_ERROR)])
def test_windows_of_streams(client, increment, code):
    stream = client.open(TOKENIZE)
    client.send(window(stream, increment))
    assert client.answer(stream)["reset"] == code
    assert client.answer(client.call(TOKENIZE, http2.message(TEXT)))["grpc-status"] == "0"


def test_a_stream_that_depends_on_itself(client):
    """RFC 9113 has no priorities any more: the frame has no effect."""
    stream = client.open(TOKENIZE)
    client.send(http2.frame(http2.PRIORITY, 0, stream, struct.pack(">IB", stream, 1)))
    client.send(http2.frame(http2.DATA, http2.END_STREAM, stream, http2.message(TEXT)))
    assert client.answer(stream)["grpc-status"] == "0"


def test_data_behind_the_end_of_a_stream(client):
    stream = client.call(TOKENIZE, http2.message(TEXT))
    assert client.answer(stream)["grpc-status"] == "0"
    client.send(http2.frame(http2.DATA, 0, stream, http2.message(TEXT)))
    assert client.answer(client.call(TOKENIZE, http2.message(TEXT)))["grpc-status"] == "0"


def test_goaway_of_a_client_lets_its_calls_end(client):
    stream = client.open(TOKENIZE)
    client.send(http2.frame(http2.GOAWAY, 0, 0, struct.pack(">II", 0, 0)))
    client.send(http2.frame(http2.DATA, http2.END_STREAM, stream, http2.message(TEXT)))
    assert client.answer(stream)["grpc-status"] == "0"


def test_pings_are_answered(client):
    client.send(http2.frame(http2.PING, 0, 0, b"12345678"))
    client.read(0.5)
    assert (http2.PING, http2.ACK, 0, b"12345678") in client.frames()


def test_random_frames_do_not_harm_others(small_server, protos):
    """Valid frames with random changes, over many connections."""
    choose = random.Random(1)
    for _ in range(60):
        connection = http2.Connection(small_server.grpc)
        for _ in range(10):
            frames = bytearray(
                http2.frame(http2.HEADERS, http2.END_HEADERS, connection.next_stream,
                            http2.call_headers(choose.choice([TOKENIZE, GENERATE, INFER_STREAM])))
                + http2.frame(http2.DATA, http2.END_STREAM, connection.next_stream,
                              http2.message(TEXT)))
            connection.next_stream += 2
            for _ in range(choose.randrange(3)):
                frames[choose.randrange(len(frames))] = choose.randrange(256)
            connection.send(bytes(frames))
        connection.read(0.01)
        connection.close()
    assert generates(small_server, protos)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_client_of_http_1_is_told_that_it_took_the_wrong_port(small_server, protos, method):
    connection = http.client.HTTPConnection(small_server.grpc, timeout=20)
    connection.request(method, "/v1/models", b"{}" if method == "POST" else None)
    answer = connection.getresponse()
    assert answer.status == 400
    assert b"port of gRPC" in answer.read()
    connection.close()
    assert generates(small_server, protos)

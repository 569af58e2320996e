"""Tests TLS and mutual TLS on both ports with openssl, curl, Python's ssl and grpcio."""

import concurrent.futures
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time

import grpc
import pytest

from conftest import binary, measures_memory, model, slow, start_server, stop_server, wait_for

for _tool in ("openssl", "curl"):
    if shutil.which(_tool) is None:
        pytest.skip(f"{_tool} is not installed", allow_module_level=True)


def openssl(*arguments, **run):
    return subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True,
                          text=True, **run)


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name
        self.certificate = folder / f"{name}.crt"
        self.key = folder / f"{name}.key"
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-keyout", self.key, "-out", self.certificate, "-days", 2, "-subj", f"/CN={name}",
                "-addext", "keyUsage=critical,keyCertSign")

    def issue(self, name, days=1):
        """Returns the files (certificate, key) of a new certificate for 127.0.0.1."""
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout",
                key, "-out", request, "-subj", f"/CN={name}")
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self.key,
                "-set_serial", abs(hash(name)) % 10**9 + 1, "-days", days, "-extfile", extensions,
                "-out", certificate)
        return certificate, key


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")

    class Pki:
        ca = Authority(folder, "ca")
        other_ca = Authority(folder, "other-ca")
        server = ca.issue("server")
        client = ca.issue("client")
        stranger = other_ca.issue("stranger")
        expired = ca.issue("expired", days=-1)

    return Pki


def options(pki, *more, certificate=None):
    certificate = certificate or pki.server
    return ["--tls-cert", certificate[0], "--tls-key", certificate[1], *more]


@pytest.fixture(scope="module")
def tls_server(pki):
    running = start_server(*options(pki))
    yield running
    assert stop_server(running) == 0


@pytest.fixture(scope="module")
def mtls_server(pki):
    running = start_server(*options(pki, "--tls-client-ca", pki.ca.certificate))
    yield running
    assert stop_server(running) == 0


def context(pki, client=None, version=None):
    out = ssl.create_default_context(cafile=str(pki.ca.certificate))
    if client:
        out.load_cert_chain(*map(str, client))
    if version:
        out.minimum_version = out.maximum_version = version
    return out


def get(server, path, tls):
    """Returns (status, JSON)."""
    host, port = server.http.split(":")
    connection = http.client.HTTPSConnection(host, int(port), context=tls, timeout=20)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def channel(server, pki, client=None, root=None):
    read = lambda path: path.read_bytes()  # noqa: E731
    key, chain = (read(client[1]), read(client[0])) if client else (None, None)
    return grpc.secure_channel(server.grpc, grpc.ssl_channel_credentials(
        read(root or pki.ca.certificate), key, chain))


def generated(stub_channel, protos, tokens=4):
    pb, rpc = protos
    request = pb.GenerateRequest(text="The", sampling=pb.SamplingParams(max_tokens=tokens,
                                                                      ignore_eos=True))
    messages = list(rpc.InferenceStub(stub_channel).Generate(request, timeout=20))
    return messages[-1].usage.completion_tokens


def metrics(server, tls):
    host, port = server.http.split(":")
    connection = http.client.HTTPSConnection(host, int(port), context=tls, timeout=20)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in lines if not line.startswith("#")}


def serial(server, pki, port):
    """Returns the serial number of the certificate that a port shows."""
    host, number = port.split(":")
    tls = context(pki)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    tls.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection((host, int(number)), timeout=20) as plain:
        with tls.wrap_socket(plain) as secure:
            der = secure.getpeercert(binary_form=True)
    text = subprocess.run(["openssl", "x509", "-inform", "der", "-noout", "-serial"], input=der,
                          capture_output=True, check=True).stdout
    return text.decode().strip()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_serves_http(tls_server, pki, version):
    status, body = get(tls_server, "/v1/models", context(pki, version=version))
    assert (status, body["data"][0]["id"]) == (200, tls_server.name)


def test_serves_grpc(tls_server, pki, protos):
    with channel(tls_server, pki) as secure:
        assert generated(secure, protos) == 4


def test_curl_streams_and_verifies(tls_server, pki):
    body = {"prompt": "The", "max_tokens": 20, "stream": True, "ignore_eos": True}
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--json", json.dumps(body),
               f"https://{tls_server.http}/v1/completions"]
    done = subprocess.run(command + ["--cacert", pki.ca.certificate], capture_output=True,
                          text=True, timeout=30)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("data: [DONE]"), done
    # The connection ends with close_notify, so the client need not guess whether it was cut.
    done = subprocess.run(command + ["--cacert", pki.ca.certificate, "--http1.0"],
                          capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("data: [DONE]"), done
    assert subprocess.run(command + ["--cacert", pki.other_ca.certificate],
                          capture_output=True, timeout=30).returncode == 60


def s_client(port, *arguments, input=b""):
    """Returns what openssl prints."""
    done = subprocess.run(["openssl", "s_client", "-connect", port, *arguments], input=input,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30)
    return done.stdout.decode(errors="replace")


@pytest.mark.parametrize("arguments, works", [
    (["-tls1_1", "-cipher", "ALL:@SECLEVEL=0"], False),
    (["-tls1_2"], True),
    (["-tls1_3"], True),
    (["-tls1_2", "-cipher", "AES128-SHA"], False),  # without forward secrecy
    (["-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-SHA"], False),
])
def test_versions_and_ciphers(tls_server, arguments, works):
    for port in (tls_server.http, tls_server.grpc):
        text = s_client(port, "-alpn", "h2,http/1.1", *arguments)
        assert ("Verify return code" in text and "Cipher is (NONE)" not in text) == works, text


def test_alpn(tls_server):
    def chosen(port, offered):
        for line in s_client(port, "-alpn", offered).splitlines():
            if line.startswith("ALPN protocol:"):
                return line.split()[-1]
        return None

    assert chosen(tls_server.http, "h2,http/1.1") == "http/1.1"
    assert chosen(tls_server.http, "h2") is None
    assert chosen(tls_server.grpc, "h2,http/1.1") == "h2"
    assert chosen(tls_server.grpc, "http/1.1") is None


def test_renegotiation_is_refused(tls_server):
    text = s_client(tls_server.http, "-tls1_2", input=b"R\n")
    assert "no renegotiation" in text.lower(), text


def test_plain_text_is_told_to_use_tls(tls_server, pki):
    before = metrics(tls_server, context(pki))
    host, port = tls_server.http.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.request("GET", "/health")
    response = connection.getresponse()
    assert response.status == 400
    assert json.loads(response.read())["error"]["code"] == "tls_required"
    with grpc.insecure_channel(tls_server.grpc) as plain:
        with pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(plain).result(timeout=0.5)
    after = metrics(tls_server, context(pki))
    for interface in ("http", "grpc"):
        name = f'moeserve_tls_handshake_failures_total{{interface="{interface}"}}'
        assert after[name] > before[name]


def test_silent_and_slow_clients_block_nobody(tls_server, pki, protos):
    silent = []
    for port in (tls_server.http, tls_server.grpc):
        host, number = port.split(":")
        for i in range(50):
            connection = socket.create_connection((host, int(number)))
            if i % 2:
                connection.sendall(b"\x16\x03\x01\x02")  # the start of a handshake
            silent.append(connection)
    began = time.monotonic()
    assert get(tls_server, "/health", context(pki))[0] == 200
    with channel(tls_server, pki) as secure:
        assert generated(secure, protos) == 4
    assert time.monotonic() - began < 3
    for connection in silent:
        connection.close()


def test_no_handshake_is_lost(tls_server, pki):
    host, port = tls_server.http.split(":")
    tls = context(pki)

    def connect(_):
        with socket.create_connection((host, int(port)), timeout=20) as plain:
            with tls.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
                secure.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
                               b"Connection: close\r\n\r\n")
                return secure.recv(12)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(connect, range(1500))) == {b"HTTP/1.1 200"}


def client_hello(pki):
    """Returns the first message of a TLS client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context(pki).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
    return outgoing.read()


class Memory:
    """Measures how much the memory of a server has grown."""

    def __init__(self, server):
        self.status = pathlib.Path(f"/proc/{server.process.pid}/status")
        self.before = self.read()

    def read(self):
        return int(re.search(r"VmRSS:\s+(\d+) kB", self.status.read_text())[1])

    def grown_kib(self):
        return self.read() - self.before


def open_handshakes(address, hello, count):
    """Returns connections on which `hello` was sent and no answer is read."""
    host, port = address.split(":")
    out = []
    for _ in range(count):
        out.append(socket.create_connection((host, int(port)), timeout=20))
        out[-1].sendall(hello)
    return out


@measures_memory
def test_clients_that_send_nothing_take_little_memory(pki):
    server = start_server(*options(pki))
    for address in (server.http, server.grpc):
        memory = Memory(server)
        silent = open_handshakes(address, b"", 200)
        get(server, "/health", context(pki))
        assert memory.grown_kib() < 200 * 20
        for connection in silent:
            connection.close()
    assert stop_server(server) == 0


@measures_memory
def test_half_handshakes_take_a_bounded_part_of_the_memory(pki):
    """A port with a quarter of 64 MiB takes 146 connections of about 110 KiB."""
    server = start_server(*options(pki, "--request-memory", "64"))
    hello = client_hello(pki)
    get(server, "/health", context(pki))
    for proto, address in (("http", server.http), ("grpc", server.grpc)):
        memory = Memory(server)
        half = open_handshakes(address, hello, 500)
        over = f'moeserve_connections_over_limit_total{{proto="{proto}",limit="server"}}'
        assert wait_for(lambda: metrics(server, context(pki))[over] >= 300)
        assert get(server, "/health", context(pki))[0] == 200
        assert memory.grown_kib() < 24 << 10
        for connection in half:
            connection.close()
    assert stop_server(server) == 0


@slow
@measures_memory
def test_memory_of_handshakes_goes_back_to_the_system(pki):
    server = start_server(*options(pki))
    get(server, "/health", context(pki))
    memory = Memory(server)
    half = open_handshakes(server.http, client_hello(pki), 400)
    assert wait_for(lambda: memory.grown_kib() > 20 << 10, 10)
    for connection in half:
        connection.close()
    assert wait_for(lambda: memory.grown_kib() < 8 << 10, 20)
    assert stop_server(server) == 0


def test_a_disconnected_client_is_noticed(tls_server, pki):
    tls = context(pki)
    running = 'moeserve_requests_running{model="' + tls_server.name + '"}'
    body = json.dumps({"prompt": "The", "max_tokens": 8000, "ignore_eos": True}).encode()
    request = (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
               b"application/json\r\nContent-Length: %d\r\n\r\n" % len(body)) + body
    host, port = tls_server.http.split(":")
    plain = socket.create_connection((host, int(port)))
    secure = tls.wrap_socket(plain, server_hostname="127.0.0.1")
    secure.sendall(request)
    assert wait_for(lambda: metrics(tls_server, tls)[running] == 1)
    secure.close()
    assert wait_for(lambda: metrics(tls_server, tls)[running] == 0)


def test_clients_must_have_a_certificate(mtls_server, pki, protos):
    # Probes have none.
    assert get(mtls_server, "/health/ready", context(pki))[0] == 200
    status, body = get(mtls_server, "/v1/models", context(pki))
    assert (status, body["error"]["code"]) == (403, "client_certificate_required")
    assert get(mtls_server, "/v1/models", context(pki, client=pki.client))[0] == 200
    for client in (pki.stranger, pki.expired):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get(mtls_server, "/health", context(pki, client=client))
    with channel(mtls_server, pki, client=pki.client) as secure:
        assert generated(secure, protos) == 4
    for client in (None, pki.stranger, pki.expired):
        with channel(mtls_server, pki, client=client) as refused:
            with pytest.raises(grpc.FutureTimeoutError):
                grpc.channel_ready_future(refused).result(timeout=0.5)


def test_mutual_tls_allows_listening_on_all_addresses(pki):
    def check(*arguments):
        return subprocess.run([binary(), "config", "show", "--model", model(), "--http",
                               "0.0.0.0:8080", *arguments], capture_output=True, timeout=20)

    assert check(*options(pki)).returncode == 1
    assert check(*options(pki, "--tls-client-ca", pki.ca.certificate)).returncode == 0
    for wrong in (["--tls-cert", pki.server[0]], ["--tls-client-ca", pki.ca.certificate]):
        assert check("--allow-open", *wrong).returncode == 1


def replace(link, target):
    """Lets a symbolic link name another folder, as Kubernetes replaces a mounted secret."""
    new = link.with_name("new")
    new.symlink_to(target)
    new.rename(link)


@pytest.mark.parametrize("by_signal", [False, True])
def test_certificates_are_reloaded(pki, protos, tmp_path, by_signal):
    for name in ("first", "second", "broken", "pipe"):
        (tmp_path / name).mkdir()
        for kind, source in zip(("crt", "key"), pki.ca.issue(f"{name}-{by_signal}")):
            shutil.copy(source, tmp_path / name / f"tls.{kind}")
    shutil.copy(pki.client[1], tmp_path / "broken/tls.key")  # the key of another certificate
    (tmp_path / "pipe/tls.key").unlink()
    os.mkfifo(tmp_path / "pipe/tls.key")  # nobody ever writes to it
    live = tmp_path / "live"
    live.symlink_to(tmp_path / "first")
    server = start_server(*options(pki, certificate=(live / "tls.crt", live / "tls.key")))

    def reload(target):
        replace(live, tmp_path / target)
        if by_signal:
            server.process.send_signal(signal.SIGHUP)

    def count(result):
        return metrics(server, context(pki))[f'moeserve_tls_reloads_total{{result="{result}"}}']

    first = serial(server, pki, server.http)
    assert serial(server, pki, server.grpc) == first
    with channel(server, pki) as secure:
        assert generated(secure, protos) == 4
        reload("broken")
        assert wait_for(lambda: count("error") >= 1, 10)
        assert serial(server, pki, server.http) == first
        failed = count("error")
        reload("pipe")
        assert wait_for(lambda: count("error") > failed, 10)
        reload("second")
        assert wait_for(lambda: serial(server, pki, server.http) != first, 10)
        assert serial(server, pki, server.grpc) != first
        assert generated(secure, protos) == 4  # over the connection that was open
    assert count("ok") >= 1
    expiry = metrics(server, context(pki))["moeserve_tls_certificate_expiry_timestamp_seconds"]
    assert 0 < expiry - time.time() < 86400 + 60
    assert stop_server(server) == 0


def test_the_health_check_uses_tls(tls_server, mtls_server, pki):
    def health(server, *arguments):
        return subprocess.run([binary(), "health", "--http", server.http, *arguments],
                              capture_output=True, text=True, timeout=20)

    for server in (tls_server, mtls_server):
        assert health(server, "--tls-cert", pki.server[0]).returncode == 0
        refused = health(server, "--tls-cert", pki.client[0])
        assert refused.returncode == 1 and "certificate" in refused.stderr
        assert health(server).returncode == 1


def test_unusable_files_are_refused_at_start(pki, tmp_path):
    encrypted = tmp_path / "encrypted.key"
    openssl("ec", "-in", pki.server[1], "-aes128", "-passout", "pass:x", "-out", encrypted)
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x00garbage" * 100)
    large = tmp_path / "large"
    large.write_bytes(b"x" * (2 << 20))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    good = dict(zip(("--tls-cert", "--tls-key"), pki.server))
    good["--tls-client-ca"] = pki.ca.certificate
    for option in good:
        for file, words in ((tmp_path / "none", "No such file"), (garbage, "PEM"),
                            (large, "expected at most 1048576 bytes"),
                            (pipe, "regular file"), (tmp_path, "regular file")):
            given = dict(good, **{option: file})
            done = subprocess.run([binary(), "serve", "--model", model(), "--http", "127.0.0.1:0",
                                   "--grpc", "127.0.0.1:0", *sum(map(list, given.items()), [])],
                                  capture_output=True, text=True, timeout=20)
            assert done.returncode == 1 and str(file) in done.stderr and words in done.stderr, done
    for key, words in ((encrypted, "encrypted"), (pki.client[1], "does not belong")):
        given = dict(good, **{"--tls-key": key})
        done = subprocess.run([binary(), "serve", "--model", model(), "--http", "127.0.0.1:0",
                               "--grpc", "127.0.0.1:0", *sum(map(list, given.items()), [])],
                              capture_output=True, text=True, timeout=20)
        assert done.returncode == 1 and str(key) in done.stderr and words in done.stderr, done

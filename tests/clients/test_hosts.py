"""Which host names a server accepts with the options of its command line."""

import http.client

import pytest

from conftest import start_server


def status(server, host, path="/v1/models"):
    connection = http.client.HTTPConnection(server.http, timeout=10)
    connection.request("GET", path, headers={"Host": host})
    return connection.getresponse().status


@pytest.fixture
def started():
    servers = []

    def start(*arguments):
        servers.append(start_server(*arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.process.terminate()
        server.process.wait()


def test_on_loopback_only_local_names(started):
    server = started()
    assert status(server, server.http) == 200
    assert status(server, "localhost") == 200
    assert status(server, "[::1]") == 200
    assert status(server, "evil.example") == 403
    assert status(server, "evil.example", "/health/ready") == 200


def test_given_names_replace_the_default(started):
    server = started("--allowed-hosts", "llm.example")
    assert status(server, "llm.example") == 200
    assert status(server, "localhost") == 403


def test_with_keys_every_name(started, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-the-tests\n")
    server = started("--api-key-file", str(keys))
    assert status(server, "llm.example") == 401  # the host is accepted, the missing key is not

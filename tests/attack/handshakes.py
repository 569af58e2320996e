"""Attacks on TLS, before a client is known: patterns as those of patterns.py. Without TLS, the server
sees the same bytes as requests that are none."""

import random
import ssl
import time

BYTE_SECONDS = 0.02  # between two bytes of a slow handshake


def tls_context(protocol):
    """Returns the TLS of a client that trusts every server and offers one protocol."""
    out = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    out.check_hostname, out.verify_mode = False, ssl.CERT_NONE
    out.set_alpn_protocols([protocol])
    return out


def client_hello():
    """Returns the first message of a TLS client."""
    outgoing = ssl.MemoryBIO()
    tls = tls_context("http/1.1").wrap_bio(ssl.MemoryBIO(), outgoing)
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


def ports(target):
    return (target.http_port, target.grpc_port)


def half_handshakes(target):
    """Begins as many handshakes as an address may have connections, and reads nothing."""
    hello = client_hello()
    while target.more():
        for count in range(150):
            if target.more():
                try:
                    target.connect(ports(target)[count % 2]).sendall(hello)
                except OSError:
                    time.sleep(0.02)
        time.sleep(2)
        target.finish()


def slow_handshakes(target):
    """Sends handshakes byte by byte."""
    hello = client_hello()
    clients = [target.connect(port) for port in ports(target) * 30]
    for byte in range(len(hello)):
        for client in list(clients):
            try:
                client.sendall(hello[byte:byte + 1])
            except OSError:
                clients.remove(client)
        if not target.more():
            return
        time.sleep(BYTE_SECONDS)
    target.hold()


def garbage_handshakes(target):
    hello = client_hello()
    while target.more():
        cut = random.randrange(len(hello))
        garbage = random.choice([
            b"\x16\x03\x01\xff\xff" + random.randbytes(5000), random.randbytes(300),
            hello[:cut] + random.randbytes(200), hello * 5, b"\x16\x03\x01\0\0" * 500,
            b"\x80\x2e\x01\0\x02" + bytes(60), b"GET / HTTP/1.1\r\n\r\n"])
        connection = target.connect(random.choice(ports(target)))
        try:
            connection.sendall(garbage)
            connection.recv(1000)
        except OSError:
            pass
        finally:
            connection.close()
            target.opened.clear()


def handshake_storms(target):
    """Has the server sign as often as it does, with the least work of its own, and goes before it
    has told who it is."""
    hello = client_hello()
    while target.more():
        connection = target.connect(random.choice(ports(target)))
        try:
            connection.sendall(hello)
            connection.recv(4096)
        except OSError:
            pass
        finally:
            connection.close()
            target.opened.clear()


def handshakes_without_requests(target):
    while target.more():
        target.http().close()
        target.http2().close()
        target.opened.clear()


HANDSHAKES = [half_handshakes, slow_handshakes, garbage_handshakes, handshake_storms,
              handshakes_without_requests]

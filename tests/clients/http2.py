"""A raw HTTP/2 client that sends what no library would send."""

import base64
import select
import socket
import struct
import time

import hpack

(DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE,
 CONTINUATION) = range(10)
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name, value):
    """A header field without indexing (RFC 7541, section 6.2.2)."""
    def text(data):
        assert len(data) < 127 + 128
        return bytes([len(data)] if len(data) < 127 else [127, len(data) - 127]) + data
    return b"\0" + text(name) + text(value)


def call_headers(path, extra=(), changed=None):
    """Returns the header block of a call. `changed` gives other values to fields; None leaves a
    field out."""
    fields = {b":method": b"POST", b":scheme": b"http", b":path": path,
              b":authority": b"localhost", b"te": b"trailers",
              b"content-type": b"application/grpc"}
    fields.update(changed or {})
    given = [field for field in fields.items() if field[1] is not None]
    return b"".join(header(*field) for field in [*given, *extra])


def message(data, flag=0, length=None):
    """Returns a message with its prefix, which may lie about the length."""
    return bytes([flag]) + struct.pack(">I", len(data) if length is None else length) + data


def base64_bytes(text):
    """Decodes the value of a binary field, which has no padding."""
    return base64.b64decode(text + "=" * (-len(text) % 4))


class Connection:
    def __init__(self, address, acknowledge=True, source="", tls=None):
        """`tls`: the context of a connection with TLS, which offers h2."""
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=5,
                                               source_address=(source, 0))
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)
        self.received = b""
        self.closed = False
        self.next_stream = 1
        self.sent = 0  # bytes of DATA
        self.send(PREFACE + frame(SETTINGS, 0, 0))
        if acknowledge:
            self.send(frame(SETTINGS, ACK, 0))

    def send(self, data):
        """Sends everything; notes if the server has closed the connection."""
        try:
            self.socket.sendall(data)
        except OSError:
            self.closed = True
        self.read(0)

    def open(self, path, end=False, extra=(), changed=None):
        """Opens a stream and returns its number."""
        stream = self.next_stream
        self.next_stream += 2
        self.send(frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream,
                        call_headers(path, extra, changed)))
        return stream

    def call(self, path, data, **options):
        """Opens a stream, sends `data` and ends it. Returns the stream's number."""
        stream = self.open(path, **options)
        self.send(frame(DATA, END_STREAM, stream, data))
        return stream

    def answer(self, stream, seconds=5):
        """Waits for the end of a stream and returns its header fields and trailers as one
        dictionary. "reset" has the error code of RST_STREAM if the stream had no other end, and
        "goaway" that of GOAWAY if the connection has ended instead."""
        end = time.monotonic() + seconds
        while True:
            found, ended, decoder = {}, False, hpack.Decoder()
            for kind, flags, of, payload in self.frames():
                if kind == HEADERS:
                    assert flags & END_HEADERS
                    fields = decoder.decode(payload)
                    if of != stream:
                        continue
                    assert not ended, "the server sent something behind the end of a stream"
                    found.update(fields)
                if of == stream and kind in (DATA, HEADERS):
                    ended = ended or bool(flags & END_STREAM)
                elif of == stream and kind == RST_STREAM and not ended:
                    found["reset"] = struct.unpack(">I", payload)[0]
                    ended = True
                elif kind == GOAWAY and self.closed and not ended:
                    found["goaway"] = struct.unpack(">I", payload[4:8])[0]
                    ended = True
            if ended:
                return found
            assert time.monotonic() < end and not self.closed, f"no answer, but {found}"
            self.read(0.02)

    def send_data(self, stream, data):
        """Sends DATA as far as the connection's window lets it. Returns whether everything was
        sent within five seconds. The window of a new stream must have room for `data`."""
        end = time.monotonic() + 5
        while data and not self.closed and time.monotonic() < end:
            window = 65535 - self.sent + sum(
                struct.unpack(">I", payload)[0] for kind, _, of, payload in self.frames()
                if kind == WINDOW_UPDATE and of == 0)
            part = data[:min(window, 16384)]
            if part:
                self.send(frame(DATA, 0, stream, part))
                self.sent += len(part)
                data = data[len(part):]
            else:
                self.read(0.02)
        return not data

    def read(self, seconds):
        """Reads what arrives within `seconds`, or until the server closes the connection."""
        end = time.monotonic() + seconds
        while not self.closed:
            left = max(0, end - time.monotonic())
            ready = select.poll()  # select() takes no descriptor above 1023
            ready.register(self.socket, select.POLLIN)
            # What TLS has decrypted already is not in the socket any more.
            waiting = getattr(self.socket, "pending", int)()
            if not waiting and not ready.poll(1000 * left):
                return
            try:
                data = self.socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self.closed = True
            self.received += data

    def frames(self):
        """Returns the complete frames received so far as (kind, flags, stream, payload)."""
        out, at = [], 0
        while at + 9 <= len(self.received):
            length = struct.unpack(">I", b"\0" + self.received[at:at + 3])[0]
            kind, flags, stream = struct.unpack(">BBI", self.received[at + 3:at + 9])
            if at + 9 + length > len(self.received):
                break
            out.append((kind, flags, stream, self.received[at + 9:at + 9 + length]))
            at += 9 + length
        return out

    def goaway(self):
        """Returns the text of the server's GOAWAY frame; None if there was none."""
        # A cheap test first: attackers call this after every frame that they send.
        if b"\x7f\xff\xff\xff\0\0\0" not in self.received:
            return None
        return next((payload[8:].decode() for kind, _, _, payload in self.frames()
                     if kind == GOAWAY), None)

    def goaway_code(self):
        """Reads until the server closes the connection. Returns the error code of its GOAWAY."""
        self.read(5)
        assert self.closed
        return next((struct.unpack(">I", payload[4:8])[0] for kind, _, _, payload in self.frames()
                     if kind == GOAWAY), None)

    def wait_for_goaway(self):
        """Reads until the server closes the connection, and returns the text of its GOAWAY."""
        self.read(5)
        return self.goaway() or ""

    def close(self):
        self.socket.close()

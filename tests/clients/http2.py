"""A raw HTTP/2 client that sends what no library would send."""

import select
import socket
import struct
import time

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name, value):
    """A header field without indexing (RFC 7541, section 6.2.2)."""
    def text(data):
        assert len(data) < 127
        return bytes([len(data)]) + data
    return b"\0" + text(name) + text(value)


def call_headers(path, extra=()):
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path),
              (b":authority", b"localhost"), (b"te", b"trailers"),
              (b"content-type", b"application/grpc"), *extra]
    return b"".join(header(*field) for field in fields)


def message(data):
    return b"\0" + struct.pack(">I", len(data)) + data


class Connection:
    def __init__(self, address, acknowledge=True, source=""):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=5,
                                               source_address=(source, 0))
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

    def open(self, path, end=False, extra=()):
        """Opens a stream and returns its number."""
        stream = self.next_stream
        self.next_stream += 2
        self.send(frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream,
                        call_headers(path, extra)))
        return stream

    def send_data(self, stream, data):
        """Sends DATA as far as the connection's window lets it. Returns whether everything was
        sent within a second. The window of a new stream must have room for `data`."""
        end = time.monotonic() + 1
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
            if not ready.poll(1000 * left):
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
        if b"\x7f\xff\xff\xff\0\0\0\x0b" not in self.received:
            return None
        return next((payload[8:].decode() for kind, _, _, payload in self.frames()
                     if kind == GOAWAY), None)

    def wait_for_goaway(self):
        """Reads until the server closes the connection, and returns the text of its GOAWAY."""
        self.read(5)
        return self.goaway() or ""

    def close(self):
        self.socket.close()

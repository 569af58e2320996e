"""Starts the server of this package, for notebooks and tests."""

from __future__ import annotations

import os
import signal
import subprocess
from types import TracebackType

from moeserve import program


class Server:
    """A server with one model, on free ports of this machine.

        with Server("path/of/model", "--routing-records") as server:
            client = Client(server.grpc_address)

    `arguments` are further options of `moeserve serve`. RuntimeError if the server does not start;
    the reason is on standard error.
    """

    def __init__(self, model: str | os.PathLike[str], *arguments: str) -> None:
        self._process = subprocess.Popen(
            [program.path(), "serve", "--model", os.fspath(model), "--http", "127.0.0.1:0",
             "--grpc", "127.0.0.1:0", "--log-level", "warning", *arguments],
            stdout=subprocess.PIPE, text=True)
        addresses: dict[str, str] = {}
        assert self._process.stdout is not None
        while len(addresses) < 2:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server ended with status {self._process.wait()}")
            kind, _, address = line.strip().partition(" listening on ")
            addresses[kind] = address
        self.http_address = addresses["http"]
        self.grpc_address = addresses["grpc"]

    def stop(self) -> int:
        """Lets running requests end, and returns the exit status of the server."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=60)
        finally:
            self._process.kill()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()

"""Chats over HTTP, with the standard library. gRPC has no chats."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from typing import Any

from moeserve.answers import Error, chat_piece
from moeserve.results import Piece


class ChatApi:
    """Calls /v1/chat/completions. Thread-safe. Calls raise Error."""

    def __init__(self, grpc_address: str, address: str | None, api_key: str | None,
                 ca_file: str | os.PathLike[str] | None, timeout: float) -> None:
        host, _, port = grpc_address.rpartition(":")
        if address is None and port == "8081":
            address = f"{host}:8080"  # the default ports of a server
        self._url = address and f"{'http' if ca_file is None else 'https'}://{address}"
        self._tls = None if ca_file is None else ssl.create_default_context(cafile=ca_file)
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        with _broken(), self._open(body) as answer:
            out: dict[str, Any] = json.load(answer)
        return out

    def stream(self, body: dict[str, Any]) -> Generator[Piece, None, None]:
        """Yields the pieces of all choices. Closing the iterator ends the request."""
        ended = False
        with _broken(), self._open(body) as answer:
            for line in answer:
                data = line.decode().strip()
                if not data.startswith("data: "):
                    continue
                if data == "data: [DONE]":
                    ended = True
                    break
                event = json.loads(data[6:])
                if "error" in event:
                    raise _error(event, "INTERNAL")
                for choice in event["choices"]:
                    yield chat_piece(choice)
        if not ended:
            raise Error("UNAVAILABLE", "the stream was cut")

    def _open(self, body: dict[str, Any]) -> Any:
        if self._url is None:
            raise ValueError("chats go over HTTP: expected http_address, the server's HOST:PORT of "
                             "HTTP, found none")
        request = urllib.request.Request(f"{self._url}/v1/chat/completions",
                                         json.dumps(body).encode(), self._headers)
        try:
            return urllib.request.urlopen(request, timeout=self._timeout, context=self._tls)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            try:
                raise _error(json.loads(text), str(error.code)) from None
            except ValueError:
                raise Error(str(error.code), text) from None


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    """Turns errors of the connection into Error."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        late = isinstance(reason, TimeoutError)
        raise Error("DEADLINE_EXCEEDED" if late else "UNAVAILABLE",
                    str(reason) or type(reason).__name__) from None


def _error(answer: dict[str, Any], code: str) -> Error:
    error = answer["error"]
    return Error(str(error.get("code") or code), str(error.get("message", "")))

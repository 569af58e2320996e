"""Runs moeserve for one model, to ask it for log-probabilities and routes."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request

from pytorch_export.mapping import ExportError


class Server:
    """A server in f32 on a free port of this machine. ExportError if it does not start."""

    def __init__(self, folder, program=None):
        program = program or os.environ.get("MOESERVE_BIN") or shutil.which("moeserve")
        if not program:
            raise ExportError("moeserve: expected the program on the search path, in $MOESERVE_BIN "
                              "or as the argument moeserve, found none")
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [program, "serve", "--model", str(folder), "--dtype", "f32", "--kv-cache-dtype", "f32",
             "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--max-num-seqs", "1",
             "--routing-records", "--no-prefix-cache", "--log-level", "error"],
            stdout=subprocess.PIPE, stderr=self._log, text=True)
        for line in self._process.stdout:
            if found := re.match(r"http listening on (\S+)", line):
                self._url = f"http://{found.group(1)}"
                return
        self._process.wait()
        self._log.seek(0)
        reason = (self._log.read().strip().splitlines() or ["it ended without a message"])[-1]
        self.stop()
        raise ExportError(f"moeserve cannot serve {folder}: {reason}")

    def prompt(self, token_ids, top):
        """Returns a choice of /v1/completions with the prompt's log-probabilities and routes."""
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top,
                "return_routing": True}
        request = urllib.request.Request(self._url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)["choices"][0]
        except urllib.error.HTTPError as error:
            raise ExportError(f"moeserve: {error.read().decode(errors='replace')}") from None

    def stop(self):
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        finally:
            self._process.kill()
            self._process.stdout.close()
            self._log.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

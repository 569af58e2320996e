"""What an operator does while the server is in use: swaps models, replaces keys and certificates,
reloads; and what goes wrong with that: broken files, pipes in their place, broken checkpoints."""

import json
import os
import shutil
import signal
import socket
import ssl
import time

import probes
from account import Account
from session import expect

SCOPES = ["generate", "statistics", "routing", "admin"]
EFFECT_SECONDS = 60  # within which a change has its effect, also on a busy machine


def wait_until(condition, what):
    end = time.monotonic() + EFFECT_SECONDS
    while not condition():
        expect(time.monotonic() < end, f"{what}: not within {EFFECT_SECONDS} s")
        time.sleep(0.1)


class Keys:
    """The key file. It has a key `current` that each new file replaces."""

    def __init__(self, file, names):
        self.file, self.names = file, names
        self.current = self.key("rotating-0")
        self.number = 0
        self.changing = False  # whether the key in force may be another one than `current`
        self.write(self.current)

    @staticmethod
    def key(name):
        return f"soak-{name}-0123456789"

    def write(self, rotating):
        keys = [{"name": name, "key": self.key(name), "scopes": SCOPES} for name in self.names]
        keys.append({"name": "rotating", "key": rotating, "scopes": ["generate"]})
        keys.append({"name": "limited", "key": self.key("limited"), "scopes": ["generate"],
                     "limits": {"requests_per_minute": 30, "max_concurrent_requests": 1}})
        replace(self.file, json.dumps({"keys": keys}))

    def change(self, accepts):
        """Replaces the current key. accepts(key) tells whether the server accepts a key."""
        old = self.current
        self.number += 1
        self.changing = True
        new = self.key(f"rotating-{self.number}")
        self.write(new)
        wait_until(lambda: accepts(new), "the new key")
        expect(not accepts(old), "the old key is still accepted")
        self.current = new
        self.changing = False


def replace(file, text=None):
    """Puts a file, or a pipe without a writer, in the place of another, in one step."""
    new = file.with_name(file.name + ".new")
    new.unlink(missing_ok=True)
    if text is None:
        os.mkfifo(new)
    else:
        new.write_text(text)
        new.chmod(0o600)
    new.rename(file)


class Certificates:
    """The files of certificate and key, and the pairs that they are replaced by."""

    def __init__(self, folder, authority):
        self.authority = authority
        self.link = folder / "tls"
        self.pairs = []
        for number in range(3):
            self.pairs.append(self.folder(folder, f"pair-{number}"))
        self.broken = self.folder(folder, "broken")
        shutil.copy(self.pairs[0] / "tls.key", self.broken / "tls.key")  # of another certificate
        self.pipe = self.folder(folder, "pipe")
        (self.pipe / "tls.key").unlink()
        os.mkfifo(self.pipe / "tls.key")
        self.number = 0
        self.show(self.pairs[0])

    def folder(self, parent, name):
        folder = parent / name
        folder.mkdir()
        for kind, source in zip(("crt", "key"), self.authority.issue(name)):
            shutil.copy(source, folder / f"tls.{kind}")
        return folder

    def show(self, folder):
        """Lets the link name another folder, as Kubernetes replaces a mounted secret."""
        new = self.link.with_name("tls.new")
        new.symlink_to(folder)
        new.rename(self.link)

    def next(self):
        self.number = (self.number + 1) % len(self.pairs)
        return self.pairs[self.number]


class Operator:
    def __init__(self, server, session, keys, certificates, config, account, report):
        self.process, self.session, self.report = server.process, session, report
        self.keys, self.certificates, self.config = keys, certificates, config
        self.account = account
        self.steps = [self.swap, self.replace_keys, self.replace_certificate, self.settle,
                      self.swap_over_grpc, self.break_keys, self.reload, self.temporary_model,
                      self.break_certificate, self.swap, self.pipe_for_keys,
                      self.pipe_for_certificate, self.swap_and_reload, self.broken_checkpoints]
        self.turn = 0

    def metric(self, name, **labels):
        return self.session.metric(name, **labels)

    def load(self, body):
        """Returns (status, text)."""
        status, text = self.session.request("POST", "/v1/models/load", body)
        return status, text.decode()

    def swap(self):
        names = list(probes.MODELS)
        name = names[self.turn % len(names)]
        before = self.metric("model_version", model=name)
        status, text = self.load({"model": name})
        expect(status == 200, f"load of {name}: {status} {text}")
        expect(self.metric("model_version", model=name) > before, "the version is the one before")

    def swap_over_grpc(self):
        pb = self.session.v2[0]
        self.session.open_inference().RepositoryModelLoad(
            pb.RepositoryModelLoadRequest(model_name="split"), timeout=60,
            metadata=self.session.metadata)

    def swap_and_reload(self):
        for _ in range(3):
            self.hang_up()
            self.swap()

    def settle(self):
        """Compares the statistics with the account, and replaces the model."""
        with self.account.settled():
            wrong = self.account.compare(self.session)
            if self.account.tokens:
                self.report.count("versions whose statistics were right", not wrong)
            status, text = self.load({"model": Account.MODEL})
            expect(status == 200, f"load: {status} {text}")
            self.account.renew()
        expect(not wrong, f"statistics: {wrong[:5]}")

    def hang_up(self):
        self.process.send_signal(signal.SIGHUP)

    def replace_keys(self):
        self.keys.change(self.accepts)

    def accepts(self, key):
        mine, self.session.key = self.session.key, key
        try:
            status, _ = self.session.request("GET", "/v1/models")
        finally:
            self.session.key = mine
        expect(status in (200, 401), f"status {status}")
        return status == 200

    def with_bad_keys(self, text):
        failed = self.metric("key_reloads_total", result="failed")
        replace(self.keys.file, text)
        self.hang_up()
        wait_until(lambda: self.metric("key_reloads_total", result="failed") > failed,
                   "the refusal of the key file")
        expect(self.accepts(self.keys.current), "a key went away with a bad file")
        self.replace_keys()

    def break_keys(self):
        self.with_bad_keys('{"keys": [{"name": "cut')

    def pipe_for_keys(self):
        self.with_bad_keys(None)

    def serials(self):
        """Returns the certificates that both ports show."""
        out = []
        for host, port in ((self.session.host, self.session.port),
                           self.session.grpc_address.split(":")):
            tls = ssl.create_default_context(cafile=str(self.session.ca))
            tls.set_alpn_protocols(["h2", "http/1.1"])
            with socket.create_connection((host, int(port)), timeout=20) as plain:
                with tls.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
                    out.append(secure.getpeercert()["serialNumber"])
        return out

    def replace_certificate(self):
        before = self.serials()
        self.certificates.show(self.certificates.next())
        wait_until(lambda: all(a != b for a, b in zip(before, self.serials())),
                   "the new certificate")

    def with_bad_certificate(self, folder):
        failed, before = self.metric("tls_reloads_total", result="error"), self.serials()
        self.certificates.show(folder)
        self.hang_up()
        wait_until(lambda: self.metric("tls_reloads_total", result="error") > failed,
                   "the refusal of the certificate")
        expect(self.serials() == before, "the certificate went away with a bad one")
        self.replace_certificate()

    def break_certificate(self):
        self.with_bad_certificate(self.certificates.broken)

    def pipe_for_certificate(self):
        self.with_bad_certificate(self.certificates.pipe)

    def reload(self):
        """Many SIGHUPs, while the configuration, which a running server does not read again,
        is changed."""
        keys = self.metric("key_reloads_total", result="ok")
        tls = self.metric("tls_reloads_total", result="ok")
        text = self.config.read_text()
        replace(self.config, text + "no-such-option: 1\n")
        for _ in range(20):
            self.hang_up()
            time.sleep(0.02)
        wait_until(lambda: self.metric("key_reloads_total", result="ok") > keys and
                   self.metric("tls_reloads_total", result="ok") > tls, "reloads by SIGHUP")
        replace(self.config, text)

    def temporary_model(self):
        status, text = self.load({"model": "temporary", "path": "smoe"})
        expect(status == 200, f"load: {status} {text}")
        time.sleep(1)
        status, text = self.session.request("POST", "/v1/models/unload", {"model": "temporary"})
        expect(status == 200, f"unload: {status} {text}")

    def broken_checkpoints(self):
        before = self.metric("model_version", model="split")
        for body in ({"model": "broken"}, {"model": "split", "path": "broken"},
                     {"model": "split", "path": "none"}, {"model": "../smoe"}):
            status, text = self.load(body)
            expect(status in (400, 404), f"load of {body}: {status} {text}")
        expect(self.metric("model_version", model="split") == before,
               "a checkpoint that cannot be loaded replaced a model")

    def run(self, stopping, pause):
        while not stopping.wait(pause):
            step = self.steps[self.turn % len(self.steps)]
            self.turn += 1
            try:
                step()
                self.report.count(f"operator: {step.__name__}")
            except Exception as error:
                self.report.problem(f"operator, {step.__name__}: {error!r}")

"""Runs the program behind a pseudo terminal."""

import errno
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()=>].?)")


class Terminal:
    """A program whose standard streams, or those in `streams`, are a terminal of `columns`."""

    def __init__(self, *arguments, columns=100, streams=(0, 1, 2), **variables):
        self.master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "LANG": "C.UTF-8", **variables}
        environment.pop("NO_COLOR", None)
        environment.update(variables)
        chosen = {0: "stdin", 1: "stdout", 2: "stderr"}
        given = {name: terminal if number in streams else subprocess.PIPE
                 for number, name in chosen.items()}

        def own_terminal():  # so that Ctrl-C at the terminal reaches the program
            os.setsid()
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen([str(a) for a in arguments], env=environment,
                                        preexec_fn=own_terminal, **given)
        os.close(terminal)
        self.output = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                stream.close()
        os.close(self.master)

    def type(self, text):
        os.write(self.master, text.encode())

    def read(self, seconds):
        """Reads what arrives within `seconds`. Returns False at the end."""
        if not select.select([self.master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError as error:
            assert error.errno == errno.EIO
            return False
        self.output += data.decode(errors="replace")
        return bool(data)

    def plain(self):
        """Returns the output so far without escape sequences."""
        return ESCAPE.sub("", self.output).replace("\r\n", "\n")

    def wait_for(self, pattern, after=0, seconds=60):
        """Reads until the plain output after `after` matches `pattern`; returns the match's end."""
        end = time.monotonic() + seconds
        while True:
            if match := re.search(pattern, self.plain()[after:], re.S):
                return after + match.end()
            assert time.monotonic() < end, f"no {pattern!r} in {self.plain()[after:]!r}"
            if not self.read(0.1):
                match = re.search(pattern, self.plain()[after:], re.S)
                assert match, f"no {pattern!r} in {self.plain()[after:]!r}"
                return after + match.end()

    def finish(self, seconds=60):
        """Reads to the end; returns the exit status."""
        end = time.monotonic() + seconds
        while self.read(0.2):
            if self.process.poll() is not None and not select.select([self.master], [], [], 0.2)[0]:
                break
            assert time.monotonic() < end, self.plain()
        return self.process.wait(timeout=10)

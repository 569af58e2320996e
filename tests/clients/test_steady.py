"""A short run of tests/soak/steady.py: answers are the same to the bit, whatever else the server does."""

import os
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, binary, slow


@slow
def test_answers_do_not_depend_on_what_else_the_server_does():
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    done = subprocess.run([sys.executable, ROOT / "tests/soak/steady.py", "--minutes", "0.5"],
                          env={**os.environ, "MOESERVE_BIN": str(binary())}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-8000:]

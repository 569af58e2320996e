"""Tests tests/bench/loading.py, which reads the log of a server."""

import re
import subprocess
import sys

from conftest import ROOT, binary, model


def test_the_script_finds_what_it_reports():
    done = subprocess.run([sys.executable, ROOT / "tests/bench/loading.py", binary(), model(),
                           "--rounds", "1", "--warm"], text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(r"loading \d+\.\d+ s", done.stdout)
    assert re.search(r"packed weights \d+\.\d+ GiB", done.stdout)

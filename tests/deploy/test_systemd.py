"""Checks the unit and the example configuration in deploy/systemd."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/systemd"


def test_the_unit_is_hardened():
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(["systemd-analyze", "security", "--offline=true", "--threshold=20",
                           FOLDER / "moeserve.service"], capture_output=True, text=True)
    if "Unknown option" in done.stderr or "unrecognized option" in done.stderr:
        pytest.skip("systemd-analyze is too old")
    level = re.search(r"Overall exposure level for moeserve.service: ([0-9.]+)", done.stdout)
    assert level and float(level[1]) < 2.0, done.stdout + done.stderr
    assert done.returncode == 0


def test_the_stop_timeout_is_longer_than_the_drain():
    unit = (FOLDER / "moeserve.service").read_text()
    drain = re.search(r"^drain-timeout: (\d+)$", (FOLDER / "moeserve.yaml").read_text(), re.M)
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    # The listeners wait five seconds longer for readers.
    assert int(stop[1]) >= int(drain[1]) + 10


def test_the_configuration_is_valid(tmp_path):
    program = pathlib.Path(os.environ.get("MOESERVE_BIN", ROOT / "build/release/moeserve"))
    if not program.exists():
        pytest.skip(f"{program} is not built")
    text = (FOLDER / "moeserve.yaml").read_text().replace("/etc/moeserve/secrets", str(tmp_path))
    (tmp_path / "moeserve.yaml").write_text(text)
    (tmp_path / "keys").write_text("a-key-of-sufficient-length-0123456789\n")
    (tmp_path / "keys").chmod(0o600)
    done = subprocess.run([program, "config", "check", tmp_path / "moeserve.yaml"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "moeserve.yaml").write_text(text + "drain-time: 1\n")
    done = subprocess.run([program, "config", "check", tmp_path / "moeserve.yaml"],
                          capture_output=True, text=True)
    assert done.returncode == 1 and "drain-timeout" in done.stderr

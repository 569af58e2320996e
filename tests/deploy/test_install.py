"""Tests what `cmake --install` installs."""

import os
import re

from packages import MODEL, build_folder, check

FILES = ["bin/moeserve", "share/bash-completion/completions/moeserve",
         "share/zsh/site-functions/_moeserve", "share/fish/vendor_completions.d/moeserve.fish",
         "share/man/man1/moeserve.1", "share/man/man1/moeserve-experts-save.1",
         "share/doc/moeserve/LICENSE", "share/doc/moeserve/README.md",
         "share/moeserve/proto/moeserve/v1/moeserve.proto", "lib/systemd/system/moeserve.service"]


def test_install(tmp_path):
    build = build_folder()
    check("cmake", "--install", build, "--prefix", tmp_path / "prefix", "--strip")
    for file in FILES:
        assert (tmp_path / "prefix" / file).stat().st_size > 0, file
    installed = tmp_path / "prefix/bin/moeserve"
    text = check(installed, "generate", MODEL, "--prompt", "In", "--max-tokens", "2",
                 "--temperature", "0")
    assert text.strip()
    unit = (tmp_path / "prefix/lib/systemd/system/moeserve.service").read_text()
    assert re.search(r"^ExecStart=(\S+)", unit, re.M)[1] == str(installed)


def test_destdir(tmp_path):
    build = build_folder()
    check("cmake", "--install", build, "--prefix", "/usr",
          env={**os.environ, "DESTDIR": str(tmp_path)})
    for file in FILES:
        assert (tmp_path / "usr" / file).exists(), file
    unit = (tmp_path / "usr/lib/systemd/system/moeserve.service").read_text()
    assert "ExecStart=/usr/bin/moeserve serve" in unit

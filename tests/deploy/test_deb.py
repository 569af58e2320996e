"""Tests the Debian package: its contents, lintian, and an installation in a bare system.

The last one needs root, debootstrap and a mirror. It and the second packing run only with
MOESERVE_SLOW_TESTS=1.
"""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

from packages import MODEL, ROOT, build_folder, check, need

slow = pytest.mark.skipif(not os.environ.get("MOESERVE_SLOW_TESTS"),
                          reason="slow; MOESERVE_SLOW_TESTS=1 runs it")
MIRROR = os.environ.get("MOESERVE_DEBIAN_MIRROR", "http://deb.debian.org/debian")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    build = build_folder()
    need("dpkg-deb", "dpkg-shlibdeps")
    out = tmp_path_factory.mktemp("packages")
    return pack(build, out)


def pack(build, out):
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1767225600"}
    printed = check(ROOT / "deploy/package_deb.sh", "--build", build, "--output", out,
                    env=environment)
    return pathlib.Path(printed.strip())


def test_contents(package):
    fields = check("dpkg-deb", "--field", package)
    assert "Package: moeserve" in fields
    depends = re.search(r"^Depends: (.*)$", fields, re.M)[1]
    for library in ["libc6", "libgrpc", "libyaml-0-2", "libedit2", "libssl3"]:
        assert library in depends
    names = set(re.findall(r" \./(\S*[^/\s])(?: ->.*)?$", check("dpkg-deb", "--contents", package),
                           re.M))
    assert {"usr/bin/moeserve", "lib/systemd/system/moeserve.service", "etc/moeserve/moeserve.yaml",
            "usr/share/man/man1/moeserve-serve.1.gz", "usr/share/doc/moeserve/copyright",
            "usr/share/bash-completion/completions/moeserve",
            "usr/share/zsh/vendor-completions/_moeserve"} <= names
    assert not [name for name in names if name.startswith("usr/local")]


@slow
def test_packing_again_gives_the_same_file(package, tmp_path):
    assert pack(build_folder(), tmp_path).read_bytes() == package.read_bytes()


def test_lintian(package):
    need("lintian")
    done = subprocess.run(["lintian", "--fail-on", "error,warning", "--allow-root", package],
                          text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


@slow
def test_a_bare_system(package, tmp_path):
    need("debootstrap", "chroot")
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs root")
    release = re.search(r"^VERSION_CODENAME=(\w+)", pathlib.Path("/etc/os-release").read_text(), re.M)[1]
    root = tmp_path / "root"
    done = subprocess.run(["debootstrap", "--variant=minbase", release, root, MIRROR], text=True,
                          capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"debootstrap: {done.stdout[-200:]}{done.stderr[-200:]}")
    shutil.copy(package, root / "moeserve.deb")
    shutil.copytree(MODEL, root / "model")
    for file in ("/etc/resolv.conf", "/etc/hosts"):
        shutil.copy(file, root / file.lstrip("/"))
    for file in pathlib.Path("/etc/apt/apt.conf.d").glob("*proxy*"):
        shutil.copy(file, root / "etc/apt/apt.conf.d")

    def inside(*words):
        return check("chroot", root, "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
                     "DEBIAN_FRONTEND=noninteractive", *words)

    inside("apt-get", "install", "-y", "-qq", "--no-install-recommends", "/moeserve.deb")
    assert "moeserve-secrets" in (root / "etc/group").read_text()
    assert inside("moeserve", "--version").startswith("moeserve ")
    assert inside("moeserve", "generate", "/model", "--prompt", "In the", "--max-tokens", "4").strip()
    inside("apt-get", "purge", "-y", "-qq", "moeserve")
    assert not (root / "usr/bin/moeserve").exists() and not (root / "etc/moeserve").exists()

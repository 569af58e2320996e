"""Tests deploy/sbom.sh and the options of deploy/build-image.sh, without building an image.
deploy/test-image.sh compares the bill of materials of an image with its packages."""

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SBOM = ROOT / "deploy/sbom.sh"
BUILD = ROOT / "deploy/build-image.sh"
CREATED = "2026-01-02T03:04:05Z"

INSTALLED = """\
libc6\t2.36-9+deb12u10\tamd64\tglibc\t2.36-9+deb12u10
libstdc++6\t12.2.0-14+deb12u1\tamd64\tgcc-12\t12.2.0-14+deb12u1
login\t1:4.13+dfsg1-1~deb12u1\tamd64\tshadow\t1:4.13+dfsg1-1~deb12u1
odd\t1"2\\3\tall\todd\t1"2\\3
same+name\t1\tall\tsame\t1
same-name\t1\tall\tsame\t1
"""
COMPILED = "libc6-dev\t2.36-9+deb12u10\tamd64\tglibc\t2.36-9+deb12u10\n"


@pytest.fixture
def inputs(tmp_path):
    files = {"installed": INSTALLED, "compiled": COMPILED, "linked": "libc6\nlibstdc++6\n",
             "os": 'ID=debian\nVERSION_ID="12"\n'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(inputs, *more, **replaced):
    options = {"version": "1.2.3", "created": CREATED,
               **{name: inputs / name for name in ("installed", "compiled", "linked", "os")}}
    arguments = [text for name, value in (options | replaced).items() if value is not None
                 for text in (f"--{name}", str(value))]
    return subprocess.run(["sh", SBOM, *arguments, *more], capture_output=True, text=True)


def document(inputs, **replaced):
    done = run(inputs, **replaced)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_lists_every_package_once(inputs):
    found = document(inputs)
    assert found["spdxVersion"] == "SPDX-2.3" and found["dataLicense"] == "CC0-1.0"
    assert found["creationInfo"]["created"] == CREATED
    packages = {package["name"]: package for package in found["packages"]}
    assert set(packages) == {"moeserve-image", "moeserve", "libc6", "libstdc++6", "login", "odd",
                             "same+name", "same-name", "libc6-dev"}
    assert packages["moeserve"]["versionInfo"] == "1.2.3"
    assert packages["moeserve"]["licenseDeclared"] == "Apache-2.0"
    assert packages["odd"]["versionInfo"] == '1"2\\3'
    assert "gcc-12 12.2.0-14+deb12u1" in packages["libstdc++6"]["sourceInfo"]
    urls = {name: package["externalRefs"][0]["referenceLocator"]
            for name, package in packages.items() if "externalRefs" in package}
    assert urls["libstdc++6"] == ("pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1"
                                  "?arch=amd64&distro=debian-12")
    assert urls["login"].startswith("pkg:deb/debian/login@1%3A4.13%2Bdfsg1-1%7Edeb12u1?")


def test_identifiers_and_relationships(inputs):
    found = document(inputs)
    names = {package["SPDXID"]: package["name"] for package in found["packages"]}
    assert len(names) == len(found["packages"])
    for identifier in names:
        assert re.fullmatch(r"SPDXRef-[a-zA-Z0-9.-]+", identifier)
    names["SPDXRef-DOCUMENT"] = "document"
    relations = {(names[relation["spdxElementId"]], relation["relationshipType"],
                  names[relation["relatedSpdxElement"]]) for relation in found["relationships"]}
    assert relations == {
        ("document", "DESCRIBES", "moeserve-image"), ("moeserve-image", "CONTAINS", "moeserve"),
        ("moeserve-image", "CONTAINS", "libc6"), ("moeserve-image", "CONTAINS", "libstdc++6"),
        ("moeserve-image", "CONTAINS", "login"), ("moeserve-image", "CONTAINS", "odd"),
        ("moeserve-image", "CONTAINS", "same+name"), ("moeserve-image", "CONTAINS", "same-name"),
        ("moeserve", "DYNAMIC_LINK", "libc6"), ("moeserve", "DYNAMIC_LINK", "libstdc++6"),
        ("libc6-dev", "BUILD_DEPENDENCY_OF", "moeserve")}


def test_it_depends_on_its_inputs_alone(inputs):
    first = run(inputs).stdout
    assert run(inputs).stdout == first
    name = json.loads(first)["documentNamespace"]
    (inputs / "installed").write_text(INSTALLED.replace("12.2.0", "12.2.1"))
    assert document(inputs)["documentNamespace"] != name


def test_it_is_valid_spdx(inputs):
    """Runs where spdx-tools is installed, which the other tests do not need."""
    parser = pytest.importorskip("spdx_tools.spdx.parser.parse_anything")
    validation = pytest.importorskip("spdx_tools.spdx.validation.document_validator")
    file = inputs / "sbom.spdx.json"
    file.write_text(run(inputs).stdout)
    assert validation.validate_full_spdx_document(parser.parse_file(str(file))) == []


@pytest.mark.parametrize("replaced, message", [
    ({"linked": "text:libmissing1\n"}, "libmissing1, which is not installed"),
    ({"installed": "text:libc6\t1\n"}, "expected 5 columns, found 2"),
    ({"installed": "text:"}, "no package is installed"),
    ({"compiled": "/none"}, "/none cannot be read"),
    ({"created": "today"}, "expected YYYY-MM-DDThh:mm:ssZ, found today"),
    ({"os": "text:ID=alpine\n"}, "found alpine"),
    ({"version": None}, "expected --version"),
])
def test_it_refuses_wrong_input(inputs, replaced, message):
    (name, value), = replaced.items()
    if value is not None and value.startswith("text:"):
        value = inputs / name
        value.write_text(replaced[name].removeprefix("text:"))
    done = run(inputs, **{name: value})
    assert done.returncode == 1
    assert message in done.stderr


def test_it_reads_the_packages_of_this_machine():
    if shutil.which("dpkg-query") is None:
        pytest.skip("dpkg-query is not here")
    done = subprocess.run(["sh", SBOM, "--packages"], capture_output=True, text=True, check=True)
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert all(len(line) == 5 and all(line) for line in lines)
    assert "libc6" in {line[0] for line in lines}


@pytest.fixture
def clone(tmp_path):
    """Returns a git repository with build-image.sh, and a stand-in for an engine that prints its
    arguments."""
    folder = tmp_path / "clone"
    (folder / "deploy").mkdir(parents=True)
    shutil.copy(BUILD, folder / "deploy")
    (folder / "CMakeLists.txt").write_text("project(moeserve VERSION 1.2.3 LANGUAGES CXX)\n")
    (tmp_path / "engine").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "engine").chmod(0o755)

    def git(*arguments):
        subprocess.run(["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b.c",
                        *arguments], check=True, capture_output=True,
                       env={"GIT_COMMITTER_DATE": "2026-01-02T04:04:05+01:00",
                            "PATH": "/usr/bin:/bin"})

    if shutil.which("git") is None:
        pytest.skip("git is not here")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "a")
    return folder


def build(clone, *arguments):
    return subprocess.run([clone / "deploy/build-image.sh", "--engine", clone.parent / "engine",
                           *arguments], capture_output=True, text=True,
                          env=os.environ | {"TZ": "Asia/Tokyo"})


DIGEST = "sha256:" + "0123456789abcdef" * 4


def test_a_release_needs_a_digest_and_committed_sources(clone):
    done = build(clone, "--tag", "a")
    assert done.returncode == 1 and "--digest is missing" in done.stderr
    done = build(clone, "--tag", "a", "--digest", DIGEST[:-1])
    assert done.returncode == 1 and "64 hexadecimal digits" in done.stderr
    done = build(clone, "--tag", "a", "--digest", DIGEST, "--build-base", "b")
    assert done.returncode == 1 and "--build-digest is missing" in done.stderr
    done = build(clone, "--tag", "a", "--digest", DIGEST, "--target", "rank")
    assert done.returncode == 1 and "expected cpu, cpu-demo or ranks, found rank" in done.stderr
    (clone / "new").touch()
    done = build(clone, "--tag", "a", "--digest", DIGEST)
    assert done.returncode == 1 and "not committed" in done.stderr
    assert build(clone, "--tag", "a", "--trial").returncode == 0
    shutil.rmtree(clone / ".git")
    done = build(clone, "--tag", "a", "--digest", DIGEST)
    assert done.returncode == 1 and "no git clone" in done.stderr


def test_the_engine_gets_the_arguments_of_the_dockerfile(clone):
    done = build(clone, "--tag", "a:1", "--digest", DIGEST, "--source", "https://a", "--", "--quiet")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    given = dict(value.split("=", 1) for option, value in zip(lines, lines[1:])
                 if option == "--build-arg")
    commit = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True,
                            text=True).stdout.strip()
    assert given == {"BUILD_BASE": "debian:12-slim", "BUILD_DIGEST": DIGEST,
                     "RUNTIME_BASE": "debian:12-slim", "RUNTIME_DIGEST": DIGEST,
                     "VERSION": "1.2.3", "REVISION": commit, "CREATED": CREATED,
                     "SOURCE": "https://a", "SOURCE_DATE_EPOCH": "1767323045"}
    declared = set(re.findall(r"^ARG (\w+)", (ROOT / "deploy/Dockerfile").read_text(), re.M))
    assert set(given) - {"SOURCE_DATE_EPOCH"} == declared
    assert lines[-2:] == ["--quiet", "."]


@pytest.mark.parametrize("target", ["cpu", "cpu-demo", "ranks"])
def test_the_dockerfile_has_the_stages(clone, target):
    done = build(clone, "--tag", "a", "--digest", DIGEST, "--target", target)
    assert f"--target\n{target}\n" in done.stdout
    stages = re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "deploy/Dockerfile").read_text(), re.M)
    assert target in stages

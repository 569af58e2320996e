#!/usr/bin/env bash
# Makes a Python wheel with the program, its shared libraries and a typed client.
#
#   deploy/python/build_wheel.sh [--build FOLDER] [--output FOLDER] [--python PROGRAM]
#
#   --build FOLDER    the build folder, in which the target moeserve is built (default: build/release)
#   --output FOLDER   where to put the wheel (default: dist)
#   --python PROGRAM  the Python that makes it, which needs pip (default: python3)
#
# pip fetches setuptools and grpcio-tools from its package index; with an environment that has them,
# PIP_NO_BUILD_ISOLATION=0 makes pip use that. The wheel fits every Python from 3.10 on systems with
# the processor and at least the C library of this machine.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=$root/build/release
output=$root/dist
python=python3

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

while (($# > 0)); do
  case $1 in
    --build) build=$(realpath -m "${2:?--build: expected a folder}") && shift 2 ;;
    --output) output=$(realpath -m "${2:?--output: expected a folder}") && shift 2 ;;
    --python) python=${2:?--python: expected a program} && shift 2 ;;
    *) die "unknown argument $1 (expected --build, --output or --python)" ;;
  esac
done
[[ -x $build/moeserve ]] || die "$build/moeserve is missing: build it first"
[[ $(objdump -p "$build/moeserve" | awk '$1 == "RPATH" {print $2}') == *'$ORIGIN/../lib'* ]] ||
  die "$build/moeserve has no run path to its libraries"

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
cp -r "$root/deploy/python/." "$stage"
mkdir -p "$stage/bin" "$stage/lib" "$stage/proto/moeserve/v1"
cp "$root/proto/moeserve/v1/moeserve.proto" "$stage/proto/moeserve/v1/"
cp "$root/LICENSE" "$stage/"
strip -o "$stage/bin/moeserve" "$build/moeserve"
# The C library and its parts are not packed; they must come from the system that runs the program.
glibc='^(linux-vdso|ld-linux.*|libc|libm|libpthread|libdl|librt|libresolv|libutil)[.]so'
ldd "$build/moeserve" | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u |
  while read -r name file; do
    if [[ $name =~ $glibc ]]; then continue; fi
    install -m 755 "$(readlink -f "$file")" "$stage/lib/$name"
    strip --strip-unneeded "$stage/lib/$name"
  done

MOESERVE_VERSION=$("$build/moeserve" --version | awk '{print $2}')
libc=$(getconf GNU_LIBC_VERSION | awk '{print $2}')
MOESERVE_PLATFORM=manylinux_${libc/./_}_$(uname -m)
export MOESERVE_VERSION MOESERVE_PLATFORM
SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH
mkdir -p "$output"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$output" "$stage"
ls "$output"/moeserve-"$MOESERVE_VERSION"-*.whl

#!/usr/bin/env bash
# Packs the server, its tests, its benchmarks and their shared libraries into one archive, the
# bundle. The bundle needs no installed packages. It runs on systems whose C library is at least as
# new as this machine's (Debian 12, Ubuntu 24.04 and later). --device cuda needs NVIDIA's driver.
#
#   deploy/bundle.sh [--build FOLDER] [--no-build] [--no-data] [--output FILE.tar.xz]
#
#   --build FOLDER   the build folder, which is configured and built (default: build/release)
#   --no-build       packs the build folder without building
#   --no-data        leaves out the tests' data, for a machine that also has the source tree
#   --output FILE    the archive (default: build/moeserve-bundle.tar.xz)
#
# The archive contains bin/ (programs), lib/ (libraries, which the programs find through their run
# path), test-data/ (golden files, but not the bundled models) and run-tests.sh.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/release
output=$root/build/moeserve-bundle.tar.xz
compile=1
data=1
limit_mib=48

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

while (($# > 0)); do
  case $1 in
    --build) build=$(realpath -m "${2:?--build: expected a folder}") && shift 2 ;;
    --output) output=$(realpath -m "${2:?--output: expected a file}") && shift 2 ;;
    --no-build) compile=0 && shift ;;
    --no-data) data=0 && shift ;;
    *) die "unknown argument $1 (expected --build, --no-build, --no-data or --output)" ;;
  esac
done

if ((compile)); then
  # Compile for all GPU architectures, even if tests/run.sh configured this build folder for one.
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMOESERVE_TESTS=ON \
    -DMOESERVE_CUDA=ON -UCMAKE_CUDA_ARCHITECTURES
  targets=(all)
  if cmake --build "$build" --target help | grep -q '^cuda_device_tests'; then
    targets+=(cuda_device_tests)
  fi
  cmake --build "$build" --target "${targets[@]}"
fi
[[ -x $build/moeserve ]] || die "$build/moeserve is missing: build it first, or omit --no-build"

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
bundle=$stage/moeserve
mkdir -p "$bundle/bin" "$bundle/lib"

# The bundle contains the tests of computations, whose results can depend on the machine. It does
# not contain tests of parsing and HTTP.
programs=("$build/moeserve" "$build/tests/kernels_tests" "$build/tests/engine_tests")
while IFS= read -r program; do programs+=("$program"); done < <(
  find "$build/tests" -maxdepth 3 -type f -executable \( -name '*_bench' -o -name '*_device' \) |
    grep -v structured_bench | sort)
for program in "${programs[@]}"; do
  [[ -x $program ]] || die "$program is missing from the build"
  strip -o "$bundle/bin/$(basename "$program")" "$program"
done

# The C library and its parts are not packed; they must come from the system that runs the bundle.
glibc='^(linux-vdso|ld-linux.*|libc|libm|libpthread|libdl|librt|libresolv|libutil)[.]so'
for program in "$bundle"/bin/*; do
  [[ $(objdump -p "$program" | awk '$1 == "RPATH" {print $2}') == *'$ORIGIN/../lib'* ]] ||
    die "$program has no run path to its libraries"
  ldd "$program"
done | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u |
  while read -r name file; do
    [[ $name =~ $glibc ]] && continue
    install -m 644 "$(readlink -f "$file")" "$bundle/lib/$name"
    strip --strip-unneeded "$bundle/lib/$name"
  done

if ((data)); then
  mkdir -p "$bundle/test-data/tests"
  python3 "$root/tests/support/golden_files.py" unpack
  cp -r "$root/tests/golden" "$root/tests/data" "$bundle/test-data/tests/"
  rm -r "$bundle/test-data/tests/golden/packed"
fi
install -m 755 "$root/tests/run-bundle.sh" "$bundle/run-tests.sh"
install -m 644 "$root/LICENSE" "$bundle/LICENSE"

mkdir -p "$(dirname "$output")"
# The programs share most of their code, so xz gets a dictionary that is large enough for all of
# them. Preset 3 takes a sixth of the time of preset 6, for a tenth more bytes.
tar -C "$stage" --sort=name --owner=0 --group=0 --mtime=@0 -cf - moeserve |
  xz -T1 --lzma2=preset=3,dict=128MiB >"$output"
size=$(stat -c %s "$output")
printf '%s: %d programs, %d libraries, %.1f MiB packed\n' "$output" \
  "$(find "$bundle/bin" -type f | wc -l)" "$(find "$bundle/lib" -type f | wc -l)" \
  "$(awk -v bytes="$size" 'BEGIN {print bytes / 1048576}')"
((size <= limit_mib << 20)) || die "more than $limit_mib MiB"

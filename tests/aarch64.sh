#!/usr/bin/env bash
# Builds test programs of the kernels and of the engine for aarch64 and runs them under qemu, in
# which every instruction set of the CPU backend for aarch64 is available. Nothing is timed.
#
#   tests/aarch64.sh [TEST...]
#
# TEST is a source file of tests/kernels or tests/engine, such as linear_test. Needs Debian 12, g++-aarch64-linux-gnu and qemu-user-static,
# which it installs as root. The libraries for aarch64 are downloaded to build/aarch64/root and not
# installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly build=build/aarch64
readonly root=$PWD/$build/root

readonly packages=(libgrpc++-dev libprotobuf-dev protobuf-compiler-grpc libabsl-dev libssl-dev
  libboost1.81-dev nlohmann-json3-dev libpcre2-dev libspdlog-dev libcli11-dev libyaml-dev libedit-dev zlib1g-dev
  libnghttp2-dev libgtest-dev libgmock-dev libstdc++-12-dev libc6-dev)
readonly tests=(linear_test quant_linear_test quantize_test feed_forward_test rows_test rope_test
  router_test attention_test attention_tile_test relative_bias_test step_counts_test parity_test
  invariance_test)
readonly programs=(kernels_tests engine_tests)

install_tools() {
  if command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64-static >/dev/null; then
    return
  fi
  apt-get update -q
  apt-get install -y -q g++-aarch64-linux-gnu qemu-user-static
}

# Downloads the packages with a state of its own, so that apt's is not changed, and unpacks them.
make_root() {
  local state=$PWD/$build/apt file
  if [[ -f $root/complete ]]; then return; fi
  rm -rf "$state" "$root"
  mkdir -p "$state"/{state/lists/partial,cache/archives/partial} "$root"
  touch "$state/state/status"
  cat >"$state/apt.conf" <<EOF
Dir::State "$state/state";
Dir::State::status "$state/state/status";
Dir::Cache "$state/cache";
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Install-Recommends "false";
EOF
  APT_CONFIG=$state/apt.conf apt-get update -q
  APT_CONFIG=$state/apt.conf apt-get install -y -q --download-only "${packages[@]}"
  for file in "$state"/cache/archives/*.deb; do dpkg -x "$file" "$root"; done
  # Absolute links would lead out of the folder.
  find "$root" -type l -lname '/*' -exec sh -c \
    'for l; do ln -sfn "$0$(readlink "$l")" "$l"; done' "$root" {} +
  touch "$root/complete"
}

configure() {
  cat >"$build/toolchain.cmake" <<EOF
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CXX_COMPILER_TARGET aarch64-linux-gnu)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH $root)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(CMAKE_SYSROOT $root)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static;-cpu;max;-L;$root)
EOF
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMOESERVE_TESTS=ON \
    -DMOESERVE_CUDA=OFF -DCMAKE_UNITY_BUILD=ON \
    -DCMAKE_TOOLCHAIN_FILE="$PWD/$build/toolchain.cmake"
}

if ! grep -qs '^VERSION_CODENAME=bookworm$' /etc/os-release; then
  echo "aarch64.sh: skipped, because its list of libraries is that of Debian 12"
  exit 0
fi
mkdir -p "$build"
install_tools
make_root
configure
if (($# == 0)); then set -- "${tests[@]}"; fi
cmake --build "$build" --parallel "$(deploy/build_jobs.sh)" --target "${programs[@]}"
for test in "$@"; do
  echo "== $test"
  # The emulated CUDA device is no different here, and slow. Of the models, three that together use
  # every kind of layer are enough.
  case $test in
    parity_test | invariance_test) filter='*/mh_moe*:*/moa*:*/hmoe_topp*:*tiny_xpos*' ;;
    *) filter='-*cuda*' ;;
  esac
  for program in "${programs[@]}"; do
    if [[ -f tests/${program%_tests}/$test.cc ]]; then break; fi
  done
  qemu-aarch64-static -cpu max -L "$root" "$build/tests/$program" "$test" --gtest_brief=1 \
    --gtest_filter="$filter"
done

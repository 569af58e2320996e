#!/usr/bin/env bash
# Installs missing packages on Debian 12, Ubuntu 24.04 and later. Needs neither root nor the network
# if nothing is missing.
#
#   deploy/install_dependencies.sh [build] [clients] [ranks] [tests] [fuzz] [browser] [packages]
#                                  [reference]
#
#   build      the compiler, CMake and libraries for building
#   clients    packages for the examples in deploy/clients
#   ranks      Open MPI, for several processes that compute one model
#   tests      further packages for tests/run.sh
#   fuzz       the compiler for tests/fuzz
#   browser    the browser for the dashboard's tests
#   packages   what tests of the Debian package need
#   reference  PyTorch, for recomputing the golden files of the tests
#
# Without arguments, the groups build and clients are installed.
set -euo pipefail

# Each entry is a need, [COMMAND@]PACKAGE[>=VERSION][|PACKAGE[>=VERSION]...]. One of the packages
# must be installed in the given minimum version; packages are listed in order of preference. If
# COMMAND is given, the need is also met if this command exists.
build=(
  "g++@g++" "cmake@cmake" "ninja@ninja-build" "pkg-config@pkgconf|pkg-config"
  "protoc@protobuf-compiler" "grpc_cpp_plugin@protobuf-compiler-grpc"
  libgrpc++-dev libprotobuf-dev libabsl-dev libssl-dev
  "libboost1.81-dev|libboost1.83-dev|libboost-dev>=1.81"
  nlohmann-json3-dev libpcre2-dev libspdlog-dev libcli11-dev libyaml-dev libedit-dev
  zlib1g-dev libnghttp2-dev
)
clients=(
  curl@curl "grpc_python_plugin@protobuf-compiler-grpc" python3 python3-grpcio python3-protobuf
)
ranks=(libopenmpi-dev "mpirun@openmpi-bin")
tests=(
  libgtest-dev libgmock-dev python3 python3-venv ca-certificates json-schema-test-suite
  "${ranks[@]}"
)
fuzz=("clang++@clang" "libclang-rt-14-dev|libclang-rt-18-dev|libclang-rt-dev")
browser=("chromium@chromium" "chromedriver@chromium-driver")
packaging=("dpkg-shlibdeps@dpkg-dev" "lintian@lintian" "debootstrap@debootstrap")
reference=(python3 python3-venv python3-torch python3-numpy ca-certificates)

# Packages that make builds faster. They are installed only together with required packages.
optional=(mold ccache)

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# name_of PACKAGE[>=VERSION]: prints the package's name.
name_of() { printf '%s' "${1%%>=*}"; }

# new_enough PACKAGE>=MINIMUM VERSION: succeeds if VERSION satisfies the minimum.
new_enough() {
  local wanted=$1 version=$2
  [[ $wanted != *">="* ]] || dpkg --compare-versions "$version" ge "${wanted##*>=}"
}

is_installed() {
  local status version
  # A removed package whose configuration files remain also has a version, so check its status.
  read -r status version < <(
    dpkg-query -W -f='${db:Status-Status} ${Version}\n' "$(name_of "$1")" 2>/dev/null || true
  ) || return 1
  [[ $status == installed ]] && new_enough "$1" "$version"
}

is_available() {
  local version
  version=$(LC_ALL=C apt-cache policy "$(name_of "$1")" | awk '$1 == "Candidate:" {print $2}')
  [[ -n $version && $version != "(none)" ]] && new_enough "$1" "$version"
}

is_satisfied() {
  local need=$1 package
  if [[ $need == *@* ]] && command -v "${need%%@*}" >/dev/null; then return 0; fi
  local -a packages
  IFS='|' read -ra packages <<<"${need#*@}"
  for package in "${packages[@]}"; do
    if is_installed "$package"; then return 0; fi
  done
  return 1
}

# resolve NEED: prints the first package listed in NEED that apt can install.
resolve() {
  local need=$1 package
  local -a packages
  IFS='|' read -ra packages <<<"${need#*@}"
  for package in "${packages[@]}"; do
    if is_available "$package"; then
      name_of "$package"
      return 0
    fi
  done
  return 1
}

as_root() {
  if ((EUID == 0)); then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    die "packages are missing, and installing them needs root or sudo. As root, run: $invocation"
  fi
}

install() {
  local need package removed
  local -a packages=()
  # Old package lists can be sufficient, so a failure is only a warning.
  as_root apt-get update -qq || echo "warning: the package lists could not be updated"
  for need in "$@"; do
    package=$(resolve "$need") || die "apt knows no package for \"${need#*@}\". moeserve needs" \
      "Debian 12, Ubuntu 24.04 (with the component \"universe\") or newer."
    # Two needs can resolve to the same package.
    if [[ " ${packages[*]} " != *" $package "* ]]; then packages+=("$package"); fi
  done
  for package in "${optional[@]}"; do
    if ! is_satisfied "$package@$package" && is_available "$package"; then packages+=("$package"); fi
  done

  # Development packages of two Boost versions cannot be installed together, so apt removes the
  # older version.
  removed=$(LC_ALL=C apt-get install --simulate --no-install-recommends "${packages[@]}" |
    awk '$1 == "Remv" {print $2}' | paste -sd ' ')
  [[ -z $removed ]] || echo "apt replaces these packages: $removed"

  echo "installing: ${packages[*]}"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    -o Dpkg::Use-Pty=0 "${packages[@]}" >/dev/null
}

main() {
  local group need
  local -a needs=() missing=()
  for group in "$@"; do
    case $group in
      build) needs+=("${build[@]}") ;;
      clients) needs+=("${clients[@]}") ;;
      ranks) needs+=("${ranks[@]}") ;;
      tests) needs+=("${tests[@]}") ;;
      fuzz) needs+=("${fuzz[@]}") ;;
      browser) needs+=("${browser[@]}") ;;
      packages) needs+=("${packaging[@]}") ;;
      reference) needs+=("${reference[@]}") ;;
      *) die "unknown group \"$group\": there are build, clients, ranks, tests, fuzz," \
        "browser, packages and reference" ;;
    esac
  done
  for need in "${needs[@]}"; do
    command -v dpkg-query apt-get >/dev/null ||
      die "this is not Debian or Ubuntu. Install the equivalents of: ${needs[*]#*@}"
    is_satisfied "$need" || missing+=("$need")
  done
  if ((${#missing[@]} == 0)); then
    echo "nothing is missing"
    return
  fi
  install "${missing[@]}"
}

if (($# == 0)); then set -- build clients; fi
readonly invocation="$0 $*"
main "$@"

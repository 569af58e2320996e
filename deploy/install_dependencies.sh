#!/usr/bin/env bash
# Installs the packages that moeserve needs and this machine lacks. Debian 12, Ubuntu 24.04 and
# their successors. Where nothing is missing, it neither needs root nor the network.
#
#   deploy/install_dependencies.sh [build] [clients] [tests] [browser] [reference]
#
#   build      compiler, CMake and libraries (the default, together with clients)
#   clients    what the examples of deploy/clients need
#   tests      what tests/run.sh needs besides
#   browser    what the tests of the dashboard run it in
#   reference  PyTorch, which recomputes the goldens
set -euo pipefail

# One entry for each need: package names in order of preference, separated by "|", each with
# ">=VERSION" where an older one will not do. "COMMAND@" in front: any such command will do, however
# it came here.
build=(
  "g++@g++" "cmake@cmake" "ninja@ninja-build" "pkg-config@pkgconf|pkg-config"
  "protoc@protobuf-compiler" "grpc_cpp_plugin@protobuf-compiler-grpc"
  libgrpc++-dev libprotobuf-dev libabsl-dev libssl-dev
  "libboost1.81-dev|libboost1.83-dev|libboost-dev>=1.81"
  nlohmann-json3-dev libpcre2-dev libspdlog-dev libcli11-dev
)
clients=(
  curl@curl "grpc_python_plugin@protobuf-compiler-grpc" python3 python3-grpcio python3-protobuf
)
tests=(libgtest-dev libgmock-dev python3 python3-venv ca-certificates)
browser=("chromium@chromium" "chromedriver@chromium-driver")
reference=(python3 python3-venv python3-torch python3-numpy ca-certificates)

# They make builds faster. Not worth a call of apt, but welcome when there has to be one.
optional=(mold ccache)

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Package names only, without the version that is asked for.
name_of() { printf '%s' "${1%%>=*}"; }

# Whether VERSION satisfies a wanted package such as "libboost-dev>=1.81".
new_enough() {
  local wanted=$1 version=$2
  [[ $wanted != *">="* ]] || dpkg --compare-versions "$version" ge "${wanted##*>=}"
}

is_installed() {
  local status version
  # A package that was removed but left its configuration has a version too.
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

# Prints the first package of a need that apt can install.
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
  # Lists that are a little old are good enough, so a failure here need not be the end.
  as_root apt-get update -qq || echo "warning: the package lists could not be renewed"
  for need in "$@"; do
    package=$(resolve "$need") || die "apt knows no package for \"${need#*@}\". moeserve needs" \
      "Debian 12, Ubuntu 24.04 (with the component \"universe\") or newer."
    # Two commands can come from one package.
    if [[ " ${packages[*]} " != *" $package "* ]]; then packages+=("$package"); fi
  done
  for package in "${optional[@]}"; do
    if ! is_satisfied "$package@$package" && is_available "$package"; then packages+=("$package"); fi
  done

  # The headers of two Boost versions exclude each other, so an older one has to go.
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
      tests) needs+=("${tests[@]}") ;;
      browser) needs+=("${browser[@]}") ;;
      reference) needs+=("${reference[@]}") ;;
      *) die "unknown group \"$group\": there are build, clients, tests, browser and" \
        "reference" ;;
    esac
  done
  for need in "${needs[@]}"; do
    command -v dpkg-query apt-get >/dev/null ||
      die "this is no Debian or Ubuntu. Install what corresponds to: ${needs[*]#*@}"
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

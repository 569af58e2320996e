#!/usr/bin/env bash
# Builds a container image for a release: on base images with known digests, from committed sources,
# with labels, and with the software bill of materials in a file beside it.
#
#   deploy/build-image.sh --tag NAME --digest sha256:... [OPTION...] [-- ENGINE_OPTION...]
#
#   --tag NAME             name and tag of the image
#   --base IMAGE           base image to build on and to run on (default debian:12-slim)
#   --digest DIGEST        digest of the base image
#   --build-base IMAGE     base image to build on, if it is another one
#   --build-digest DIGEST  digest of that image
#   --target STAGE         stage of the Dockerfile: cpu (default), cpu-demo or ranks
#   --source URL           where the sources are, for the label
#   --sbom FILE            file for the bill of materials (default: none is written)
#   --engine NAME          docker or podman (default: the one that is here)
#   --trial                allows base images without digests, and changes that are not committed
#
# Options after -- go to the engine's build command. These commands print a digest:
#
#   docker buildx imagetools inspect --format '{{.Manifest.Digest}}' debian:12-slim
#   skopeo inspect --format '{{.Digest}}' docker://docker.io/library/debian:12-slim
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly sbom_path=/usr/share/doc/moeserve/sbom.spdx.json

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

tag=
base=debian:12-slim
digest=
build_base=
build_digest=
target=cpu
source_url=
sbom=
engine=
trial=false
engine_options=()

read_options() {
  while (($# > 0)); do
    case $1 in
      --trial) trial=true ;;
      -h | --help)
        usage
        exit 0
        ;;
      --)
        shift
        engine_options=("$@")
        break
        ;;
      --tag | --base | --digest | --build-base | --build-digest | --target | --source | --sbom | \
        --engine)
        (($# > 1)) || die "the option $1 lacks a value"
        case $1 in
          --tag) tag=$2 ;;
          --base) base=$2 ;;
          --digest) digest=$2 ;;
          --build-base) build_base=$2 ;;
          --build-digest) build_digest=$2 ;;
          --target) target=$2 ;;
          --source) source_url=$2 ;;
          --sbom) sbom=$2 ;;
          --engine) engine=$2 ;;
        esac
        shift
        ;;
      *)
        usage >&2
        die "unknown argument $1"
        ;;
    esac
    shift
  done
}

check_options() {
  local name
  [[ -n $tag ]] || die "--tag is missing"
  if [[ -z $build_base ]]; then
    [[ -z $build_digest ]] || die "--build-digest needs --build-base"
    build_base=$base
    build_digest=$digest
  fi
  case $target in
    cpu | cpu-demo | ranks) ;;
    *) die "--target: expected cpu, cpu-demo or ranks, found $target" ;;
  esac
  for name in digest build_digest; do
    if [[ -z ${!name} ]]; then
      $trial || die "--${name//_/-} is missing: releases name their base images by digest (--help)"
    elif [[ ! ${!name} =~ ^sha256:[0-9a-f]{64}$ ]]; then
      die "--${name//_/-}: expected sha256: and 64 hexadecimal digits, found ${!name}"
    fi
  done
}

# Sets `revision`, `created` (UTC) and `epoch` to the commit and its time; empty without git.
read_commit() {
  revision='' created=1970-01-01T00:00:00Z epoch=0
  if [[ $(git rev-parse --show-toplevel 2>/dev/null || true) != "$PWD" ]]; then
    $trial || die "this folder is no git clone, so the label with the revision would be empty"
    return
  fi
  revision=$(git rev-parse HEAD)
  created=$(TZ=UTC git log -1 --format=%cd --date=format-local:%Y-%m-%dT%H:%M:%SZ)
  epoch=$(git log -1 --format=%ct)
  if [[ -n $(git status --porcelain) ]]; then
    $trial || die "there are changes that are not committed"
    revision+=-dirty
  fi
}

choose_engine() {
  if [[ -n $engine ]]; then return; fi
  if command -v docker >/dev/null && docker info >/dev/null 2>&1; then
    engine=docker
  elif command -v podman >/dev/null; then
    engine=podman
  else
    die "neither a docker daemon nor podman is here"
  fi
}

build() {
  local version
  version=$(sed -n 's/^project(moeserve VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
  [[ -n $version ]] || die "CMakeLists.txt has no version"
  local -a options=(--file deploy/Dockerfile --target "$target" --tag "$tag"
    --build-arg BUILD_BASE="$build_base" --build-arg BUILD_DIGEST="$build_digest"
    --build-arg RUNTIME_BASE="$base" --build-arg RUNTIME_DIGEST="$digest"
    --build-arg VERSION="$version" --build-arg REVISION="$revision"
    --build-arg CREATED="$created" --build-arg SOURCE="$source_url"
    # BuildKit takes the time of the image from this argument.
    --build-arg SOURCE_DATE_EPOCH="$epoch")
  # Only Docker's image format has health checks.
  if [[ $engine == podman ]]; then options+=(--format docker --timestamp "$epoch"); fi
  "$engine" build "${options[@]}" "${engine_options[@]}" .
}

# Copies the bill of materials out of the image, without running it.
write_sbom() {
  local container
  container=$("$engine" create "$tag")
  "$engine" cp "$container:$sbom_path" "$sbom" || die "$tag has no $sbom_path"
  "$engine" rm "$container" >/dev/null
}

read_options "$@"
check_options
read_commit
choose_engine
build
if [[ -n $sbom ]]; then write_sbom; fi

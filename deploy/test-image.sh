#!/usr/bin/env bash
# Builds the container images and runs them as in production: without root, with a read-only root
# file system and without capabilities. Tests completions, metrics, stopping, the labels, the bill
# of materials, that nothing needs a shell, several ranks, and the pod of the Kubernetes manifests.
# Prints the images' sizes and the time from start to first token.
#
#   deploy/test-image.sh [--no-install] [--keep]
#
#   --no-install  installs no packages
#   --keep        keeps the images
#
# The script uses docker if its daemon is running, and otherwise podman, which it installs if
# missing. If no registry can be reached, it makes the base image with debootstrap, which needs
# root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly official_base=docker.io/library/debian:12-slim own_base=localhost/moeserve-base:12
readonly image=localhost/moeserve-test:cpu demo=localhost/moeserve-test:demo
readonly ranks=localhost/moeserve-test:ranks
readonly mirror=http://deb.debian.org/debian
readonly starts=3            # the number of server starts that are timed
readonly stop_limit=40       # seconds; must exceed the server's --drain-timeout (30)
readonly start_limit=60      # the largest number of seconds from start to first token
readonly prompt="rose: a shrub of"
readonly uid=10001           # the user id in the Dockerfile
readonly python=/usr/bin/python3  # python3-grpcio is installed for this Python
readonly sbom_path=/usr/share/doc/moeserve/sbom.spdx.json
readonly source_url=https://git.example.com/moeserve

install=true
keep=false
engine=
digest=
run_options=()
published=true  # whether ports are published; otherwise the container uses the host's network
base=
work=
container=
http=
grpc=

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

die() {
  printf 'FAILED: %s\n' "$*" >&2
  if [[ -n $container ]]; then "$engine" logs "$container" 2>&1 | tail -n 20 >&2 || true; fi
  exit 1
}

step() { printf '\n==== %s\n' "$*"; }
ok() { printf 'ok   %s\n' "$*"; }

clean_up() {
  if [[ -n $container ]]; then "$engine" rm --force "$container" >/dev/null 2>&1 || true; fi
  if [[ -n $engine ]] && ! $keep; then
    "$engine" rmi --force "$image" "$demo" "$ranks" >/dev/null 2>&1 || true
  fi
  if [[ -n $work ]]; then rm -rf "$work"; fi
}

install_packages() {
  ((EUID == 0)) || die "$* is missing, and installing it needs root"
  apt-get update -qq || echo "warning: the package lists could not be updated"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    -o Dpkg::Use-Pty=0 "$@" >/dev/null
}

choose_engine() {
  if command -v docker >/dev/null && docker info >/dev/null 2>&1; then
    engine=docker
    return
  fi
  if ! command -v podman >/dev/null; then
    $install || die "neither a docker daemon nor podman is here"
    install_packages podman runc catatonit python3-yaml
  fi
  engine=podman
}

choose_base() {
  if "$engine" image inspect "$official_base" >/dev/null 2>&1 ||
    timeout 120 "$engine" pull -q "$official_base" >/dev/null 2>&1; then
    base=$official_base
    return
  fi
  base=$own_base
  if "$engine" image inspect "$own_base" >/dev/null 2>&1; then return; fi
  echo "no registry can be reached: making the base image with debootstrap"
  if ! command -v debootstrap >/dev/null; then
    $install || die "debootstrap is missing"
    install_packages debootstrap
  fi
  ((EUID == 0)) || die "debootstrap needs root"
  debootstrap --variant=minbase bookworm "$work/root" "$mirror" >"$work/debootstrap.log" 2>&1 ||
    { tail -n 5 "$work/debootstrap.log" >&2; die "debootstrap"; }
  # Remove files that the slim variant of the official image does not have either.
  rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/* \
    "$work"/root/usr/share/{man,info,locale,groff,linda,lintian}/* "$work"/root/var/log/*.log
  find "$work/root/usr/share/doc" -type f ! -name copyright -delete
  find "$work/root/usr/share/doc" -type l -delete
  find "$work/root/usr/share/doc" -type d -empty -delete
  cat >"$work/root/etc/dpkg/dpkg.cfg.d/slim" <<'SLIM'
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/man/*
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
SLIM
  tar -C "$work/root" -c . | "$engine" import - "$own_base" >/dev/null 2>&1 || die "the base image"
  rm -rf "$work/root"
}

# Sets `digest` to the base image's digest, which an image without a registry can lack.
find_digest() {
  digest=$("$engine" image inspect -f '{{range .RepoDigests}}{{println .}}{{end}}' "$base" |
    sed -n 's/.*@//p' | head -n 1)
}

# build TARGET NAME: builds the image NAME from the Dockerfile's stage TARGET, and writes its bill
# of materials to $work/TARGET.spdx.json.
build() {
  local -a options=(--trial --engine "$engine" --target "$1" --tag "$2" --base "$base"
    --source "$source_url" --sbom "$work/$1.spdx.json")
  if [[ -n $digest ]]; then options+=(--digest "$digest"); fi
  # Isolation by chroot works inside a container, where other kinds can lack privileges.
  if [[ $engine == podman ]]; then
    options+=(-- --isolation chroot --network host --pull-never)
  fi
  deploy/build-image.sh "${options[@]}" >"$work/build.log" 2>&1 ||
    { tail -n 40 "$work/build.log" >&2; die "the build of $1"; }
}

# Sets the options for starting containers. If this script runs in a container, limits cannot be
# raised and networks cannot be created.
choose_run_options() {
  if "$engine" run --rm -p 127.0.0.1::8080 "$image" --version >/dev/null 2>&1; then return; fi
  [[ $engine == podman ]] || die "docker cannot run a container: $(
    docker run --rm -p 127.0.0.1::8080 "$image" --version 2>&1 | tail -n 3)"
  published=false
  run_options=(--ulimit nofile=4096:4096 --ulimit nproc=4096:4096 --network host)
  podman run --rm "${run_options[@]}" "$image" --version >/dev/null 2>"$work/error" ||
    die "podman cannot run a container: $(tail -n 3 "$work/error")"
  echo "containers share this machine's network and limits here"
}

free_port() {
  local port
  while true; do
    port=$((20000 + RANDOM % 12000))
    if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then break; fi
  done
  echo "$port"
}

# start IMAGE [OPTION...] [-- ARGUMENT...]: starts a container. Sets `container` to its id, and
# `http` and `grpc` to its addresses.
start() {
  local name=$1 http_port grpc_port
  shift
  local -a options=("${run_options[@]}" --detach --read-only --cap-drop ALL
    --security-opt no-new-privileges)
  http_port=$(free_port)
  grpc_port=$(free_port)
  if $published; then
    options+=(-p "127.0.0.1:$http_port:8080" -p "127.0.0.1:$grpc_port:8081")
  else
    options+=(-e "MOESERVE_HTTP=127.0.0.1:$http_port" -e "MOESERVE_GRPC=127.0.0.1:$grpc_port")
  fi
  while (($# > 0)) && [[ $1 != -- ]]; do
    options+=("$1")
    shift
  done
  if (($# > 0)); then shift; fi
  http=http://127.0.0.1:$http_port
  grpc=127.0.0.1:$grpc_port
  # Discard podman's warnings about health check timers, which need systemd.
  container=$("$engine" run "${options[@]}" "$name" "$@" 2>"$work/error") ||
    die "$name does not start: $(tail -n 3 "$work/error")"
}

# complete MAX_TOKENS [CURL OPTION...]: prints a greedy completion, as JSON or as a stream.
complete() {
  local tokens=$1
  shift
  curl --silent --show-error --fail --max-time 120 "$http/v1/completions" \
    -H 'Content-Type: application/json' "$@" \
    -d "{\"prompt\": \"$prompt\", \"max_tokens\": $tokens, \"temperature\": 0,
         \"ignore_eos\": true, \"n\": ${choices:-1}, \"stream\": ${stream:-false}}"
}

wait_ready() {
  local limit=$((SECONDS + start_limit))
  until curl --silent --fail --max-time 5 "$http/health/ready" >/dev/null; do
    ((SECONDS < limit)) || die "not ready after $start_limit s"
    [[ $("$engine" inspect -f '{{.State.Running}}' "$container") == true ]] ||
      die "the server exited"
    sleep 0.02
  done
}

# Stops the container and checks that the program exits with status 0 before it is killed.
stop() {
  local begin=$SECONDS status
  "$engine" stop --time "$stop_limit" "$container" >/dev/null 2>"$work/error" ||
    die "the stop: $(tail -n 3 "$work/error")"
  status=$("$engine" inspect -f '{{.State.ExitCode}}' "$container")
  ((status == 0)) || die "exit status $status after SIGTERM"
  stop_seconds=$((SECONDS - begin))
  "$engine" logs "$container" >"$work/log" 2>&1
  "$engine" rm "$container" >/dev/null 2>&1 || die "the container cannot be removed"
  container=
}

inside() { "$engine" exec "$container" "$@"; }

check_confinement() {
  local status refused
  [[ $(inside cat /proc/1/comm) == moeserve ]] || die "process 1 is not moeserve"
  status=$(inside cat /proc/1/status)
  grep -qE "^Uid:\s+$uid\s+$uid\s+$uid\s+$uid$" <<<"$status" || die "process 1 is not user $uid"
  grep -qE '^CapEff:\s+0+$' <<<"$status" || die "process 1 has capabilities"
  grep -qE '^NoNewPrivs:\s+1$' <<<"$status" || die "process 1 may gain privileges"
  # Root may write to this folder, so only the read-only mount can make the write fail.
  refused=$("$engine" exec --user 0 "$container" touch /usr/local/bin/x 2>&1) || true
  [[ $refused == *"Read-only file system"* ]] || die "the root can be written to: $refused"
  ok "process 1 is moeserve, user $uid, without capabilities, on a read-only root"
}

check_health() {
  inside moeserve health >/dev/null || die "moeserve health"
  # Podman runs health checks by systemd timers, which may be missing, so start the check here.
  # Docker runs health checks itself.
  if [[ $engine == podman ]]; then
    podman healthcheck run "$container" >/dev/null || die "the image's health check"
  else
    local limit=$((SECONDS + 30))
    until [[ $(docker inspect -f '{{.State.Health.Status}}' "$container") == healthy ]]; do
      ((SECONDS < limit)) || die "the image's health check"
      sleep 0.5
    done
  fi
  ok "healthy, by the image's own check"
}

check_http() {
  local text
  text=$(complete 24 | "$python" -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["text"])')
  [[ -n $text ]] || die "an empty completion"
  ok "HTTP: $prompt$text"
}

check_grpc() {
  local text stubs=$work/stubs
  if ! "$python" -c 'import grpc, google.protobuf' 2>/dev/null || ! command -v protoc >/dev/null ||
    ! command -v grpc_python_plugin >/dev/null; then
    echo "SKIPPED gRPC: no client here (deploy/install_dependencies.sh clients)"
    return
  fi
  mkdir -p "$stubs"
  protoc -I proto --python_out="$stubs" --grpc_out="$stubs" \
    --plugin=protoc-gen-grpc="$(command -v grpc_python_plugin)" proto/moeserve/v1/moeserve.proto
  text=$(PYTHONPATH=$stubs "$python" deploy/clients/generate_grpc.py --address "$grpc" \
    --max-tokens 24 --temperature 0 "$prompt") || die "gRPC"
  [[ -n $text ]] || die "an empty completion over gRPC"
  ok "gRPC: $prompt$text"
}

check_metrics() {
  local generated
  generated=$(curl --silent --fail --max-time 30 "$http/metrics" |
    awk 'index($1, "moeserve_generation_tokens_total{") == 1 {print int($2)}')
  ((generated >= 24)) || die "/metrics counts ${generated:-no} generated tokens"
  ok "/metrics counts $generated generated tokens"
}

# Checks that running requests complete when the container is stopped. Eight long completions run in
# parallel, so that the signal arrives before they end.
check_drain() {
  local request done_events
  choices=8 stream=true complete 3000 --no-buffer >"$work/stream" &
  request=$!
  until grep -q '^data: ' "$work/stream" 2>/dev/null; do
    kill -0 "$request" 2>/dev/null || die "the stream did not begin"
    sleep 0.01
  done
  stop
  wait "$request" || die "the stream was cut off by the stop"
  done_events=$(grep -c '^data: \[DONE\]' "$work/stream") || true
  ((done_events == 1)) || die "the stream has no end"
  awk '/ stopping;/ {stopping = NR} /endpoint=\/v1\/completions/ {last = NR}
       END {exit !(stopping && last > stopping)}' "$work/log" ||
    die "the stream had ended before the signal: nothing was tested"
  ok "SIGTERM: the running stream came to its end, exit status 0 after $stop_seconds s"
}

# label NAME: prints the image's label org.opencontainers.image.NAME.
label() {
  "$engine" image inspect -f "{{index .Config.Labels \"org.opencontainers.image.$1\"}}" "$image"
}

check_labels() {
  local name program commit
  for name in title description version created licenses source base.name; do
    [[ -n $(label "$name") ]] || die "the label $name is empty"
  done
  program=$("$engine" run --rm "${run_options[@]}" "$image" --version 2>/dev/null)
  [[ $program == *"$(label version)"* ]] ||
    die "the label says $(label version), the program $program"
  [[ $(label source) == "$source_url" ]] || die "the label source: $(label source)"
  [[ $(label base.name) == "$base" ]] || die "the label base.name: $(label base.name)"
  [[ $(label base.digest) == "$digest" ]] || die "the label base.digest: $(label base.digest)"
  if commit=$(git rev-parse HEAD 2>/dev/null); then
    [[ $(label revision) == "$commit"* ]] || die "the label revision: $(label revision)"
    [[ $(label created) != 1970* ]] || die "the label created: $(label created)"
  fi
  ok "labels: $(label title) $(label version), revision $(label revision), created $(label created)"
}

# run_program PROGRAM ARGUMENT...: runs a program of the image in a container of its own.
run_program() {
  local program=$1
  shift
  "$engine" run --rm "${run_options[@]}" --entrypoint "$program" "$image" "$@" 2>/dev/null
}

# Compares the bill of materials with the packages of the image.
check_sbom() {
  local file=$work/cpu.spdx.json
  run_program cat "$sbom_path" >"$work/inside"
  if run_program ls /tmp/build >/dev/null; then die "the image has files of its build"; fi
  cmp -s "$file" "$work/inside" || die "the file beside the image is not the one in it"
  # shellcheck disable=SC2016  # dpkg-query expands the format.
  run_program dpkg-query --show --showformat '${Package} ${Version}\n' >"$work/packages"
  compare_sbom "$file" "$work/packages" "$(label version)" "$(label created)" ||
    die "the bill of materials"
}

# compare_sbom FILE PACKAGES VERSION CREATED: fails if the bill of materials does not say the same.
compare_sbom() {
  "$python" - "$@" <<'PYTHON'
import json
import sys

file, packages, version, created = sys.argv[1:]
document = json.load(open(file))
assert document["spdxVersion"] == "SPDX-2.3"
assert document["creationInfo"]["created"] == created
by_id = {package["SPDXID"]: package for package in document["packages"]}
assert len(by_id) == len(document["packages"])
program, = (p for p in document["packages"] if p["name"] == "moeserve")
assert program["versionInfo"] == version
related = {}
for relation in document["relationships"]:
    assert relation["relatedSpdxElement"] in by_id, relation
    related.setdefault(relation["relationshipType"], set()).add(
        (relation["spdxElementId"], relation["relatedSpdxElement"]))
contained = {by_id[to]["name"] + " " + by_id[to]["versionInfo"] for _, to in related["CONTAINS"]}
installed = set(open(packages).read().splitlines())
assert contained - installed == {f"moeserve {version}"}, contained - installed
assert installed - contained == set(), installed - contained
linked = {by_id[to]["name"] for _, to in related["DYNAMIC_LINK"]}
assert {"libc6", "libstdc++6"} <= linked
compiled = {by_id[of]["name"] for of, _ in related["BUILD_DEPENDENCY_OF"]}
assert {"libc6-dev", "nlohmann-json3-dev"} <= compiled, compiled
print(f"ok   bill of materials: {len(installed)} packages, {len(linked)} linked, "
      f"{len(compiled)} compiled in")
PYTHON
}

# Starts a container in which no shell can be run, checks its health and stops it.
check_no_shell() {
  local shell
  local -a masks=()
  : >"$work/nothing"
  chmod 444 "$work/nothing"
  for shell in $(run_program cat /etc/shells | sed -n 's#^/usr/bin/##p'); do
    masks+=(-v "$work/nothing:/usr/bin/$shell:ro")
  done
  ((${#masks[@]} > 0)) || die "/etc/shells of the image names no shell"
  start "$demo" "${masks[@]}"
  wait_ready
  for shell in sh bash dash; do
    if inside "$shell" -c true >/dev/null 2>&1; then die "$shell still runs in the container"; fi
  done
  check_health
  stop
  ok "start, health check and stop need no shell"
}

check_demo() {
  step "the image with a model"
  start "$demo"
  wait_ready
  check_confinement
  check_health
  check_http
  check_grpc
  check_metrics
  check_drain
}

check_mounted() {
  local refused status key=$work/keys
  local -a mount=(-v "$PWD/deploy/models/x-moe:/models:ro")
  step "the image with a mounted model"
  start "$image" "${mount[@]}"
  wait_ready
  check_http
  stop
  ok "its default: the checkpoint at /models"

  echo "a-key-of-the-test" >"$key"
  chmod 644 "$key"
  start "$image" "${mount[@]}" -v "$key:/run/secrets/keys:ro" \
    -- serve --model /models --api-key-file /run/secrets/keys
  wait_ready
  check_health
  status=$(curl --silent --output /dev/null --write-out '%{http_code}' "$http/v1/models")
  ((status == 401)) || die "without a key: $status instead of 401"
  complete 1 -H 'Authorization: Bearer a-key-of-the-test' >/dev/null || die "with the key"
  stop
  ok "with --api-key-file: 401 without the key, an answer with it"

  # The image listens on every address, for which the server requires API keys or --allow-open.
  if refused=$("$engine" run --rm "${run_options[@]}" "${mount[@]}" "$image" \
    serve --model /models 2>&1); then die "an open server started unasked"; fi
  [[ $refused == *--allow-open* ]] || die "refused for another reason: $refused"
  ok "without keys or --allow-open it refuses to start"
}

# Runs two ranks in one container of their image: the answer must be that of one process.
check_ranks() {
  local alone ranked script
  local -a words=(generate --quiet --model /models --prompt "$prompt" --max-tokens 24
    --temperature 0 --threads 1)
  # mpirun writes to /tmp.
  local -a run=("$engine" run --rm "${run_options[@]}" --read-only --tmpfs /tmp --cap-drop ALL
    --security-opt no-new-privileges -v "$PWD/deploy/models/mh-moe:/models:ro")
  step "the image for ranks"
  alone=$("${run[@]}" "$ranks" "${words[@]}" 2>"$work/error") ||
    die "one process: $(tail -n 3 "$work/error")"
  ranked=$("${run[@]}" --entrypoint mpirun "$ranks" -n 2 --oversubscribe \
    --mca btl_vader_single_copy_mechanism none moeserve "${words[@]}" --ranks mpi \
    2>"$work/error") || die "two ranks: $(tail -n 3 "$work/error")"
  [[ -n $alone ]] || die "an empty answer"
  [[ $ranked == "$alone" ]] || die "two ranks answered $ranked, one process $alone"
  ok "two ranks:$ranked"
  for script in leader worker; do
    "${run[@]}" --entrypoint /usr/bin/test "$ranks" -x "/usr/local/lib/moeserve/ranks/$script.sh" ||
      die "$script.sh cannot be started"
  done
  "${run[@]}" --entrypoint /usr/bin/test "$ranks" -x /usr/sbin/sshd || die "no sshd"
  ok "it has sshd and the start scripts"
}

# Runs the pod of the Kubernetes manifests in the image.
check_pod() {
  if [[ $engine != podman ]] || ! command -v catatonit >/dev/null ||
    ! "$python" -c 'import yaml' 2>/dev/null; then
    echo "SKIPPED the pod: needs podman, catatonit and python3-yaml"
    return
  fi
  step "the pod of deploy/kubernetes"
  "$python" deploy/kubernetes/test_pod.py "$image" || die "the pod"
}

# Sets `first_token` to the median time, in milliseconds, from starting a container to its first
# token.
measure_start() {
  local begin limit
  local -a times=()
  for ((i = 0; i < starts; ++i)); do
    begin=${EPOCHREALTIME/./}
    start "$demo"
    limit=$((SECONDS + start_limit))
    until complete 1 >/dev/null 2>&1; do
      ((SECONDS < limit)) || die "no token after $start_limit s"
      sleep 0.01
    done
    times+=($(((${EPOCHREALTIME/./} - begin) / 1000)))
    stop
  done
  first_token=$(printf '%s\n' "${times[@]}" | sort -n | sed -n "$(((starts + 1) / 2))p")
}

megabytes() {
  "$engine" image inspect -f '{{.Size}}' "$1" | awk '{printf "%.0f MB", $1 / 1e6}'
}

main() {
  while (($# > 0)); do
    case $1 in
      --no-install) install=false ;;
      --keep) keep=true ;;
      -h | --help)
        usage
        exit 0
        ;;
      *)
        usage >&2
        echo "error: unknown argument $1" >&2
        exit 2
        ;;
    esac
    shift
  done
  work=$(mktemp -d)
  trap clean_up EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM

  step "packages"
  if $install; then deploy/install_dependencies.sh clients; fi
  choose_engine
  echo "engine: $("$engine" --version)"
  step "base image"
  choose_base
  echo "$base: $(megabytes "$base")"
  find_digest
  step "images: minutes the first time"
  local begin=$SECONDS
  build cpu "$image"
  build cpu-demo "$demo"
  build ranks "$ranks"
  ok "built in $((SECONDS - begin)) s"
  choose_run_options

  step "what the image says about itself"
  check_labels
  check_sbom
  check_demo
  check_no_shell
  check_mounted
  check_ranks
  check_pod
  step "figures"
  measure_start
  echo "image: $(megabytes "$image"), with the model $(megabytes "$demo"), for ranks $(megabytes "$ranks")," \
    "base $(megabytes "$base")"
  echo "from start to first token: $first_token ms (median of $starts)"
  printf '\nPASSED\n'
}

main "$@"

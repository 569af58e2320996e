#!/usr/bin/env bash
# Installs missing packages, builds the program, starts a server with a bundled model, sends one
# prompt over HTTP and one over gRPC, and prints the load of the experts.
#
#   deploy/quickstart.sh [--once] [--model FOLDER] [--no-install] [--cuda]
#
#   --once        stops the server and exits after the two prompts
#   --model       the checkpoint folder (default: deploy/models/mh-moe)
#   --no-install  installs no packages
#   --cuda        builds the CUDA backend even if this machine has no GPU, which takes twice as long
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly http_port=8080 grpc_port=8081  # the defaults of "moeserve serve"
readonly binary=build/release/moeserve
readonly work=build/quickstart  # the folder for logs
readonly stubs=$work/clients    # generated Python code, apart from what other versions generate
# The script uses the distribution's Python, because the packages are not installed for another one.
readonly python=/usr/bin/python3
# The bundled models are at their best with glosses of a dictionary, which are one line each. The
# text of this one is the same with every instruction set of x86-64.
readonly prompt="rose: a shrub of"
readonly body="{\"prompt\": \"$prompt\", \"max_tokens\": 48, \"temperature\": 0.7, \"top_p\": 0.9,
         \"seed\": 39, \"stop\": \"\\n\", \"stream\": true}"
readonly sampling=(--temperature 0.7 --top-p 0.9 --seed 39)  # the same for the gRPC client

once=false
install=true
cuda=OFF
model=deploy/models/mh-moe
server=

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

step() { printf '\n[%s] %s\n' "$1" "$2"; }

parse_arguments() {
  while (($# > 0)); do
    case $1 in
      --once) once=true ;;
      --no-install) install=false ;;
      --cuda) cuda=ON ;;
      --model)
        (($# > 1)) || die "--model needs a folder"
        model=$2
        shift
        ;;
      -h | --help)
        usage
        exit 0
        ;;
      *)
        usage >&2
        die "unknown argument $1"
        ;;
    esac
    shift
  done
  [[ -f $model/config.json ]] || die "$model is not a checkpoint folder: it has no config.json"
}

stop_server() {
  if [[ -z $server ]]; then return; fi
  local pid=$server
  server=
  kill -TERM "$pid" 2>/dev/null || return 0
  for _ in {1..100}; do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  kill -KILL "$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
}

# Decides whether to build the CUDA backend: sets `cuda` to ON if nvidia-smi lists a GPU, and prints
# the decision.
choose_backend() {
  if [[ $cuda == ON ]]; then
    echo "CUDA backend: built, because of --cuda"
  elif nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
    cuda=ON
    echo "CUDA backend: built, nvidia-smi lists a GPU"
  else
    echo "CUDA backend: not built, nvidia-smi lists no GPU; --cuda builds it"
  fi
}

build() {
  local jobs
  jobs=$(deploy/build_jobs.sh)
  choose_backend
  # Without tests, the tests' packages are not needed. Without MOESERVE_DEV, compiler warnings are
  # not errors, because a newer compiler may have new warnings. CMake turns CUDA off if there is no
  # nvcc.
  cmake --preset release -DCMAKE_UNITY_BUILD=ON -DMOESERVE_TESTS=OFF -DMOESERVE_DEV=OFF \
    -DMOESERVE_CUDA="$cuda" >"$work/configure.log" 2>&1 || {
    tail -n 30 "$work/configure.log" >&2
    die "CMake could not configure the build"
  }
  grep -E 'CUDA is off' "$work/configure.log" || true
  cmake --build --preset release --parallel "$jobs" --target moeserve
}

make_stubs() {
  mkdir -p "$stubs"
  protoc -I proto --python_out="$stubs" --grpc_out="$stubs" \
    --plugin=protoc-gen-grpc="$(command -v grpc_python_plugin)" proto/moeserve/v1/moeserve.proto
}

# free_port PORT: prints PORT, or 0 (the server picks a free port) if another program listens on
# PORT.
free_port() {
  if (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; then
    echo "port $1 is taken, a free one is used instead" >&2
    echo 0
  else
    echo "$1"
  fi
}

# Starts the server and sets `http` and `grpc` to the addresses that the server prints.
start_server() {
  local http_wish=0 grpc_wish=0
  local -a flags=(--routing-records --routing-control --drain-timeout 5)
  # The bundled models have no chat template of their own.
  if [[ $model == deploy/models/* ]]; then flags+=(--chat-template deploy/models/plain_text.jinja); fi
  if ! $once; then
    http_wish=$(free_port $http_port)
    grpc_wish=$(free_port $grpc_port)
  fi
  : >"$work/ready.txt"  # drop the addresses of an earlier run
  "$binary" serve --model "$model" --http "127.0.0.1:$http_wish" --grpc "127.0.0.1:$grpc_wish" \
    "${flags[@]}" >"$work/ready.txt" 2>"$work/server.log" &
  server=$!
  until grep -q '^grpc listening on ' "$work/ready.txt"; do
    if ! kill -0 "$server" 2>/dev/null; then
      server=
      tail -n 20 "$work/server.log" >&2
      die "the server did not start"
    fi
    sleep 0.1
  done
  http=$(sed -n 's/^http listening on //p' "$work/ready.txt")
  grpc=$(sed -n 's/^grpc listening on //p' "$work/ready.txt")
  echo "HTTP on $http, gRPC on $grpc, log in $work/server.log"
}

ask_http() {
  printf '%s' "$prompt"
  curl --silent --show-error --no-buffer --max-time 120 "http://$http/v1/completions" \
    -H 'Content-Type: application/json' -d "$body" | $python deploy/clients/stream_text.py
}

ask_grpc() {
  printf '%s' "$prompt"
  PYTHONPATH=$stubs $python deploy/clients/generate_grpc.py --address "$grpc" "${sampling[@]}" \
    --stop $'\n' "$prompt"
}

show_experts() {
  curl --silent --show-error --fail --max-time 30 "http://$http/v1/experts/stats" |
    $python deploy/clients/experts_table.py
}

show_commands() {
  cat <<COMMANDS

The server keeps running; Ctrl-C stops it. The dashboard is http://$http/.
Try in another terminal, in $PWD:

  curl -sN http://$http/v1/completions -H 'Content-Type: application/json' \\
    -d '$body' |
    $python deploy/clients/stream_text.py
  PYTHONPATH=$stubs $python deploy/clients/generate_grpc.py --address $grpc ${sampling[*]} \\
    --stop \$'\n' "$prompt"
  curl -s http://$http/v1/experts/stats | $python deploy/clients/experts_table.py
  curl -s http://$http/v1/models
  curl -s http://$http/metrics
  $binary --help
COMMANDS
  if [[ $model != deploy/models/* ]]; then return; fi
  local post="curl -s http://$http/v1/completions -H 'Content-Type: application/json'"
  cat <<COMMANDS

The experts of one prompt; then those of an answer without experts 1 and 6 of the first layer; a tool:

  $post \\
    -d '{"prompt": "$prompt", "max_tokens": 8, "return_routing": true}' |
    $python deploy/clients/experts_of_prompt.py
  $post \\
    -d '{"prompt": "$prompt", "max_tokens": 8, "return_routing": true,
         "routing_control": {"masked_experts": [{"layer": 0, "experts": [1, 6]}]}}' |
    $python deploy/clients/experts_of_prompt.py
  ${post/v1\/completions/v1/chat/completions} \\
    -d '{"messages": [{"role": "user", "content": "Is it raining in Rome?"}], "seed": 78,
         "tool_choice": "required", "parallel_tool_calls": false,
         "tools": [{"type": "function", "function": {"name": "weather", "parameters": {
           "type": "object", "required": ["place"], "properties": {
             "place": {"type": "string", "enum": ["Lima", "Oslo", "Rome"]}}}}}]}'
COMMANDS
}

main() {
  parse_arguments "$@"
  trap stop_server EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  mkdir -p "$work"

  if $install; then
    step 1/6 "Packages: about 200 MB and a few minutes on a bare system"
    deploy/install_dependencies.sh build clients
  else
    step 1/6 "Packages: skipped"
  fi
  step 2/6 "Build: about 4 minutes on 2 free cores the first time, more with CUDA; 1.1 GB"
  build
  step 3/6 "Server: $model"
  make_stubs
  start_server
  step 4/6 "A prompt over HTTP"
  ask_http
  step 5/6 "The same over gRPC"
  ask_grpc
  step 6/6 "The experts that worked"
  show_experts

  if $once; then return; fi
  show_commands
  trap 'exit 0' INT TERM
  wait "$server" || {
    server=
    tail -n 20 "$work/server.log" >&2
    die "the server exited"
  }
}

main "$@"

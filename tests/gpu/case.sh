#!/usr/bin/env bash
# Runs one case of run.sh, which sets PACKED (the unpacked programs), HERE (the packed folder), OUT
# (the results), WORK (a folder for temporary files) and FIGURES (a file for measured figures: name,
# value, unit and note, separated by tabs).
#
#   case.sh device
#   case.sh gtest PROGRAM[:FILE] own|cublaslt FILTER [SHARD/SHARDS]
#   case.sh server MODEL DTYPE TOLERANCE [OPTION...]     against the CPU, over HTTP and gRPC
#   case.sh load MODEL CLIENTS REQUESTS                   speed over HTTP
#   case.sh profile MODEL                                 expert profiles on the device and the CPU
#   case.sh kernels FILTER SECONDS                        cuda_bench
#   case.sh model NAME OPTION...                          moeserve bench
#   case.sh baselines PARTS SECONDS                       PyTorch and Triton
#   case.sh sanitizer TOOL PROGRAM[:FILE] FILTER          compute-sanitizer
#
# FILE is a source file of the program's tests; only those run. In a FILTER, @D is the name of the
# tested device. Exits with 77 if the case cannot run here; the
# last line that it prints says why.
# shellcheck disable=SC1091,SC2154  # pack.env sets variables
set -uo pipefail

. "$HERE/pack.env"
bin=$PACKED/bin
data=$PACKED/data
mkdir -p "$WORK"
# No server may outlive its case.
trap 'kill $(jobs -p) 2>/dev/null' EXIT

skip() {
  printf 'skipped: %s\n' "$*"
  exit 77
}
fail() {
  printf '%s\n' "$*"
  exit 1
}
program() {
  [[ -x $bin/$1 ]] || skip "$1 is not packed"
}

has_cublaslt() {
  local folder libraries=${LD_LIBRARY_PATH:-}
  ((emulated)) && return
  ldconfig -p 2>/dev/null | grep -q 'libcublasLt[.]so[.]13' && return
  for folder in ${libraries//:/ }; do [[ -e $folder/libcublasLt.so.13 ]] && return; done
  return 1
}

# find_cublaslt: adds the folder of cuBLASLt to those where libraries are looked for. It may belong
# to the CUDA toolkit or to a Python package.
find_cublaslt() {
  local folder
  for folder in /usr/local/cuda*/lib64 /usr/local/cuda*/targets/*/lib \
    $(command -v python3 >/dev/null &&
      python3 -c 'import sys
for path in sys.path: print(path + "/nvidia/cu13/lib", path + "/nvidia/cublas/lib")'); do
    [[ -e $folder/libcublasLt.so.13 ]] || continue
    export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
    return
  done
}

device() {
  if ((emulated)); then
    printf 'emulated device\n'
  else
    command -v nvidia-smi >/dev/null || skip "there is no nvidia-smi"
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit \
      --format=csv,noheader
  fi
  {
    uname -a
    nproc
    free -m 2>/dev/null
    command -v python3 compute-sanitizer nsys ncu nvcc
    python3 -c 'import torch; print("torch", torch.__version__, torch.version.cuda)' 2>&1 | tail -1
    ldconfig -p 2>/dev/null | grep -i cublasLt
    printf 'libraries: %s\n' "${LD_LIBRARY_PATH:-}"
    command -v nvidia-smi >/dev/null && nvidia-smi -q
    true
  } 2>&1 | head -c 1000000 >>"$OUT/device.txt"
}

# gtest PROGRAM[:FILE] DEVICE FILTER [SHARD/SHARDS]
gtest() {
  local name=${1%%:*} on=$test_device filter=$3 shard=${4:-1/1} log=$WORK/$$.gtest code
  local file=()
  [[ $1 == *:* ]] && file=("${1#*:}")
  program "$name"
  [[ $2 == cublaslt || $2 == tuned ]] && on=${test_device}_$2
  filter=${filter//@D/$on}
  filter=${filter//@PACKED_MODELS/$model_filter}
  GTEST_SHARD_INDEX=$((${shard%/*} - 1)) GTEST_TOTAL_SHARDS=${shard#*/} \
    MOESERVE_TEST_DATA=$data MOESERVE_TEST_DEVICE=$on \
    "$bin/$name" "${file[@]}" --gtest_brief=1 --gtest_filter="$filter" 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  # Tests skip themselves if the device cannot be used. It was asked for, so that is a failure,
  # except for the library, which need not be installed.
  local reason
  reason=$(grep -m1 -E "device (cuda|cuda_emulated): (no|the|this|dense)" "$log")
  if [[ -n $reason ]]; then
    [[ $2 == cublaslt && $reason == *"dense products by cuBLASLt"* ]] && skip "$reason"
    fail "$reason"
  fi
  local passed worst
  passed=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$log" | tail -1)
  worst=$(grep -oE 'largest difference [0-9.e+-]+' "$log" | sort -g -k3 | tail -1)
  if ((code != 0)); then
    fail "exit status $code: $(grep -m1 -E 'Failure|rror' "$log" | cut -c1-200)"
  fi
  if ((${passed:-0} == 0)); then
    [[ $2 == cublaslt ]] && ! has_cublaslt && skip "there is no cuBLASLt"
    fail "no test ran: $filter"
  fi
  printf '%s tests passed%s\n' "$passed" "${worst:+, $worst}"
}

# serve LOG OPTION...: starts a server; sets `address` to HTTP,GRPC and `server` to its process.
serve() {
  local log=$1 i
  shift
  "$bin/moeserve" serve --http 127.0.0.1:0 --grpc 127.0.0.1:0 --packed-cache off --access-log off \
    --chat-template "$data/chat.jinja" --routing-records --routing-control --hidden-samples 64 \
    "$@" >"$log" 2>&1 &
  server=$!
  for ((i = 0; i < 1200; ++i)); do
    if grep -q '^grpc listening on' "$log"; then
      address=$(sed -n 's/^http listening on //p' "$log")
      address+=,$(sed -n 's/^grpc listening on //p' "$log")
      return
    fi
    kill -0 "$server" 2>/dev/null || break
    sleep 0.1
  done
  tail -n 20 "$log"
  grep -q 'cuBLASLt: .* could not be opened' "$log" && skip "there is no cuBLASLt"
  fail "no server: $(grep -iE 'error' "$log" | tail -1)"
}

# stop_server PROCESS LOG: ends a server, which must drain and exit with 0.
stop_server() {
  local code
  kill -TERM "$1"
  wait "$1"
  code=$?
  ((code == 0)) && return
  tail -n 20 "$2"
  fail "the server ended with exit status $code"
}

server_case() {
  local model=$1 dtype=$2 tolerance=$3 ours theirs expected found
  shift 3
  program server_check
  [[ -d $data/deploy/models/$model ]] || skip "$model is not packed"
  serve "$WORK/$$.cpu" --model "$data/deploy/models/$model" --device cpu --threads 2 \
    --dtype "$dtype"
  ours=$server expected=$address
  # shellcheck disable=SC2086
  serve "$WORK/$$.device" --model "$data/deploy/models/$model" --device cuda --dtype "$dtype" \
    $server_options "$@"
  theirs=$server found=$address
  head -n 8 "$WORK/$$.device"
  local said code
  said=$("$bin/server_check" --expected "$expected" --found "$found" --tolerance "$tolerance" \
    --tokens "$tokens" --seconds "$request_seconds")
  code=$?
  printf '%s\n' "$said"
  ((code == 0)) || tail -n 20 "$WORK/$$.device"
  ((code == 0)) || fail "$(grep -m1 FAILED <<<"$said")"
  stop_server "$theirs" "$WORK/$$.device"
  stop_server "$ours" "$WORK/$$.cpu"
  tail -n 1 <<<"$said"
}

load_case() {
  local model=$1 json=$WORK/$$.json value
  [[ -d $data/deploy/models/$model ]] || skip "$model is not packed"
  # shellcheck disable=SC2086
  serve "$WORK/$$.device" --model "$data/deploy/models/$model" --device cuda --dtype bf16 \
    $server_options
  "$bin/moeserve" bench load --url "http://${address%,*}/v1" --clients "$2" --requests "$3" \
    --prompt-tokens "$load_tokens" --output-tokens "$load_tokens" --json "$json" ||
    fail "bench load"
  stop_server "$server" "$WORK/$$.device"
  value=$(grep -oE '"output_tokens_per_second": *[0-9.]+' "$json" | head -1 | grep -oE '[0-9.]+$')
  [[ -n $value ]] || fail "bench load wrote no figures"
  printf 'load/%s/C%s\t%.1f\ttokens/s\t%s requests\n' "$model" "$2" "$value" "$3" >"$FIGURES"
  printf '%s requests of %s clients, %.1f output tokens/s\n' "$3" "$2" "$value"
}

profile_case() {
  local model=$data/deploy/models/$1 text=$WORK/$$.text difference
  [[ -d $model ]] || skip "$1 is not packed"
  head -c "$profile_bytes" "$data/tests/data/heldout.txt" >"$text"
  local name
  for name in cpu cuda; do
    # shellcheck disable=SC2086
    "$bin/moeserve" experts save "$WORK/$$.$name" "$model" --device "$name" --dtype f32 \
      --text "$text" --window 64 --quiet $server_options || fail "experts save --device $name"
  done
  "$bin/moeserve" experts diff "$WORK/$$.cpu" "$WORK/$$.cuda" || fail "experts diff"
  # The share of tokens whose most used expert, or whose set of experts, is another one.
  difference=$("$bin/moeserve" experts diff --json "$WORK/$$.cpu" "$WORK/$$.cuda" |
    grep -oE '"sets": *[0-9.e-]+' | grep -oE '[0-9.e-]+$' | sort -g | tail -1)
  [[ -n $difference ]] || fail "experts diff reported no routing fluctuation"
  awk -v x="$difference" 'BEGIN {exit !(x <= 0.02)}' ||
    fail "routing fluctuation $difference between CPU and device, expected at most 0.02"
  printf 'profiles of %s bytes of text, routing fluctuation %s\n' "$profile_bytes" "$difference"
}

# kernels FILTER SECONDS
kernels_case() {
  local json=$OUT/kernels.jsonl said=$WORK/$$.said code before=0 try
  touch "$json"
  program cuda_bench
  before=$(wc -l <"$json")
  # cuda_bench measures the rate of products itself; PyTorch's counts if it is higher.
  local rates=()
  grep -q '"rate/bf16"' "$OUT/baselines.jsonl" 2>/dev/null && rates=(--rates "$OUT/baselines.jsonl")
  # A case that crashed the process is skipped when the program runs again.
  for try in 1 2 3; do
    # shellcheck disable=SC2086
    "$bin/cuda_bench" --json "$json" --filter "$1" --seconds "$2" "${rates[@]}" $bench_options \
      2>&1 | tee "$said"
    code=${PIPESTATUS[0]}
    ((code <= 1)) && break
    printf 'exit status %d, try %d\n' "$code" "$try"
  done
  awk '
    function text(key) {
      if (!match($0, "\"" key "\":\"[^\"]*\"")) return ""
      return substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 5)
    }
    function number(key) {
      if (!match($0, "\"" key "\":[-0-9.e+]+")) return 0
      return substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) + 0
    }
    /"error":/ { printf "%s\t-\t-\t%s\n", text("name"), text("error"); next }
    /"copy_gbps":/ {
      printf "device/copy\t%.0f\tGB/s\t%s\n", number("copy_gbps"), text("device")
      printf "device/read\t%.0f\tGB/s\t\n", number("read_gbps")
      printf "device/bf16\t%.0f\tTFLOP/s\t%s, %.0f after two seconds\n", number("bf16_tflops"),
        text("bf16_method"), number("bf16_sustained_tflops")
      printf "device/graph_node\t%.2f\tus\t\n", number("graph_node_us")
      next
    }
    /"median_us":/ && /"name":"route\// {
      printf "%s\t%.2f\tus\tbound %.2f us\n", text("name"), number("median_us"), number("floor_us")
      next
    }
    /"median_us":/ {
      printf "%s\t%.3g\t%%\t%.2f us, bound %.2f us (%s), %.2f times the latency floor\n",
        text("name"), 100 * number("share_of_floor"), number("median_us"), number("floor_us"),
        text("bound"), number("times_latency_floor")
    }' "$json" >"$FIGURES"
  ((code <= 1)) || fail "cuda_bench: exit status $code"
  [[ -s $FIGURES ]] || fail "cuda_bench wrote no figures: $(tail -n 1 "$said")"
  local errors
  errors=$(tail -n +$((before + 1)) "$json" | grep -c '"error":')
  ((errors == 0)) || fail "$errors cases failed: $(grep -m1 '"error":' "$json" | cut -c1-200)"
  printf '%s figures so far\n' "$(wc -l <"$FIGURES")"
}

# model NAME OPTION...
model_case() {
  local name=$1 json=$WORK/$$.json
  shift
  # A model of the pack is named by its folder.
  "$bin/moeserve" bench --device cuda --json "$json" --rounds "$bench_rounds" \
    "${@/#@/$data/deploy/models/}" --quiet || fail "moeserve bench"
  tr -d '\n' <"$json" | head -c 100000 | sed "s|^|{\"model\": \"$name\", \"result\": |; s|\$|}\n|" \
    >>"$OUT/models.jsonl"
  awk -v model="$name" '
    /"name":/ { split($0, part, "\""); case_name = part[4]; sub(" ", "", case_name) }
    /"share":/ { gsub("[^0-9.e+-]", "", $2); share = $2 }
    /"tokens_per_second":/ && !/bound/ { gsub("[^0-9.e+-]", "", $2)
      printf "model/%s/%s\t%.1f\ttokens/s\t\n", model, case_name, $2
      if (share != "") printf "model/%s/%s/share\t%.1f\t%%\tof the bound\n", model, case_name,
                              100 * share
      share = "" }' "$json" >"$FIGURES"
  [[ -s $FIGURES ]] || fail "moeserve bench wrote no figures"
  printf '%s figures\n' "$(wc -l <"$FIGURES")"
}

# baselines PARTS SECONDS
baselines_case() {
  local python=${PYTHON:-python3} device=cuda
  command -v "$python" >/dev/null || skip "there is no $python"
  "$python" -c 'import torch' 2>/dev/null || skip "$python has no torch"
  if ((emulated)); then
    device=cpu
  else
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
      skip "torch finds no CUDA device"
  fi
  # shellcheck disable=SC2086
  "$python" "$data/tests/bench/gpu/gpu_baselines.py" --only "$1" --seconds "$2" \
    --filter "$baseline_filter" --device "$device" --json "$OUT/baselines.jsonl" $bench_options ||
    fail "gpu_baselines.py"
  # How many times as fast as the fastest baseline.
  "$python" "$data/tests/bench/gpu/gpu_table.py" "$OUT/baselines.jsonl" "$OUT/kernels.jsonl" \
    2>/dev/null | awk '$1 ~ /^[a-z]+[/]/ {
      for (i = 2; i <= NF; ++i) {
        if ($i !~ /^[0-9.]+x$/) continue
        value = $i
        sub("x", "", value)
        line = $0
        gsub(" +", " ", line)
        printf "baseline/%s\t%s\tx\t%s\n", $1, value, line
        break
      }
    }' >"$FIGURES"
  printf '%s comparisons\n' "$(wc -l <"$FIGURES")"
}

sanitizer_case() {
  local tool=$1 name=${2%%:*} filter=${3:-*} file=()
  [[ $2 == *:* ]] && file=("${2#*:}")
  program "$name"
  command -v compute-sanitizer >/dev/null || skip "there is no compute-sanitizer"
  MOESERVE_TEST_DATA=$data MOESERVE_TEST_DEVICE=$test_device compute-sanitizer --tool "$tool" \
    --error-exitcode 9 "$bin/$name" "${file[@]}" --gtest_brief=1 --gtest_filter="$filter" ||
    fail "$tool: exit status $?"
  printf '%s found nothing\n' "$tool"
}

kind=$1
shift
[[ $kind != device && " $* " != *cublaslt* ]] || find_cublaslt
case $kind in
  device | gtest) "$kind" "$@" ;;
  server | load | profile | kernels | model | baselines | sanitizer) "${kind}_case" "$@" ;;
  *) fail "case.sh: unknown kind $kind" ;;
esac

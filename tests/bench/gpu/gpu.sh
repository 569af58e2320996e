#!/usr/bin/env bash
# Runs all benchmarks of the CUDA backend and prints one table with their results. The benchmarks
# measure the device's matrix and copy rates, moeserve's kernels, PyTorch and Triton baselines for
# the kernels, and whole models.
#
#   tests/bench/gpu/gpu.sh BUNDLE [--out FOLDER] [--minutes N] [--filter SUBSTRING] [--tiny]
#
#   BUNDLE      a bundle made by deploy/bundle.sh (the archive or the unpacked folder), or a build
#               folder
#   --out       the folder for the results (default: build/gpu-bench). Cases whose results are
#               already in the folder are not measured again, so an interrupted run can be resumed.
#   --minutes   the time limit for all benchmarks together (default: 9)
#   --filter    comma-separated texts: measures only kernels and baselines whose name contains one
#               of them, and no whole models
#   --tiny      uses small shapes on the CPU and on the emulated CUDA device, to test these scripts;
#               BUNDLE must be a build folder
#
# The environment variable PYTHON names a Python interpreter with PyTorch (default: python3).
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
here=$root/tests/bench/gpu
python=${PYTHON:-python3}
out=$root/build/gpu-bench
minutes=9
filter=
tiny=0
bundle=

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

while (($# > 0)); do
  case $1 in
    --out) out=${2:?--out: expected a folder} && shift 2 ;;
    --minutes) minutes=${2:?--minutes: expected a number} && shift 2 ;;
    --filter) filter=${2:?--filter: expected a part of a name} && shift 2 ;;
    --tiny) tiny=1 && shift ;;
    -*) die "unknown argument $1" ;;
    *) [[ -z $bundle ]] || die "unexpected argument $1" && bundle=$1 && shift ;;
  esac
done
[[ -n $bundle ]] || die "expected a bundle (deploy/bundle.sh) or a build folder"
[[ $minutes =~ ^[0-9]+$ ]] || die "--minutes: expected a whole number, found $minutes"
mkdir -p "$out"
if [[ -f $bundle ]]; then
  unpacked=$(mktemp -d)
  trap 'rm -rf "$unpacked"' EXIT
  tar -C "$unpacked" -xf "$bundle" || die "cannot unpack $bundle"
  bundle=$unpacked/moeserve
fi

find_program() {
  local path
  for path in "$bundle/bin/$1" "$bundle/tests/bench/$1" "$bundle/$1"; do
    [[ -x $path ]] && printf '%s' "$path" && return
  done
  die "$bundle has no program $1"
}

device=(--device cuda)
kernels=cuda_bench
flags=()
if ((tiny)); then
  device=(--device cpu)
  kernels=cuda_bench_emulated
  flags=(--tiny)
fi
kernels=$(find_program "$kernels") || exit 2
server=$(find_program moeserve) || exit 2

end=$((SECONDS + minutes * 60 - 10))
left() { echo $((end - SECONDS)); }
# part SECONDS PERCENT: prints a time limit in seconds, which is at most SECONDS and at most PERCENT
# percent of the remaining time.
part() {
  local share=$(($(left) * $2 / 100))
  echo $((share < $1 ? share : $1))
}
export PYTHONUNBUFFERED=1

baselines() {
  local seconds=$1
  shift
  # --seconds only keeps new cases from starting. A compiler or a kernel may hang, so `timeout` ends
  # the process.
  timeout -k 5 $((seconds + 30)) "$python" "$here/gpu_baselines.py" "${device[@]}" "${flags[@]}" \
    --json "$out/baselines.jsonl" --filter "$filter" --seconds "$seconds" "$@" \
    2>>"$out/errors.txt" || printf '(baselines: exit %d; see %s)\n' $? "$out/errors.txt"
}

run_kernels() {
  local seconds=$1 try code=0
  # A case that crashed the process is skipped when the program runs again.
  for try in 1 2 3 4 5; do
    timeout -k 5 $((seconds + 30)) "$kernels" --json "$out/kernels.jsonl" \
      --rates "$out/baselines.jsonl" ${filter:+--filter "$filter"} --seconds "$seconds" \
      "${flags[@]}" 2>>"$out/errors.txt"
    code=$?
    ((code <= 1)) && break
    printf '(kernels: exit %d, try %d)\n' "$code" "$try"
  done
}

printf '== rates\n'
baselines 60 --only rates
printf '== kernels\n'
run_kernels "$(part 180 35)"
printf '== PyTorch and Triton\n'
baselines "$(part 60 20)" --only attention,sampling
baselines "$(part 240 50)" --only moe
baselines "$(part 40 15)" --only cublas
if [[ -z $filter ]] && (($(left) > 20)); then
  printf '== whole models\n'
  seconds=$(left)
  timeout -k 5 $((seconds + 20)) "$python" "$here/gpu_models.py" --moeserve "$server" \
    "${device[@]}" "${flags[@]}" --json "$out/models.jsonl" --seconds "$seconds" \
    2>>"$out/errors.txt" || printf '(models: exit %d; see %s)\n' $? "$out/errors.txt"
fi
printf '== table (%s)\n' "$out/table.txt"
files=()
for name in kernels baselines models; do
  [[ -f $out/$name.jsonl ]] && files+=("$out/$name.jsonl")
done
"$python" "$here/gpu_table.py" "${files[@]}" --all >"$out/table-all.txt"
"$python" "$here/gpu_table.py" "${files[@]}" | tee "$out/table.txt"

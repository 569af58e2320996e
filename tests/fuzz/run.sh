#!/usr/bin/env bash
# Builds the fuzz targets with clang and runs each for a number of seconds.
#
#   tests/fuzz/run.sh [--jobs N] [--background] SECONDS [TARGET...]
#
#   --jobs N      runs at most N targets at a time; default: as many as builds run, 1 with --background
#   --background  returns at once; the targets run with the lowest priority, and
#                 build/fuzz/background.log shows their results
#
# An input that makes a target fail is left in build/fuzz/findings; the file is the argument with
# which the target repeats the failure. New inputs that reach new code are left in
# build/fuzz/corpus, and a record of every run in build/fuzz/runs; keep.py moves both to the
# repository. Without clang or its fuzzer library, prints the reason and does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' tests/fuzz/run.sh >&2
  exit 2
}

jobs=
background=
running= # whether this is the process that --background starts
while (($# > 0)); do
  case $1 in
    --jobs) jobs=${2:?a number of targets} && shift ;;
    --background) background=1 ;;
    --running) running=1 ;;
    *) break ;;
  esac
  shift
done
if (($# < 1)) || ! [[ $1 =~ ^[0-9]+$ ]]; then usage; fi
readonly seconds=$1
shift
if (($# > 0)); then
  targets=("$@")
else
  targets=()
  for file in tests/fuzz/targets/*_fuzz.cc; do targets+=("$(basename "$file" _fuzz.cc)"); done
fi
for target in "${targets[@]}"; do
  if ! [[ -f tests/fuzz/targets/${target}_fuzz.cc ]]; then
    echo "run.sh: there is no target $target" >&2
    exit 2
  fi
done

can_fuzz() {
  command -v clang++ >/dev/null &&
    echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
    clang++ -x c++ - -fsanitize=fuzzer,address -o /dev/null 2>/dev/null
}

# Valid inputs, from which fuzzing starts.
make_seeds() {
  rm -rf build/fuzz/seeds
  /usr/bin/python3 -B tests/support/golden_files.py unpack
  /usr/bin/python3 -B tests/fuzz/make_seeds.py build/fuzz/seeds
}

# The kept inputs of every target.
unpack_corpus() {
  rm -rf build/fuzz/kept
  /usr/bin/python3 -B tests/fuzz/pack_corpus.py --unpack build/fuzz/kept
}

run_target() {
  local target=$1 log=build/fuzz/$1.log failed=0 options=() TIMEFORMAT='%U %S' cpu accepted
  mkdir -p build/fuzz/{corpus,kept}/"$target" build/fuzz/{findings,runs}
  if [[ -f tests/fuzz/dictionaries/$target.dict ]]; then
    options+=("-dict=tests/fuzz/dictionaries/$target.dict")
  fi
  {
    time "build/fuzz/tests/fuzz/${target}_fuzz" -max_total_time="$seconds" -timeout=60 \
      -rss_limit_mb=2560 -malloc_limit_mb=1024 -max_len=32768 -print_final_stats=1 "${options[@]}" \
      -artifact_prefix="build/fuzz/findings/$target-" "build/fuzz/corpus/$target" \
      "build/fuzz/kept/$target" "build/fuzz/seeds/$target" >"$log" 2>&1 || failed=1
  } 2>"$log.time"
  read -r -a cpu <"$log.time"
  rm "$log.time"
  accepted=$(sed -n 's/^accepted inputs: //p' "$log")
  /usr/bin/python3 -B tests/fuzz/keep.py --record "$target" "$log" "${cpu[@]}" "$failed"
  if ((failed)); then
    printf '%s FAILED:\n' "$target"
    tail -40 "$log"
    return 1
  fi
  printf '%-16s %s\n' "$target" "$(grep -aE '^stat::number_of_executed_units' "$log" |
    tr -s ' ' | cut -d' ' -f2) inputs, ${accepted:-0} accepted, $(
    grep -aoE 'cov: [0-9]+' "$log" | tail -1)"
  if ((${accepted:-0} == 0)); then
    echo "$target FAILED: the parser accepted no input, not even the seeds"
    return 1
  fi
}

if ! can_fuzz; then
  echo "skipped: fuzzing (there is no clang++ with libFuzzer)"
  exit 0
fi
if [[ -z $running ]]; then
  build_jobs=$(deploy/build_jobs.sh)
  cmake --preset fuzz -DCMAKE_UNITY_BUILD=ON
  cmake --build --preset fuzz --parallel "$build_jobs" --target "${targets[@]/%/_fuzz}"
  make_seeds
  unpack_corpus
fi
if [[ -n $background ]]; then
  nohup nice -n 19 tests/fuzz/run.sh --running --jobs "${jobs:-1}" "$seconds" "${targets[@]}" \
    >build/fuzz/background.log 2>&1 </dev/null &
  echo "process $! runs ${#targets[@]} targets for $seconds s each; see build/fuzz/background.log"
  exit 0
fi
export -f run_target
export seconds
printf '%s\n' "${targets[@]}" | xargs -P "${jobs:-$build_jobs}" -I '{}' bash -euo pipefail -c 'run_target {}'

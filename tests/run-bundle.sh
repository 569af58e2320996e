#!/usr/bin/env bash
# Runs the tests in an unpacked bundle (see deploy/bundle.sh) and prints which tests passed.
#
#   run-tests.sh [--device cpu|cuda|cuda_cublaslt] [--models FOLDER | --sources FOLDER] [--jobs N]
#                [--seconds N] [--check TOOL] [TEST...]
#
#   --device     the device on which the tests run (default: cuda); cuda_cublaslt: cuBLASLt, which
#                must be installed, computes the dense layers
#   --models     a folder with the bundled models, such as deploy/models in the source tree
#                (default: the folder "models" next to this script)
#   --sources    the root of a source tree; its models and test data are used. Required if the
#                bundle was made with --no-data.
#   --jobs       the number of processes that run at a time (default: 4; 1 with --check)
#   --check      runs the tests under compute-sanitizer with this tool (memcheck, racecheck,
#                synccheck or initcheck)
#   --seconds    the time limit of one process (default: 240)
#   TEST         the tests to run: a program, such as cuda_tests_device, or PROGRAM:FILE for those of
#                one source file, such as kernels_tests:linear_test (default: all tests of
#                computations, whose results can depend on the device; each file in a process)
#
# If the environment variable GTEST_FILTER is set, it selects the tests within each program.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
device=cuda
models=$here/models
seconds=240
jobs=
sources=
check=()
tests=()
while (($# > 0)); do
  case $1 in
    --device) device=${2:?--device: expected cpu or cuda} && shift 2 ;;
    --models) models=$(realpath "${2:?--models: expected a folder}") && shift 2 ;;
    --sources) sources=$(realpath "${2:?--sources: expected a folder}") && shift 2 ;;
    --seconds) seconds=${2:?--seconds: expected a number} && shift 2 ;;
    --jobs) jobs=${2:?--jobs: expected a number} && shift 2 ;;
    --check)
      check=(compute-sanitizer --tool "${2:?--check: expected a tool}" --error-exitcode 9) && shift 2
      ;;
    -*) printf 'error: unknown argument %s\n' "$1" >&2 && exit 2 ;;
    *) tests+=("$1") && shift ;;
  esac
done
: "${jobs:=$((${#check[@]} > 0 ? 1 : 4))}"
if [[ ! $jobs =~ ^[1-9][0-9]*$ ]]; then
  printf 'error: --jobs: expected a number, found %s\n' "$jobs" >&2
  exit 2
fi
if ((${#tests[@]} == 0)); then
  # Tests of single instructions and kernels run first: if one of them fails, tests of whole models
  # will fail, too.
  # What depends on no device is left out.
  computing='attention|engine|invariance|linear|parity|perplexity|router|routing|rows|sampler|soak'
  computing="^($computing|statistics|device_statistics)_test\$"
  for program in ptx_test_device cuda_tests_device kernels_tests engine_tests; do
    [[ -x $here/bin/$program ]] || continue
    while read -r file; do
      [[ $program == *_device || $file =~ $computing ]] && tests+=("$program:$file")
    done < <("$here/bin/$program" --list_files)
  done
fi
data=$here/test-data
if [[ -n $sources ]]; then
  data=$sources
else
  mkdir -p "$data/deploy"
  [[ -e $data/deploy/models ]] || ln -s "$models" "$data/deploy/models"
fi
if [[ ! -e $data/tests/golden/moa/golden.safetensors ]]; then
  printf 'error: the files of %s/tests/golden are missing: name the sources with --sources, %s\n' \
    "$data" "and run tests/support/golden_files.py unpack there" >&2
  exit 2
fi

# run TEST: runs a test. Writes its output to TEST.log, and its exit status and duration in seconds
# to TEST.result.
run() {
  local test=$1 start=$SECONDS filter=${GTEST_FILTER:-*}
  local program=${test%%:*} file=()
  [[ $test == *:* ]] && file=("${test#*:}")
  # These files test every backend. On a GPU, only their tests on that device run.
  if [[ -z ${GTEST_FILTER:-} && $device == cuda* ]]; then
    [[ $test =~ ^kernels_tests:(rows|router|attention)_test$ ]] && filter='*/cuda'
    [[ $test == kernels_tests:linear_test ]] && filter="*/$device"
  fi
  MOESERVE_TEST_DATA=$data MOESERVE_TEST_DEVICE=$device \
    timeout "$seconds" "${check[@]}" "$here/bin/$program" "${file[@]}" --gtest_brief=1 \
    --gtest_filter="$filter" \
    >"$here/$test.log" 2>&1
  printf '%d %d\n' $? $((SECONDS - start)) >"$here/$test.result"
}

failed=0
# report TEST: prints the result line, and the log if the test failed.
report() {
  local test=$1 code took log=$here/$1.log
  read -r code took <"$here/$test.result"
  printf '%-42s exit %3d  %4d s  %s\n' "$test" "$code" "$took" \
    "$(grep -E '^\[  (PASSED|FAILED)  \]|tests? ran' "$log" | head -2 | tr '\n' ' ')"
  if ((code != 0)); then
    failed=1
    grep -vE '^\[  +OK|^\[ RUN' "$log" | head -40
  elif grep -q "device ${device%_cublaslt}: " "$log"; then
    # Tests skip themselves if the device cannot be used. Here that is a failure, because the device
    # was requested.
    failed=1
    grep -m1 "device ${device%_cublaslt}: " "$log"
  elif [[ $test == *_tests:* && -z ${GTEST_FILTER:-} ]] && grep -q '^\[==========\] 0 tests' "$log"; then
    failed=1
    printf 'no test of it runs on %s\n' "$device"
  fi
}

# Runs up to `jobs` processes at a time, and prints their results in the order of `tests`.
started=0
for ((i = 0; i < ${#tests[@]}; ++i)); do
  while ((started < ${#tests[@]} && started < i + jobs)); do
    run "${tests[started]}" &
    pids[started]=$!
    started=$((started + 1))
  done
  wait "${pids[i]}"
  report "${tests[i]}"
done
exit $failed

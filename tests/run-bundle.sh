#!/usr/bin/env bash
# Runs the tests of an unpacked bundle (deploy/bundle.sh) and says which passed.
#
#   run-tests.sh [--device cpu|cuda] [--models FOLDER | --sources FOLDER] [--jobs N] [--seconds N]
#                [--check TOOL] [TEST...]
#
#   --device     where the models run, and with cuda the tests of kernels (cuda)
#   --models     folder of the bundled models, deploy/models of the sources (default: beside this
#                file)
#   --sources    the sources' folder, whose models and test data are taken (needed for a bundle that
#                was made with --no-data)
#   --jobs       programs at a time (4; 1 with --check)
#   --check      run under compute-sanitizer with this tool (memcheck, racecheck, synccheck, initcheck)
#   --seconds    longest time of one program (240)
#   TEST         programs to run, "linear_test" say (all)
#
# The environment variable GTEST_FILTER, where it is set, chooses among the tests of each program.
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
  # Instructions and kernels first: if they fail, failures of the tests that build on them mean
  # little.
  for program in "$here"/bin/ptx_test_device "$here"/bin/*_device "$here"/bin/*_test; do
    name=$(basename "$program")
    [[ -x $program && " ${tests[*]} " != *" $name "* ]] && tests+=("$name")
  done
fi
data=$here/test-data
if [[ -n $sources ]]; then
  data=$sources
else
  mkdir -p "$data/deploy"
  [[ -e $data/deploy/models ]] || ln -s "$models" "$data/deploy/models"
fi
if [[ ! -d $data/tests/golden ]]; then
  printf 'error: %s/tests/golden is missing: name the sources with --sources\n' "$data" >&2
  exit 2
fi

# run TEST: leaves TEST.log and, in TEST.result, the exit status and the seconds it took.
run() {
  local test=$1 start=$SECONDS filter=${GTEST_FILTER:-*}
  # These programs run the same tests on every backend; with --device cuda, run those of the device
  # only.
  if [[ -z ${GTEST_FILTER:-} && $device == cuda ]]; then
    [[ $test =~ ^(rows|linear|router|attention)_test$ ]] && filter='*/cuda'
  fi
  MOESERVE_TEST_DATA=$data MOESERVE_TEST_DEVICE=$device \
    timeout "$seconds" "${check[@]}" "$here/bin/$test" --gtest_brief=1 --gtest_filter="$filter" \
    >"$here/$test.log" 2>&1
  printf '%d %d\n' $? $((SECONDS - start)) >"$here/$test.result"
}

failed=0
# report TEST: prints the result line, and the log if the test failed.
report() {
  local test=$1 code took log=$here/$1.log
  read -r code took <"$here/$test.result"
  printf '%-28s exit %3d  %4d s  %s\n' "$test" "$code" "$took" \
    "$(grep -E '^\[  (PASSED|FAILED)  \]|tests? ran' "$log" | head -2 | tr '\n' ' ')"
  if ((code != 0)); then
    failed=1
    grep -vE '^\[  +OK|^\[ RUN' "$log" | head -40
  elif grep -q "device $device: " "$log"; then
    # Tests skip themselves if the device cannot be used. Here that is a failure, because the device
    # was requested.
    failed=1
    grep -m1 "device $device: " "$log"
  elif [[ $test == *_test && -z ${GTEST_FILTER:-} ]] && grep -q '^\[==========\] 0 tests' "$log"; then
    failed=1
    printf 'no test of it runs on %s\n' "$device"
  fi
}

# Starts `jobs` programs at a time, in order, and reports them in the same order.
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

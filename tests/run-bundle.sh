#!/usr/bin/env bash
# Runs the tests of an unpacked bundle (deploy/bundle.sh) and says which passed.
#
#   run-tests.sh [--device cpu|cuda] [--models FOLDER] [--seconds N] [--check TOOL] [TEST...]
#
#   --device     where the models run (cuda); tests of kernels run on every device there is
#   --models     folder of the bundled models, deploy/models of the sources (default: beside this
#                file)
#   --check      run under compute-sanitizer with this tool (memcheck, racecheck, synccheck, initcheck)
#   --seconds    longest time of one program (240)
#   TEST         programs to run, "linear_test" say (all)
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
device=cuda
models=$here/models
seconds=240
check=()
tests=()
while (($# > 0)); do
  case $1 in
    --device) device=${2:?--device: expected cpu or cuda} && shift 2 ;;
    --models) models=$(realpath "${2:?--models: expected a folder}") && shift 2 ;;
    --seconds) seconds=${2:?--seconds: expected a number} && shift 2 ;;
    --check)
      check=(compute-sanitizer --tool "${2:?--check: expected a tool}" --error-exitcode 9) && shift 2
      ;;
    -*) printf 'error: unknown argument %s\n' "$1" >&2 && exit 2 ;;
    *) tests+=("$1") && shift ;;
  esac
done
if ((${#tests[@]} == 0)); then
  # Instructions and kernels first: what builds on them says less about a fault.
  for program in "$here"/bin/ptx_test_device "$here"/bin/*_device "$here"/bin/*_test; do
    name=$(basename "$program")
    [[ -x $program && " ${tests[*]} " != *" $name "* ]] && tests+=("$name")
  done
fi
mkdir -p "$here/test-data/deploy"
[[ -e $here/test-data/deploy/models ]] || ln -s "$models" "$here/test-data/deploy/models"

failed=0
for test in "${tests[@]}"; do
  log=$here/$test.log
  start=$SECONDS
  MOESERVE_TEST_DATA=$here/test-data MOESERVE_TEST_DEVICE=$device \
    timeout "$seconds" "${check[@]}" "$here/bin/$test" --gtest_brief=1 >"$log" 2>&1
  code=$?
  printf '%-28s exit %3d  %4d s  %s\n' "$test" "$code" $((SECONDS - start)) \
    "$(grep -E '^\[  (PASSED|FAILED)  \]|tests? ran' "$log" | head -2 | tr '\n' ' ')"
  if ((code != 0)); then
    failed=1
    grep -vE '^\[  +OK|^\[ RUN' "$log" | head -40
  elif grep -q "device $device: " "$log"; then
    # Tests skip themselves where the device cannot be used; here that is what one came for.
    failed=1
    grep -m1 "device $device: " "$log"
  fi
done
exit $failed

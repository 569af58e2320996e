#!/usr/bin/env bash
# Installs missing packages, builds the program and runs the tests. At the end, it prints how long
# every stage took, the 30 slowest tests, and the results of the C++ tests.
#
#   tests/run.sh [--full] [--fuzz SECONDS] [--no-install]
#
#   --full        also runs the tests with address and thread sanitizers, slow and load tests, the
#                 attack, the complete tokenizer comparison, tests with more JSON schemas, lm_eval,
#                 libFuzzer for 60 seconds per target, and the comparison of the golden files with
#                 recomputed results; takes hours
#   --fuzz        also runs libFuzzer on each target of tests/fuzz for this many seconds. Every run
#                 runs the targets over their kept inputs.
#   --no-install  installs no packages
#
# The server is built first. Then two chains of stages run beside each other (with --full, one after
# the other): the tests of the server in Python, and the build of the test programs with the stages
# that need them. The tests in C++ come last. The output of a stage of a chain is in build/test_logs
# and is printed when the stage ends. The first failure ends the run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=build/venv
readonly open_inference_venv=build/open_inference
readonly frameworks_venv=build/frameworks
readonly llama_index_venv=build/llama_index
readonly aiperf_venv=build/aiperf
readonly guidellm_venv=build/guidellm
readonly reference_venv=build/lm_eval  # tests/lm_eval/run.sh uses this folder by default
readonly prometheus=build/prometheus
readonly logs=build/test_logs
# The script uses the distribution's Python, because the packages are not installed for another one.
readonly python=/usr/bin/python3

full=false
fuzz_seconds=0
install=true
jobs=
stage=
stage_start=0
chains=()  # the processes of the chains that run

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

begin() {
  stage=$1
  stage_start=$SECONDS
  printf '\n==== %s\n' "$stage"
}

# stage NAME COMMAND...: runs a function or command. Prints NAME before and the duration after it.
stage() {
  begin "$1"
  shift
  "$@"
  note_time $((SECONDS - stage_start))
  stage=
}

# note_time SECONDS: prints the duration of the current stage and keeps it for print_times.
note_time() {
  printf '%5d s  %s\n' "$1" "$stage" >>"$logs/times"
  printf '==== %s: %d s\n' "$stage" "$1"
}

# logged NAME COMMAND...: runs a stage of a chain. Its output is printed when it ends. pytest writes
# the durations of its tests for print_slowest.
logged() {
  local name=$1 log status start=$SECONDS
  shift
  log=$logs/${name//[^a-zA-Z0-9]/_}
  printf '\n==== %s starts\n' "$name"
  set +e
  (
    set -e
    export PYTEST_ADDOPTS="--junitxml=$PWD/$log.xml"
    "$@"
  ) >"$log.log" 2>&1 </dev/null
  status=$?
  set -e
  printf '\n==== %s\n' "$name"
  cat "$log.log"
  if ((status != 0)); then
    printf '\n==== %s FAILED after %d s\n' "$name" $((SECONDS - start)) >&2
    exit "$status"
  fi
  stage=$name
  note_time $((SECONDS - start))
}

# beside FUNCTION...: runs functions at the same time, each in a process group of its own. If one
# fails, ends the others and exits.
beside() {
  local chain status=0
  set -m
  for chain in "$@"; do
    "$chain" &
    chains+=($!)
  done
  set +m
  for chain in "$@"; do
    wait -n || status=$?
    if ((status != 0)); then exit "$status"; fi
  done
  chains=()
}

end_chains() {
  local chain
  for chain in "${chains[@]}"; do kill -TERM -- "-$chain" 2>/dev/null || true; done
}

report_failure() {
  local status=$?
  end_chains
  if [[ -n $stage ]]; then
    printf '\n==== %s FAILED after %d s\n' "$stage" $((SECONDS - stage_start)) >&2
  fi
  exit "$status"
}

print_times() {
  printf '\n==== times\n'
  cat "$logs/times"
}

print_slowest() {
  printf '\n==== the slowest tests\n'
  $python tests/slowest.py 30 "$logs"/*.xml
}

install_packages() {
  local -a groups=(build tests)
  if $full; then groups+=(reference); fi
  deploy/install_dependencies.sh "${groups[@]}"
  deploy/install_dependencies.sh browser ||
    echo "without Chromium the tests of the dashboard are skipped"
  if $full; then
    deploy/install_dependencies.sh packages ||
      echo "without lintian and debootstrap tests of the Debian package are skipped"
  fi
  if ((fuzz_seconds > 0)); then
    deploy/install_dependencies.sh fuzz || echo "without clang the fuzz targets are skipped"
  fi
  unpack_prometheus
}

# Unpacks Prometheus and promtool from the distribution's package without installing it, because an
# installed Prometheus runs as a service. Tests that need it are skipped without it.
unpack_prometheus() {
  if command -v prometheus >/dev/null && command -v promtool >/dev/null; then return; fi
  if [[ -x $prometheus/usr/bin/promtool ]]; then return; fi
  rm -rf "$prometheus"
  mkdir -p "$prometheus"
  (cd "$prometheus" && apt-get download -qq -o APT::Sandbox::User=root prometheus &&
    dpkg-deb --extract prometheus_*.deb . && rm prometheus_*.deb) ||
    echo "there is no Prometheus here: the tests that need it are skipped"
}

# make_venv FOLDER REQUIREMENTS [OPTION...]: makes a virtual environment in FOLDER with the packages
# in the file REQUIREMENTS. Does nothing, and needs no network, if FOLDER has been made with the
# same requirements and options.
make_venv() {
  local folder=$1 requirements=$2 recipe
  shift 2
  recipe="$* $(sha256sum "$requirements")"
  if [[ -f $folder/recipe && $(<"$folder/recipe") == "$recipe" ]]; then
    echo "$folder is up to date"
    return
  fi
  $python -m venv --clear "$@" "$folder"
  "$folder/bin/pip" install --quiet --disable-pip-version-check -r "$requirements"
  printf '%s' "$recipe" >"$folder/recipe"
}

make_test_venv() { make_venv "$venv" tests/requirements.txt; }

# The SDK of KServe needs another version of Protobuf than the other tests.
make_open_inference_venv() {
  make_venv "$open_inference_venv" tests/open_inference/requirements.txt
}

# The environment uses the distribution's PyTorch, because the builds on PyPI are far larger.
make_reference_venv() {
  make_venv "$reference_venv" tests/lm_eval/requirements.txt --system-site-packages
}

# configure PRESET: configures a CMake preset.
configure() {
  local strict=OFF
  # Warnings are errors only in CI, because a newer compiler elsewhere may have new warnings.
  if [[ ${CI:-} == true ]]; then strict=ON; fi
  local architectures=()
  # The fast run compiles CUDA for one architecture, only to check that it compiles.
  if ! $full && ! nvidia-smi -L >/dev/null 2>&1; then
    architectures=(-DCMAKE_CUDA_ARCHITECTURES=90a-real)
  fi
  cmake --preset "$1" -DCMAKE_UNITY_BUILD=ON -DMOESERVE_TESTS=ON -DMOESERVE_DEV="$strict" \
    "${architectures[@]}"
}

# build PRESET: configures and builds a CMake preset.
build() {
  configure "$1"
  cmake --build --preset "$1" --parallel "$jobs"
}

# The programs that the tests in Python use.
build_programs() {
  configure release
  cmake --build --preset release --parallel "$jobs" --target \
    moeserve chat_template_cli tokenize_cli structured_cli
}

# The tests that run meanwhile are judged by the time that they take, so they come first.
build_tests() { nice -n 10 cmake --build --preset release --parallel "$jobs"; }

# client_tests PRESET: tests the preset's server with HTTP and gRPC clients in Python.
client_tests() {
  MOESERVE_BIN=$PWD/build/$1/moeserve MOESERVE_MODEL=$PWD/deploy/models/mh-moe \
    "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/clients
}

# framework_tests VENV: runs the tests of those frameworks that are installed in VENV.
framework_tests() {
  MOESERVE_BIN=$PWD/build/release/moeserve MOESERVE_MODEL=$PWD/deploy/models/mh-moe \
    "$1/bin/python" -m pytest -q -p no:cacheprovider tests/frameworks
}

# Several environments, because the frameworks need different versions of packages. guidellm brings
# PyTorch, so its environment takes 6 GB.
make_framework_venvs() {
  make_venv "$frameworks_venv" tests/frameworks/requirements.txt
  make_venv "$llama_index_venv" tests/frameworks/llama_index.txt
  make_venv "$aiperf_venv" tests/frameworks/aiperf.txt
  make_venv "$guidellm_venv" tests/frameworks/guidellm.txt
}

all_framework_tests() {
  local environment
  for environment in "$frameworks_venv" "$llama_index_venv" "$aiperf_venv" "$guidellm_venv"; do
    framework_tests "$environment"
  done
}

# Tests the Open Inference Protocol with the clients of Triton and KServe. Each has a process of its
# own, because both register the protocol's messages.
open_inference_tests() {
  local client
  for client in triton kserve; do
    MOESERVE_BIN=$PWD/build/release/moeserve MOESERVE_MODEL=$PWD/deploy/models/mh-moe \
      "$open_inference_venv/bin/python" -m pytest -q -p no:cacheprovider \
      "tests/open_inference/test_$client.py"
  done
}

# Prints the folders of the bundled decoders; deploy/models has encoders and translators, too.
bundled_decoders() { python3 tests/support/bundled_models.py; }

# Tests 200 sets of tools on every bundled decoder.
tool_tests() {
  local folder
  for folder in $(bundled_decoders); do
    MOESERVE_BIN=$PWD/build/release/moeserve MOESERVE_MODEL=$PWD/$folder \
      "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/clients/test_tools.py
  done
}

# Restarts and kills replicas behind HAProxy, if that is installed.
failover_tests() {
  MOESERVE_BIN=$PWD/build/release/moeserve MOESERVE_MODEL=$PWD/deploy/models/mh-moe \
    "$venv/bin/python" -m pytest -q -rs -p no:cacheprovider tests/failover
}

# Serves mixed traffic and checks that memory and latency stay flat, that a leak is found, and that
# answers stay the same to the bit beside all kinds of clients and changes.
soak_tests() {
  local folder=$PWD/deploy/models/mh-moe
  MOESERVE_BIN=$PWD/build/release/moeserve MOESERVE_MODEL=$folder \
    "$venv/bin/python" tests/soak/soak.py --minutes 5 2>/dev/null
  MOESERVE_BIN=$PWD/build/release/moeserve MOESERVE_MODEL=$folder \
    "$venv/bin/python" tests/soak/soak.py --minutes 3 --plant-leak 2>/dev/null
  MOESERVE_BIN=$PWD/build/release/moeserve "$venv/bin/python" tests/soak/steady.py --minutes 10 \
    2>/dev/null
}

# Attacks a server for ten minutes. The throughput of its honest clients is judged, too, so nothing
# else should run on the machine.
attack_tests() {
  local cgroups=/sys/fs/cgroup
  if [[ -d $cgroups/memory ]]; then cgroups+=/memory; fi
  if ! mkdir "$cgroups/moeserve-probe" 2>/dev/null; then
    printf 'skipped: the attack (this user cannot make a control group in %s)\n' "$cgroups"
    return
  fi
  rmdir "$cgroups/moeserve-probe"
  MOESERVE_BIN=$PWD/build/release/moeserve MOESERVE_MODEL=$PWD/deploy/models/mh-moe \
    "$venv/bin/python" tests/attack/attack.py --quiet-seconds 40
}

# Runs the client tests with models on a GPU, if there is one.
device_client_tests() {
  if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
    printf 'skipped: servers on CUDA (no GPU answers)\n'
    return
  fi
  MOESERVE_TEST_DEVICE=cuda client_tests release
}

# Checks that dashboards and alerts use metrics that the release build exports.
deployment_tests() {
  MOESERVE_BIN=$PWD/build/release/moeserve MOESERVE_MODEL=$PWD/deploy/models/mh-moe \
    "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/deploy
}

# Tests the Python client of deploy/python. It has a process of its own, because other tests generate
# the modules of the gRPC interface elsewhere.
python_client_tests() {
  MOESERVE_BIN=$PWD/build/release/moeserve MOESERVE_MODEL=$PWD/deploy/models/mh-moe \
    "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/python_client
}

# Tests the dashboard in a headless browser.
dashboard_tests() {
  MOESERVE_BIN=$PWD/build/release/moeserve MOESERVE_MODEL=$PWD/deploy/models/mh-moe \
    "$venv/bin/python" -m pytest -q -rs -p no:cacheprovider tests/web
}

# Compares every expert statistic with a recomputation in NumPy from dumped router data.
statistics_tests() {
  MOESERVE_BIN=$PWD/build/release/moeserve \
    "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/statistics
}

# export_tests VENV: tests the export from PyTorch; without PyTorch in VENV, only what needs none.
export_tests() {
  MOESERVE_BIN=$PWD/build/release/moeserve \
    "$1/bin/python" -m pytest -q -rs -p no:cacheprovider tests/export
}

# Tests the scripts of benchmarks with programs that pretend to be engines.
bench_script_tests() {
  "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/bench
}

chat_template_tests() {
  MOESERVE_CHAT_CLI=$PWD/build/release/tests/chat/chat_template_cli \
    "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/chat
}

# tokenizer_parity MEGABYTES: compares tokenizers on MEGABYTES of text per tokenizer setting.
tokenizer_parity() {
  "$venv/bin/python" tests/tokenizer/parity.py --cli build/release/tests/tokenize_cli \
    --megabytes "$1" deploy/models/mh-moe |
    { grep -v '^ok ' || true; }  # hides the lines of passed settings; the last line counts them
}

# schema_parity SCHEMAS LIMIT: tests constrained decoding with SCHEMAS generated JSON schemas and
# completions of at most LIMIT tokens.
schema_parity() {
  "$venv/bin/python" tests/structured/schema_parity.py --schemas "$1" --limit "$2" \
    build/release/tests/structured/structured_cli deploy/models/mh-moe
}

# model_answers SCHEMAS: tests completions of the bundled decoders with SCHEMAS generated JSON
# schemas.
model_answers() {
  local -a folders
  mapfile -t folders < <(bundled_decoders)
  "$venv/bin/python" tests/structured/model_answers.py build/release/moeserve "${folders[@]}" \
    --schemas "$1"
}

# run_ctest PRESET [ARGUMENT...]: runs the C++ tests of a preset.
run_ctest() {
  local preset=$1
  shift
  ctest --test-dir "build/$preset" --output-on-failure --no-tests=error --parallel "$jobs" "$@"
}

# Runs a command without address space randomization if possible. With randomization, thread
# sanitizer may fail to map its shadow memory.
steady_addresses() {
  if setarch "$(uname -m)" --addr-no-randomize true 2>/dev/null; then
    setarch "$(uname -m)" --addr-no-randomize "$@"
  else
    "$@"
  fi
}

# sanitize PRESET LABELS [ARGUMENT...]: builds a sanitizer's preset and runs its tests, without those
# whose label matches LABELS and with further arguments for ctest.
sanitize() {
  build "$1"
  run_ctest "$1" --label-exclude "$2" "${@:3}"
  MOESERVE_LOAD_REQUESTS=10000 client_tests "$1"
}

sanitize_threads() {
  local options="ignore_noninstrumented_modules=1:suppressions=$PWD/tests/tsan.supp"
  export TSAN_OPTIONS="${TSAN_OPTIONS:+$TSAN_OPTIONS:}$options"
  export -f configure build run_ctest client_tests sanitize
  export full jobs venv
  # The emulated device runs its threads in turns, so there are no races to find; it is ten times
  # as slow with this sanitizer.
  steady_addresses bash -euo pipefail -c \
    'sanitize tsan "slow|emulated" --exclude-regex cuda_emulated'
}

check_goldens() {
  "$reference_venv/bin/python" tests/reference/make_goldens.py --check
  "$reference_venv/bin/python" tests/reference/families/check_reference.py \
    --moeserve build/release/moeserve
}

# Checks that the PyTorch reference, run with the server's routes, selects the same experts.
routing_records() {
  local -a folders
  mapfile -t folders < <(bundled_decoders)
  "$reference_venv/bin/python" tests/routing/record_parity.py --moeserve build/release/moeserve \
    "${folders[@]}"
}

# run_script SCRIPT: runs a test script with the release build.
run_script() { MOESERVE_BIN=$PWD/build/release/moeserve bash "$1"; }

run_full() {
  stage "Python environments with frameworks" make_framework_venvs
  stage "frameworks" all_framework_tests
  stage "tools on every bundled model" tool_tests
  stage "Python environment with the clients of Triton and KServe" make_open_inference_venv
  stage "clients of Triton and KServe" open_inference_tests
  stage "replicas behind HAProxy" failover_tests
  stage "soak" soak_tests
  stage "attack" attack_tests
  stage "address and undefined-behaviour sanitizers" sanitize asan slow
  stage "thread sanitizer" sanitize_threads
  if [[ $(uname -m) == x86_64 ]]; then stage "aarch64 under qemu" tests/aarch64.sh; fi
  stage "Python environment with PyTorch" make_reference_venv
  stage "export from PyTorch" export_tests "$reference_venv"
  stage "goldens computed anew" check_goldens
  stage "routing records against the reference" routing_records
  stage "lm_eval" run_script tests/lm_eval/run.sh
  stage "example of lm_eval" framework_tests "$reference_venv"
}

server_chain() {
  logged "clients in Python" client_tests release
  logged "clients of frameworks" framework_tests "$venv"
  logged "clients of servers on CUDA" device_client_tests
  logged "typed client in Python" python_client_tests
  logged "dashboard in a browser" dashboard_tests
  logged "chat templates against jinja2" chat_template_tests
  logged "scripts of benchmarks" bench_script_tests
  logged "mappings of PyTorch modules" export_tests "$venv"
  logged "statistics of the experts against NumPy" statistics_tests
}

build_chain() {
  logged "build of the test programs" build_tests
  logged "deployment files" deployment_tests
  if $full; then
    logged "tokenizer against Hugging Face's" tokenizer_parity 2.2
    logged "structured output against jsonschema" schema_parity 5000 512
    logged "structured output in few tokens" schema_parity 2000 96
    logged "structured output of the models" model_answers 2000
  else
    logged "tokenizer against Hugging Face's" tokenizer_parity 0.02
    logged "structured output against jsonschema" schema_parity 500 512
    logged "structured output of the models" model_answers 500
  fi
}

# Runs after the others: tests of the server in Python are judged by the time that they take.
cpp_chain() {
  local -a labels=(--label-exclude slow)
  if $full; then labels=(); fi
  logged "tests in C++" run_ctest release --output-junit "$PWD/$logs/ctest.xml" "${labels[@]}"
}

main() {
  while (($# > 0)); do
    case $1 in
      --full)
        full=true
        fuzz_seconds=60
        ;;
      --fuzz)
        shift
        fuzz_seconds=${1:?a number of seconds}
        ;;
      --no-install) install=false ;;
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
  trap report_failure EXIT
  jobs=$(deploy/build_jobs.sh)
  # Client tests that take more than five seconds.
  if $full; then export MOESERVE_SLOW_TESTS=1; fi
  # Without this setting, ccache does not cache files that use precompiled headers.
  export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros}
  export PATH=$PATH:$PWD/$prometheus/usr/bin

  rm -rf "$logs"
  mkdir -p "$logs"
  if $install; then stage "packages" install_packages; fi
  stage "Python environment" make_test_venv
  stage "build of the server" build_programs
  # Nothing may disturb the load tests of --full.
  if $full; then
    beside build_chain
    beside server_chain
  else
    beside server_chain build_chain
  fi
  beside cpp_chain
  if ((fuzz_seconds > 0)); then stage "libFuzzer" tests/fuzz/run.sh "$fuzz_seconds"; fi
  if $full; then run_full; fi
  print_times
  print_slowest
  printf '\n==== tests in C++\n'
  cat "$logs/tests_in_C__.log"
}

main "$@"

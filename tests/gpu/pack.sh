#!/usr/bin/env bash
# Packs what a test of the CUDA backend on a GPU needs into one folder, for a machine that is lent
# for some minutes, takes few files, and has neither the sources nor a compiler. There, run.sh of
# the folder runs everything within a limit of time (see there).
#
#   tests/gpu/pack.sh [--build FOLDER] [--no-build] [--emulated] [--output FOLDER]
#                     [--models NAME,...] [--cases FILE] [--limit-mib N]
#
#   --build      the build folder; it must be configured. Without it, build/gpu is configured for
#                compute capability 9.0 alone.
#   --no-build   packs the build folder without building
#   --emulated   packs the tests on the emulated device and a server that uses it, to try the run on
#                a machine without a GPU. The build folder needs no nvcc (default: build/release).
#   --output     the folder to make (default: build/gpu-run). An older one is replaced.
#   --models     the bundled models to pack, or none. NAME:rounded is the model with few digits in
#                its weights, for comparisons with the CPU (default:
#                mh-moe,moa:rounded,hmoe-topp:rounded)
#   --cases      the list of cases (default: cases.txt or cases-emulated.txt next to this script)
#   --limit-mib  the most that the folder may take (default: 30)
#
# The folder has run.sh with its parts, programs.tar.xz with bin/ and lib/, and data.tar.xz with
# data/. If it is too large, the sizes of its parts are printed and nothing is left.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
build=
output=$root/build/gpu-run
compile=1
emulated=0
models=mh-moe,moa:rounded,hmoe-topp:rounded
cases=
limit_mib=30

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

while (($# > 0)); do
  case $1 in
    --build) build=$(realpath -m "${2:?--build: expected a folder}") && shift 2 ;;
    --no-build) compile=0 && shift ;;
    --emulated) emulated=1 && shift ;;
    --output) output=$(realpath -m "${2:?--output: expected a folder}") && shift 2 ;;
    --models) models=${2:?--models: expected names} && shift 2 ;;
    --cases) cases=$(realpath "${2:?--cases: expected a file}") && shift 2 ;;
    --limit-mib) limit_mib=${2:?--limit-mib: expected a number} && shift 2 ;;
    *) die "unknown argument $1" ;;
  esac
done
[[ $limit_mib =~ ^[1-9][0-9]*$ ]] || die "--limit-mib: expected a number, found $limit_mib"
if ((emulated)); then
  : "${build:=$root/build/release}" "${cases:=$here/cases-emulated.txt}"
elif [[ -z $build ]]; then
  build=$root/build/gpu
  ((compile == 0)) || cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DMOESERVE_TESTS=ON -DMOESERVE_CUDA=ON -DCMAKE_UNITY_BUILD=ON \
    -DCMAKE_CUDA_ARCHITECTURES=90a-real
fi
: "${cases:=$here/cases.txt}"
[[ $models != none ]] || models=
IFS=, read -r -a models <<<"$models"
[[ ! -e $output || -f $output/pack.env ]] ||
  die "$output exists and was not made by this script: name another folder with --output"

# The programs that the cases name.
mapfile -t programs < <(awk '/^[^#]/ && ($4 == "gtest" || $4 == "sanitizer") {
    name = $4 == "gtest" ? $5 : $6; sub(":.*", "", name); print name }
  /^[^#]/ && $4 == "server" { print "moeserve"; print "server_check" }
  /^[^#]/ && ($4 == "load" || $4 == "model" || $4 == "profile") { print "moeserve" }
  /^[^#]/ && $4 == "kernels" { print "cuda_bench" }' "$cases" | sort -u)
((${#programs[@]} > 0)) || die "$cases names no programs"
# uses REGEX: whether a case runs tests of a source file that matches REGEX.
uses() {
  awk '/^[^#]/ && $4 == "gtest" { sub(".*:", "", $5); print $5 }' "$cases" | grep -xE -- "$1" >/dev/null
}

# target NAME: prints the name of a program's target in the build.
target() {
  if ((emulated)); then
    case $1 in
      moeserve) printf 'moeserve_emulated' && return ;;
      cuda_bench) printf 'cuda_bench_emulated' && return ;;
      ptx_test_device) printf 'cuda_tests' && return ;;
      cuda_*_device) printf '%s' "${1%_device}" && return ;;
    esac
  fi
  printf '%s' "$1"
}
# One program has the code of those that it contains, and runs the one that it is called as.
one=gpu_run
((emulated == 0)) || one=gpu_run_emulated
contained() { grep -q "^PROGRAM($1," "$build/tests/gpu/${one}_programs/programs.inc" 2>/dev/null; }
if ((compile)); then
  targets=()
  for name in "${programs[@]}"; do
    if contained "$name"; then targets+=("$one"); else targets+=("$(target "$name")"); fi
  done
  mapfile -t targets < <(printf '%s\n' "${targets[@]}" | sort -u)
  cmake --build "$build" --target "${targets[@]}"
fi

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir -p "$stage/payload/bin" "$stage/payload/lib" "$stage/payload/data" "$stage/folder"
payload=$stage/payload

is_elf() { [[ $(head -c 4 "$1") == $'\x7fELF' ]]; }
# add_program FILE NAME
add_program() {
  if is_elf "$1"; then
    [[ $(objdump -p "$1" | awk '$1 == "RPATH" {print $2}') == *'$ORIGIN/../lib'* ]] ||
      die "$1 has no run path to its libraries"
    strip -o "$payload/bin/$2" "$1"
  else
    install -m 755 "$1" "$payload/bin/$2"
  fi
}
for name in "${programs[@]}"; do
  if contained "$name"; then
    file=$build/tests/gpu/$one
    [[ -x $file ]] || die "$one is missing from $build: build it, or omit --no-build"
    [[ -e $payload/bin/$one ]] || add_program "$file" "$one"
    ln -s "$one" "$payload/bin/$name"
    continue
  fi
  file=
  for folder in . tests tests/cuda tests/bench tests/gpu tests/model_loaders; do
    [[ -x $build/$folder/$(target "$name") && -f $build/$folder/$(target "$name") ]] &&
      file=$build/$folder/$(target "$name")
  done
  [[ -n $file ]] || die "$(target "$name") is missing from $build: build it, or omit --no-build"
  add_program "$file" "$name"
done

# The C library and its parts must come from the system that runs the programs.
glibc='^(linux-vdso|ld-linux.*|libc|libm|libpthread|libdl|librt|libresolv|libutil)[.]so'
for program in "$payload"/bin/*; do
  [[ -L $program ]] || ! is_elf "$program" || ldd "$program"
done | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u |
  while read -r name file; do
    [[ $name =~ $glibc ]] && continue
    install -m 644 "$(readlink -f "$file")" "$payload/lib/$name"
    strip --strip-unneeded "$payload/lib/$name"
  done

# copy PATH...: copies files and folders of the sources.
copy() {
  local path
  for path in "$@"; do
    [[ -e $root/$path ]] || die "$path is missing from the sources"
    mkdir -p "$payload/data/$(dirname "$path")"
    cp -r "$root/$path" "$payload/data/$(dirname "$path")/"
  done
}
python3 "$root/tests/support/golden_files.py" unpack
golden() { (cd "$root" && ls -d tests/golden/$1); }
# listed PREFIX: copies the files that goldens.txt lists and that begin with PREFIX.
listed() {
  local pattern path
  while read -r pattern; do
    [[ $pattern == "$1"* ]] || continue
    for path in "$root"/tests/golden/$pattern; do copy "${path#"$root/"}"; done
  done < <(grep -v '^#' "$here/goldens.txt")
}
if uses family_test || uses gguf_test; then listed families/; fi
if uses gguf_test; then listed gguf/; fi
if uses fairseq_test; then listed fairseq; fi
if uses '(parity|invariance|engine|routing|device_statistics|speculation|textless_ids|soak)_test'; then
  # shellcheck disable=SC2046
  copy $(golden 'tiny-*')
fi
# Test programs list these folders when they start.
for folder in "$root"/tests/golden/*/; do
  case $(basename "$folder") in
    encoders | families | fairseq | faults | gguf | pairs)
      mkdir -p "$payload/data/tests/golden/$(basename "$folder")" ;;
  esac
done
exact=()
for model in "${models[@]}"; do
  copy "deploy/models/${model%:rounded}"
  if [[ $model == *:rounded ]]; then
    python3 "$here/shrink_data.py" weights "$payload/data/deploy/models/${model%:rounded}"/*.safetensors
  else
    exact+=("$model")
    [[ ! -d $root/tests/golden/$model ]] || copy "tests/golden/$model"
  fi
done
((${#models[@]} == 0)) || copy tests/golden/perplexity.json tests/data/heldout.txt
find "$payload/data" -name golden.safetensors -exec python3 "$here/shrink_data.py" results {} +
if grep -qE '^[^#].* baselines ' "$cases"; then
  for file in "$root"/tests/bench/gpu/*.py; do copy "tests/bench/gpu/$(basename "$file")"; done
fi
cp "$root/tests/chat/templates/chatml.jinja" "$payload/data/chat.jinja"

folder=$stage/folder
install -m 755 "$here/run.sh" "$here/case.sh" "$here/summary.sh" "$folder/"
install -m 644 "$here/predictions.tsv" "$folder/"
install -m 644 "$cases" "$folder/cases.txt"
model_filter=$(IFS=: && printf '%s' "${exact[*]/#/*/}")
model_filter=${model_filter//-/_}
{
  printf 'packed_from=%s\n' \
    "$(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)"
  printf 'emulated=%s\n' "$emulated"
  printf 'model_filter=%q\n' "$model_filter"
  if ((emulated)); then
    # The emulated device is about a thousand times slower than the host.
    printf '%s\n' test_device=cuda_emulated tokens=2 request_seconds=250 load_tokens=4 \
      profile_bytes=400 bench_rounds=1 "server_options='--max-step-tokens 64 --max-num-seqs 4'" \
      "bench_options=--tiny" "baseline_filter="
  else
    printf '%s\n' test_device=cuda tokens=24 request_seconds=30 load_tokens=64 \
      profile_bytes=60000 bench_rounds=3 server_options= bench_options= \
      "baseline_filter=B1L4096,B32L4096,B128L4096,L4096,moa/T,mhmoe_n8/T,olmoe/T,hmoe/T,128000"
  fi
} >"$folder/pack.env"

# pack NAME FILTERS... -- FOLDERS...: writes an archive. The filter for x86 replaces the distances of
# calls by addresses, which repeat. In data, two bits of the position select the contexts of literals,
# so each byte of a float has its own.
pack() {
  local archive=$folder/$1.tar.xz filters=()
  shift
  while [[ $1 != -- ]]; do filters+=("$1") && shift; done
  shift
  tar -C "$payload" --sort=name --owner=0 --group=0 --mtime=@0 -cf - "$@" |
    xz -T1 "${filters[@]}" >"$archive"
}
filter=()
[[ $(uname -m) != x86_64 ]] || filter=(--x86)
unpacked=$(du -sb "$payload" | cut -f1)
pack programs "${filter[@]}" --lzma2=preset=6,lc=4,dict=96MiB -- bin lib
pack data --lzma2=preset=6e,lc=1,lp=2,pb=2,dict=64MiB -- data

bytes=$(find "$folder" -type f -printf '%s\n' | awk '{sum += $1} END {print sum}')
mib() { awk -v bytes="$1" 'BEGIN {printf "%.1f MiB", bytes / 1048576}'; }
if ((bytes > limit_mib << 20)); then
  {
    printf 'error: the folder has %s, more than %s MiB. Unpacked sizes in KiB:\n' \
      "$(mib "$bytes")" "$limit_mib"
    cd "$payload"
    find bin lib data -maxdepth 3 -type d -print0 | xargs -0 du -sk | sort -rn | head -n 25 || true
    find bin -type f -printf '%k\t%p\n' | sort -rn | head -n 8 || true
  } >&2
  exit 1
fi
rm -rf "$output"
mkdir -p "$(dirname "$output")"
cp -r "$folder" "$output"
printf '%s: %s in %d files, programs %s, data %s (unpacked %s): %d programs, %d libraries, %d cases\n' \
  "$output" "$(mib "$bytes")" "$(find "$output" -type f | wc -l)" \
  "$(mib "$(stat -c %s "$folder/programs.tar.xz")")" \
  "$(mib "$(stat -c %s "$folder/data.tar.xz")")" "$(mib "$unpacked")" \
  "${#programs[@]}" "$(find "$payload/lib" -type f | wc -l)" "$(grep -cE '^[^#]' "$cases")"

#!/usr/bin/env bash
# Runs the cases of a folder made by pack.sh on this machine's GPU, within a limit of time.
#
#   run.sh [--out FOLDER] [--seconds N] [--jobs N] [--filter REGEX] [--earlier FOLDER] [--retry]
#          [--list]
#
#   --out       the folder for the results (default: $OUT, else "results" next to this script). It
#               gets at most 8 files: results.tsv, summary.md, failures.log, cases.log, device.txt,
#               kernels.jsonl, models.jsonl and baselines.jsonl.
#   --seconds   the time for everything, unpacking and summary included (default: 550)
#   --jobs      the number of tests that run at a time (default: the cores, at most 14).
#               Measurements always run alone.
#   --filter    runs only the cases whose names match the regular expression
#   --earlier   a folder with the results of an earlier run (default: "earlier" next to this script,
#               if it exists). A case that has a result there or in --out is not run again.
#   --retry     runs selected cases again that failed or ran out of their own time
#   --list      prints the cases and exits
#
# The cases are in cases.txt, in the order of what is to be learnt from them. A result is written as
# soon as its case has ended, so a run that is cut off can be continued. Exits with 1 if a case
# failed, with 3 if cases are left.
set -uo pipefail

SECONDS=0
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$here/results}
seconds=550
cores=$(nproc)
jobs=$((cores > 14 ? 14 : cores))
filter=.
earlier=
retry=0
list=0
most_bytes=$((12 << 20))  # of one file in --out

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

while (($# > 0)); do
  case $1 in
    --out) out=${2:?--out: expected a folder} && shift 2 ;;
    --seconds) seconds=${2:?--seconds: expected a number} && shift 2 ;;
    --jobs) jobs=${2:?--jobs: expected a number} && shift 2 ;;
    --filter) filter=${2:?--filter: expected a regular expression} && shift 2 ;;
    --earlier) earlier=${2:?--earlier: expected a folder} && shift 2 ;;
    --retry) retry=1 && shift ;;
    --list) list=1 && shift ;;
    *) die "unknown argument $1" ;;
  esac
done
[[ $seconds =~ ^[0-9]+$ ]] && ((seconds >= 10)) ||
  die "--seconds: expected a number of at least 10, found $seconds"
[[ $jobs =~ ^[1-9][0-9]*$ ]] || die "--jobs: expected a number, found $jobs"
if [[ -z $earlier && -d $here/earlier ]]; then earlier=$here/earlier; fi
[[ -z $earlier || -d $earlier ]] || die "--earlier: $earlier is not a folder"
[[ -f $here/cases.txt && -f $here/pack.env ]] || die "$here is not a folder made by pack.sh"

# A line of cases.txt: name, together|alone, time limit in seconds, then the arguments of case.sh.
names=()
declare -A lines=()
while read -r name mode limit command; do
  [[ -z $name || $name == \#* || ! $name =~ $filter ]] && continue
  names+=("$name")
  lines[$name]="$mode $limit $command"
done <"$here/cases.txt"
if ((list)); then
  for name in "${names[@]}"; do printf '%-22s %s\n' "$name" "${lines[$name]}"; done
  exit 0
fi

mkdir -p "$out"
out=$(cd "$out" && pwd)
for name in {results.tsv,device.txt,{kernels,models,baselines}.jsonl,{failures,cases}.log}; do
  [[ -n $earlier && -f $earlier/$name && ! -e $out/$name ]] && cp "$earlier/$name" "$out/$name"
done
results=$out/results.tsv
[[ -f $results ]] ||
  printf 'case\tstatus\tseconds\tfigure\tunit\tlast\ttarget\tratio\tnote\n' >"$results"
if ((retry)); then
  awk -F'\t' -v filter="$filter" '!($1 ~ filter && ($2 == "failed" || $2 == "timeout"))' \
    "$results" >"$results.new" && mv "$results.new" "$results"
  # cuda_bench skips the cases that this file has.
  if [[ -f $out/kernels.jsonl ]]; then
    awk '{match($0, /"name":"[^"]*"/); name = substr($0, RSTART, RLENGTH)}
      NR == FNR {if (/"error":/) bad[name]; next} !(name in bad)' \
      "$out/kernels.jsonl" "$out/kernels.jsonl" >"$results.new" &&
      mv "$results.new" "$out/kernels.jsonl"
  fi
fi

# The programs are unpacked once; the folder is that of the archives' content.
scratch=${TMPDIR:-/tmp}/moeserve-gpu-run-$(id -u)
packed=$scratch/$(cat "$here"/{programs,data}.tar.xz | sha256sum | cut -c1-16)
unpack_archive() {
  if command -v xz >/dev/null; then
    xz -dc "$here/$1.tar.xz" | tar -C "$packed" -xf -
  else
    python3 -c 'import lzma, shutil, sys
with lzma.open(sys.argv[1]) as source: shutil.copyfileobj(source, sys.stdout.buffer)' \
      "$here/$1.tar.xz" | tar -C "$packed" -xf -
  fi
}
unpack() {
  [[ -f $packed/complete ]] && return
  rm -rf "$packed" && mkdir -p "$packed" || return
  unpack_archive programs & local programs=$!
  unpack_archive data || { wait "$programs"; return 1; }
  wait "$programs" && touch "$packed/complete"
}
unpack || die "cannot unpack the archives of $here into $packed"
work=$(mktemp -d "$scratch/work.XXXXXX") || die "cannot make a folder in $scratch"
export PACKED=$packed HERE=$here OUT=$out WORK=$work

# has NAME: whether the case has a result.
has() { cut -f1 "$results" | grep -qxF -- "$1"; }

# add NAME STATUS SECONDS FIGURE UNIT NOTE: writes a result, with what was predicted.
add() {
  local last=- target=- ratio=-
  if [[ $4 != - ]]; then
    IFS=$'\t' read -r last target < <(awk -F'\t' -v name="$1" -v unit="$5" \
      '$1 == name && $4 == unit {print $2 "\t" $3; exit}' "$here/predictions.tsv")
    : "${last:=-}" "${target:=-}"
    # Above 1, it is better than predicted. What has no last result is compared with its aim.
    local predicted=$last
    [[ $last != - ]] || predicted=$target
    [[ $predicted != - ]] && ratio=$(awk -v a="$4" -v b="$predicted" -v unit="$5" \
      'BEGIN {printf "%.2f", unit == "us" ? (a > 0 ? b / a : 0) : (b > 0 ? a / b : 0)}')
  fi
  printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" "$5" "$last" "$target" \
    "$ratio" "${6:0:400}" >>"$results"
}

# append FILE MOST: appends standard input to a file in --out, which must not grow beyond MOST
# bytes.
append() {
  local file=$out/$1
  (($(stat -c %s "$file" 2>/dev/null || echo 0) < $2)) && cat >>"$file" || cat >/dev/null
}

declare -A pids=()
# start NAME LIMIT: starts a case in the background. Its exit status and time go to a file.
start() {
  local name=$1 limit=$2 cut=0 mode own command
  read -r mode own command <<<"${lines[$name]}"
  ((limit < own)) && cut=1
  ((limit > own)) && limit=$own
  (
    began=$EPOCHREALTIME
    # No case may fill the disk.
    ulimit -f $((256 << 10))
    # The words of a case contain patterns that must not be matched with files.
    set -f
    FIGURES=$work/$name.figures timeout -k 3 "$limit" bash "$here/case.sh" $command \
      >"$work/$name.log" 2>&1 </dev/null &
    child=$!
    trap 'kill "$child" 2>/dev/null' TERM
    wait "$child"
    code=$?
    awk -v a="$began" -v b="$EPOCHREALTIME" -v code="$code" -v cut="$cut" \
      'BEGIN {printf "%d %.1f %d\n", code, b - a, cut}' >"$work/$name.ending"
    mv "$work/$name.ending" "$work/$name.end"
  ) &
  pids[$name]=$!
}

# finish NAME: writes the result of a case that has ended.
finish() {
  local name=$1 code took cut status log=$work/$1.log note
  read -r code took cut <"$work/$name.end"
  wait "${pids[$name]}" 2>/dev/null
  unset "pids[$name]"
  # A case that the end of the whole run cut off has no result.
  if ((code == 124 || code == 137 || code == 143)) && ((cut || stopping)); then
    printf '%-22s cut off after %s s\n' "$name" "$took"
    return
  fi
  case $code in
    0) status=passed ;;
    77) status=skipped ;;
    124 | 137) status=timeout ;;
    *) status=failed ;;
  esac
  note=$(tail -n 1 "$log" 2>/dev/null | tr '\t' ' ')
  add "$name" "$status" "$took" - - "$note"
  if [[ -f $work/$name.figures ]]; then
    local figure value unit more
    while IFS=$'\t' read -r figure value unit more; do
      has "$figure" && continue
      if [[ $value == - ]]; then
        add "$figure" failed - - - "$more"
      else
        add "$figure" measured - "$value" "$unit" "$more"
      fi
    done <"$work/$name.figures"
  fi
  if [[ $status == failed || $status == timeout ]]; then
    { printf '\n==== %s: %s (exit %s) after %s s: %s\n' "$name" "$status" "$code" "$took" \
      "${lines[$name]}"; grep -vE '^\[  +OK|^\[ RUN' "$log" | tail -c 12000; } |
      append failures.log $((4 << 20))
  fi
  { printf '\n==== %s: %s after %s s\n' "$name" "$status" "$took"
    grep -vE '^\[  +OK|^\[ RUN' "$log" | tail -n 120 | tail -c 20000; } |
    append cases.log $((8 << 20))
  printf '%-22s %-8s %6s s  %s\n' "$name" "$status" "$took" "${note:0:100}"
}

# reap: writes the results of all cases that have ended.
reap() {
  local name
  for name in "${!pids[@]}"; do [[ -f $work/$name.end ]] && finish "$name"; done
}

stopping=0
summarize() {
  trap '' TERM INT
  bash "$here/summary.sh" "$here" "$out" "$SECONDS" >"$out/summary.md"
  cat "$out/summary.md"
  local file
  for file in "$out"/*; do
    (($(stat -c %s "$file") > most_bytes)) && truncate -s "$most_bytes" "$file"
  done
  rm -rf "$work"
}
stop() {
  trap '' TERM INT
  stopping=1
  local name
  for name in "${!pids[@]}"; do kill "${pids[$name]}" 2>/dev/null; done
  for name in "${!pids[@]}"; do wait "${pids[$name]}" 2>/dev/null; done
  reap
  summarize
  exit 3
}
trap stop TERM INT

end=$((seconds - 6))  # the rest is for ending processes and for the summary
left() { echo $((end - SECONDS)); }
for name in "${names[@]}"; do
  has "$name" && continue
  read -r mode own _ <<<"${lines[$name]}"
  # Waits for a free place, or for all other cases if this one must run alone.
  while reap; ((${#pids[@]} >= jobs)) ||
    { [[ $mode == alone || ${alone:-0} == 1 ]] && ((${#pids[@]} > 0)); }; do
    sleep 0.1
  done
  (($(left) < 3)) && break
  alone=0
  [[ $mode == alone ]] && alone=1
  start "$name" "$(left)"
done
while reap; ((${#pids[@]} > 0)); do sleep 0.1; done
summarize
left_out=0
for name in "${names[@]}"; do has "$name" || left_out=1; done
cut -f2 "$results" | grep -qE '^(failed|timeout)$' && exit 1
((left_out)) && exit 3
exit 0

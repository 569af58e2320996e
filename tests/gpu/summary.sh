#!/usr/bin/env bash
# Prints the summary of a run in Markdown.
#
#   summary.sh PACKED_FOLDER RESULTS SECONDS
# shellcheck disable=SC1091,SC2154  # pack.env sets variables
set -uo pipefail

here=$1
out=$2
results=$out/results.tsv
. "$here/pack.env"

count() { tail -n +2 "$results" | cut -f2 | grep -cx -- "$1"; }

printf '# Run on a GPU\n\n'
printf 'Packed from %s. %s s in this call.\n' "$packed_from" "$3"
((emulated)) && printf 'The device was the emulated one: its figures of speed mean nothing.\n'
printf '\n%s passed, %s failed, %s out of time, %s skipped, %s figures.\n' "$(count passed)" \
  "$(count failed)" "$(count timeout)" "$(count skipped)" "$(count measured)"

missing=()
while read -r name _; do
  [[ -z $name || $name == \#* ]] && continue
  cut -f1 "$results" | grep -qxF -- "$name" || missing+=("$name")
done <"$here/cases.txt"
((${#missing[@]} == 0)) || printf '\n**Not run yet** (%s): %s\n' "${#missing[@]}" "${missing[*]}"

# rows CONDITION: prints the results that match, without figures.
rows() { awk -F'\t' "NR > 1 && ($1)"' {
    gsub(/[|]/, "/"); printf "| %s | %s | %s | %s |\n", $1, $2, $3, $9}' "$results"; }
table() {
  local lines
  lines=$(rows "$2")
  [[ -n $lines ]] || return
  printf '\n## %s\n\n| case | status | s | note |\n|---|---|---|---|\n%s\n' "$1" "$lines"
}
table 'Failed' '$2 == "failed" || $2 == "timeout"'
table 'Skipped' '$2 == "skipped"'
table 'Passed' '$2 == "passed"'

figures() {
  awk -F'\t' "NR > 1 && \$2 == \"measured\" && ($1)"' {
    gsub(/[|]/, "/")
    printf "| %s | %s %s | %s | %s | %s | %s |\n", $1, $4, $5, $6, $7, $8, $9}' "$results"
}
figure_table() {
  local lines
  lines=$(figures "$2")
  [[ -n $lines ]] || return
  printf '\n## %s\n\n' "$1"
  printf '| figure | measured | predicted | aim | better than predicted by | note |\n'
  printf '|---|---|---|---|---|---|\n%s\n' "$lines"
}
figure_table 'More than 15 % worse than predicted' '$8 != "-" && $8 < 0.85'
figure_table 'Figures with a prediction' '$8 != "-" && $8 >= 0.85'
figure_table 'Other figures' '$8 == "-"'

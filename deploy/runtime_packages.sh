#!/usr/bin/env bash
# Prints the installed packages that a program needs to run, one to a line: those that own the
# shared libraries it names itself. What these need in turn is for apt to know.
#
#   deploy/runtime_packages.sh PROGRAM
set -euo pipefail

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

(($# == 1)) || die "expected one argument, the program"
needed=$(LC_ALL=C objdump -p "$1" | awk '$1 == "NEEDED" {print $2}')
[[ -n $needed ]] || die "$1 names no shared libraries"
resolved=$(ldd "$1")
while read -r library; do
  file=$(awk -v name="$library" '$1 == name && $2 == "=>" {print $3}' <<<"$resolved")
  # The dynamic linker is resolved without an arrow, and comes with the C library.
  if [[ $library == ld-linux* ]]; then continue; fi
  [[ -n $file ]] || die "$library is not found"
  # The package may have recorded the file under /lib or /usr/lib, whichever ldd does not say.
  file=$(readlink -f "$file")
  owner=$(dpkg-query -S "$file" 2>/dev/null || dpkg-query -S "${file#/usr}" 2>/dev/null) ||
    die "no package owns $file"
  printf '%s\n' "${owner%%:*}"
done <<<"$needed" | sort -u

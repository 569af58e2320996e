#!/usr/bin/env bash
# Prints the installed packages that own the shared libraries a program links directly, one per
# line. apt adds the dependencies of these packages.
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
  # ldd prints the dynamic linker without an arrow. It is part of the C library's package.
  if [[ $library == ld-linux* ]]; then continue; fi
  [[ -n $file ]] || die "$library is not found"
  # The real path of a library begins with /usr/lib, but its package may list it under /lib: try
  # both.
  file=$(readlink -f "$file")
  owner=$(dpkg-query -S "$file" 2>/dev/null || dpkg-query -S "${file#/usr}" 2>/dev/null) ||
    die "no package owns $file"
  printf '%s\n' "${owner%%:*}"
done <<<"$needed" | sort -u

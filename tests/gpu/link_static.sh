#!/usr/bin/env bash
# Runs a command that links a program, but with static libraries instead of shared ones where the
# system has them: of those, the program contains only what it uses. CMake finds shared libraries
# only. The C library and its parts stay shared (pack.sh).
set -euo pipefail

arguments=() parts=()
for argument in "$@"; do
  case $argument in
    /usr/lib/*.so | /usr/lib/*.so.*)
      static=${argument%%.so*}.a
      [[ ! -e $static ]] || argument=$static ;;
    -l*)
      static=$(${1} -print-file-name="lib${argument#-l}.a")
      [[ $argument =~ ^-l(rt|pthread|dl|m|c|atomic)$ || ! -e $static ]] || argument=$static ;;
  esac
  # Of inline functions that several files have, the program gets those of the first one. The
  # libraries are optimized better than tests.
  if [[ $argument == *.part.o ]]; then parts+=("$argument"); else arguments+=("$argument"); fi
done
# What these libraries need. Linkers take from a static library only what is missing.
for argument in "${arguments[@]}"; do
  [[ $argument == */libedit.a ]] || continue
  for name in tinfo bsd md; do arguments+=("$("$1" -print-file-name="lib$name.a")"); done
done
for argument in "${arguments[@]}"; do
  [[ $argument == */libabsl_base.a ]] || continue
  arguments+=("${argument%_base.a}"_*.a) && break
done
exec "${arguments[0]}" -Wl,--start-group "${arguments[@]:1}" "${parts[@]}" -Wl,--end-group

#!/usr/bin/env bash
# Prints how many compilers to run in parallel: one per core, or fewer if memory is short. The
# largest source files (gRPC, Boost.Asio) take about 1.5 GB each.
set -euo pipefail

mib=$(awk '$1 == "MemAvailable:" {print int($2 / 1024)}' /proc/meminfo)
# /proc/meminfo is about the whole machine; a container can have less.
limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
if [[ $limit != max ]] && ((limit >> 20 < mib)); then mib=$((limit >> 20)); fi
jobs=$((mib / 1500))
cores=$(nproc)
if ((jobs > cores)); then jobs=$cores; fi
if ((jobs < 1)); then jobs=1; fi
echo "$jobs"

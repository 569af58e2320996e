#!/usr/bin/env bash
# Prints how many compilers to run at the same time: one for each core, but no more than memory
# holds. The largest source files (gRPC, Boost.Asio) take about 1.5 GB each.
set -euo pipefail

mib=$(awk '$1 == "MemAvailable:" {print int($2 / 1024)}' /proc/meminfo)
# /proc/meminfo tells of the whole machine, a container may have less.
limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
if [[ $limit != max ]] && ((limit >> 20 < mib)); then mib=$((limit >> 20)); fi
jobs=$((mib / 1500))
cores=$(nproc)
if ((jobs > cores)); then jobs=$cores; fi
if ((jobs < 1)); then jobs=1; fi
echo "$jobs"

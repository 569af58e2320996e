#!/usr/bin/env bash
# Prints how many compilers to run in parallel: one per core, or fewer if memory is short. A
# compiler needs about 1.5 GB for the largest source files (gRPC, Boost.Asio); up to 2 GB where
# CMakeLists.txt makes large units, which takes a machine with 3 GB for each core.
set -euo pipefail

mib=$(awk '$1 == "MemAvailable:" {print int($2 / 1024)}' /proc/meminfo)
# /proc/meminfo describes the whole machine; the limit of a container can be lower.
limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
if [[ $limit != max ]] && ((limit >> 20 < mib)); then mib=$((limit >> 20)); fi
jobs=$((mib / 1500))
cores=$(nproc)
if ((jobs > cores)); then jobs=$cores; fi
if ((jobs < 1)); then jobs=1; fi
echo "$jobs"

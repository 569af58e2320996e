// Selects the kernel table for this processor.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/cpu/isa/kernel_table.h"

namespace moeserve::cpu {

// Returns the tables that this processor can run, fastest first; never empty.
std::vector<const KernelTable*> SupportedTables();

// Returns the table with this name: "amx_bf16", "avx512_bf16", "avx512_vnni", "avx512" or "avx2"
// on x86-64, "neon_bf16", "neon_i8mm", "neon_dot" or "neon" on aarch64, "plain" on both; "auto"
// selects the fastest one. InvalidArgument: the name is unknown, or this processor does not support
// the table. The error message lists the supported tables.
Result<const KernelTable*> SelectTable(std::string_view name);

// Makes SelectTable() find `table` by its name if no table of this processor has it, never as
// "auto". For tests, before other threads select tables. The table is not copied.
void RegisterTable(const KernelTable* table);

// Returns whether tiles that read weights from memory should prefetch them into the first-level
// cache: not on AMD's processors. A Zen 4 processor reads more slowly with these prefetches than
// with none, and faster with some prefetches into the second-level cache (PrefetchesToL2()).
bool PrefetchesToL1();

}  // namespace moeserve::cpu

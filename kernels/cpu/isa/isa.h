// Selects the kernel table for this processor.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/cpu/isa/kernel_table.h"

namespace moeserve::cpu {

// The tables that this processor can run, best first; never empty.
std::vector<const KernelTable*> SupportedTables();

// `name`: "auto" for the best, or one of "avx512_bf16", "avx512_vnni", "avx512", "avx2",
// "plain".
// InvalidArgument: unknown, or not supported by this processor (the message lists those that are).
Result<const KernelTable*> SelectTable(std::string_view name);

}  // namespace moeserve::cpu

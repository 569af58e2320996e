#define MOESERVE_ISA plain
#define MOESERVE_BF16_DOT 0
#define MOESERVE_PANEL_TILE 1

#include "kernels/cpu/isa/kernel_table.h"
//
#include "kernels/cpu/isa/simd/plain.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

namespace moeserve::cpu {

extern const KernelTable kPlainTable;
const KernelTable kPlainTable = plain::MakeTable("plain");

}  // namespace moeserve::cpu

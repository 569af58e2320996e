#define MOESERVE_ISA neon_dot
#define MOESERVE_BF16_DOT 0
#define MOESERVE_PANEL_TILE 1
#define MOESERVE_NEON_DOT 1

#include "kernels/cpu/isa/kernel_table.h"
//
#include "kernels/cpu/isa/simd/neon.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

namespace moeserve::cpu {

extern const KernelTable kNeonDotTable;
const KernelTable kNeonDotTable = neon_dot::MakeTable("neon_dot");

}  // namespace moeserve::cpu

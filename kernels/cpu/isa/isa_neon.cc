#define MOESERVE_ISA neon
#define MOESERVE_BF16_DOT 0
#define MOESERVE_PANEL_TILE 1
#define MOESERVE_NEON_DOT 0

#include "kernels/cpu/isa/kernel_table.h"
//
#include "kernels/cpu/isa/simd/neon.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

namespace moeserve::cpu {

extern const KernelTable kNeonTable;
const KernelTable kNeonTable = neon::MakeTable("neon");

}  // namespace moeserve::cpu

#define MOESERVE_ISA avx2
#define MOESERVE_BF16_DOT 0
#define MOESERVE_PANEL_TILE 1

#include "kernels/cpu/isa/kernel_table.h"
//
#include "kernels/cpu/isa/simd/avx2.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

namespace moeserve::cpu {

extern const KernelTable kAvx2Table;
const KernelTable kAvx2Table = avx2::MakeTable("avx2");

}  // namespace moeserve::cpu

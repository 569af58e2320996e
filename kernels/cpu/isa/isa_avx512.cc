#define MOESERVE_ISA avx512
#define MOESERVE_BF16_DOT 0
#define MOESERVE_VNNI 0
#define MOESERVE_PANEL_TILE 4

#include "kernels/cpu/isa/kernel_table.h"
//
#include "kernels/cpu/isa/simd/avx512.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

namespace moeserve::cpu {

extern const KernelTable kAvx512Table;
const KernelTable kAvx512Table = avx512::MakeTable("avx512");

}  // namespace moeserve::cpu

#define MOESERVE_ISA avx512_bf16
#define MOESERVE_BF16_DOT 1
#define MOESERVE_VNNI 1
#define MOESERVE_PANEL_TILE 4
#define MOESERVE_F32_TABLE kAvx512Table
#define MOESERVE_INTEGER_TABLE kAvx512VnniTable

#include "kernels/cpu/isa/kernel_table.h"
//
#include "kernels/cpu/isa/simd/avx512.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

namespace moeserve::cpu {

extern const KernelTable kAvx512Bf16Table;
const KernelTable kAvx512Bf16Table = avx512_bf16::MakeTable("avx512_bf16");

}  // namespace moeserve::cpu

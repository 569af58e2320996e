#define MOESERVE_ISA avx512_vnni
#define MOESERVE_BF16_DOT 0
#define MOESERVE_VNNI 1
#define MOESERVE_PANEL_TILE 4
#define MOESERVE_F32_TABLE kAvx512Table

#include "kernels/cpu/isa/kernel_table.h"
//
#include "kernels/cpu/isa/simd/avx512.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

namespace moeserve::cpu {

extern const KernelTable kAvx512VnniTable;
const KernelTable kAvx512VnniTable = avx512_vnni::MakeTable("avx512_vnni");

}  // namespace moeserve::cpu

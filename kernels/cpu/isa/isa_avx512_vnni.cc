#define MOESERVE_ISA avx512_vnni
#define MOESERVE_BF16_DOT 0
#define MOESERVE_F32_TABLE kAvx512Table

#include "kernels/cpu/isa/simd/avx512.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

const moeserve::cpu::KernelTable moeserve::cpu::kAvx512VnniTable =
    avx512_vnni::MakeTable("avx512_vnni");

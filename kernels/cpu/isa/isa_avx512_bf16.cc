#define MOESERVE_ISA avx512_bf16
#define MOESERVE_BF16_DOT 1
#define MOESERVE_F32_TABLE kAvx512Table
#define MOESERVE_INTEGER_TABLE kAvx512VnniTable

#include "kernels/cpu/isa/simd/avx512.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

const moeserve::cpu::KernelTable moeserve::cpu::kAvx512Bf16Table =
    avx512_bf16::MakeTable("avx512_bf16");

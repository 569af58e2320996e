#define MOESERVE_ISA avx512
#define MOESERVE_BF16_DOT 0

#include "kernels/cpu/isa/simd/avx512.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

const moeserve::cpu::KernelTable moeserve::cpu::kAvx512Table = avx512::MakeTable("avx512");

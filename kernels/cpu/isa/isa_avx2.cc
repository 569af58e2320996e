#define MOESERVE_ISA avx2
#define MOESERVE_BF16_DOT 0

#include "kernels/cpu/isa/simd/avx2.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

const moeserve::cpu::KernelTable moeserve::cpu::kAvx2Table = avx2::MakeTable("avx2");

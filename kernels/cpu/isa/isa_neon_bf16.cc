#define MOESERVE_ISA neon_bf16
#define MOESERVE_BF16_DOT 1
#define MOESERVE_NEON_DOT 2

#include "kernels/cpu/isa/simd/neon.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

const moeserve::cpu::KernelTable moeserve::cpu::kNeonBf16Table = neon_bf16::MakeTable("neon_bf16");

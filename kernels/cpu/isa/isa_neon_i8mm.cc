#define MOESERVE_ISA neon_i8mm
#define MOESERVE_BF16_DOT 0
#define MOESERVE_NEON_DOT 2

#include "kernels/cpu/isa/simd/neon.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

const moeserve::cpu::KernelTable moeserve::cpu::kNeonI8mmTable = neon_i8mm::MakeTable("neon_i8mm");

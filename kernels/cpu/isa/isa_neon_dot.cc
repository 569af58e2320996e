#define MOESERVE_ISA neon_dot
#define MOESERVE_BF16_DOT 0
#define MOESERVE_NEON_DOT 1

#include "kernels/cpu/isa/simd/neon.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

const moeserve::cpu::KernelTable moeserve::cpu::kNeonDotTable = neon_dot::MakeTable("neon_dot");

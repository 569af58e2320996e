#define MOESERVE_ISA neon
#define MOESERVE_BF16_DOT 0
#define MOESERVE_NEON_DOT 0

#include "kernels/cpu/isa/simd/neon.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

const moeserve::cpu::KernelTable moeserve::cpu::kNeonTable = neon::MakeTable("neon");

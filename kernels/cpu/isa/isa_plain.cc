#define MOESERVE_ISA plain
#define MOESERVE_BF16_DOT 0

#include "kernels/cpu/isa/simd/plain.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

const moeserve::cpu::KernelTable moeserve::cpu::kPlainTable = plain::MakeTable("plain");

#define MOESERVE_ISA amx_bf16
#define MOESERVE_BF16_DOT 1
#define MOESERVE_F32_TABLE kAvx512Table
#define MOESERVE_INTEGER_TABLE kAvx512VnniTable
#define MOESERVE_AMX 1

#include "kernels/cpu/isa/simd/avx512.h"
//
#include "kernels/cpu/isa/simd/amx.h"
//
#include "kernels/cpu/isa/simd/flush_subnormals.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

const moeserve::cpu::KernelTable moeserve::cpu::kAmxBf16Table = amx_bf16::MakeTable("amx_bf16");

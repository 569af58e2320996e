// The kernels for AMX with emulated tile registers, so that any processor with AVX-512 and BF16
// runs their tests.
#define MOESERVE_ISA amx_emulated
#define MOESERVE_BF16_DOT 1
#define MOESERVE_F32_TABLE kAvx512Table
#define MOESERVE_INTEGER_TABLE kAvx512VnniTable
#define MOESERVE_AMX 1

#include "kernels/cpu/isa/kernel_table.h"
//
#include "kernels/cpu/isa/simd/avx512.h"
//
#include "kernels/cpu/isa/simd/flush_subnormals.h"
//
#include "tests/support/emulated_tiles.h"
//
#include "kernels/cpu/isa/isa_kernels.inl"

namespace moeserve::testing {

extern const cpu::KernelTable kEmulatedMatrixUnit;
const cpu::KernelTable kEmulatedMatrixUnit = cpu::amx_emulated::MakeTable("amx_emulated_bf16");

}  // namespace moeserve::testing

// Emulates ldmatrix and mma.sync with the fragment layouts of the PTX ISA.
#pragma once

#include "tests/cuda_emulator/scheduler.h"

namespace moeserve::emulator {

// Loads `count` (1, 2 or 4) matrices of 8 x 8 16-bit elements. Lane 8 i + j passes the address of
// row j of matrix i.
void LoadMatrix(uint32_t* registers, int count, bool transposed, const void* row,
                Location location = Location::current());
// Computes d += a b for m16n8k16 with bf16 operands, a row-major and b column-major. Products are
// exact; sums are f32 in the order of k.
void MmaBf16(float* d, const uint32_t* a, const uint32_t* b,
             Location location = Location::current());
// Computes d += a b for m16n8k32 with 8-bit integers; b is signed.
void MmaInt8(int32_t* d, const uint32_t* a, const uint32_t* b, bool a_unsigned,
             Location location = Location::current());

}  // namespace moeserve::emulator

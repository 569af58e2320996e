// ldmatrix and mma.sync with the fragment layouts of the PTX ISA.
#pragma once

#include "tests/cuda_emulator/scheduler.h"

namespace moeserve::emulator {

// `count` (1, 2, 4) matrices of 8 x 8 16-bit elements; lane 8 i + j names row j of matrix i.
void LoadMatrix(uint32_t* registers, int count, bool transposed, const void* row,
                Location location = Location::current());
// d += a b for m16n8k16 bf16; a row-major, b column-major. Products are exact, sums in float in
// the order of k.
void MmaBf16(float* d, const uint32_t* a, const uint32_t* b,
             Location location = Location::current());

}  // namespace moeserve::emulator

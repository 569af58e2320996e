#include "tests/cuda_emulator/matrix.h"

#include <cstring>

#include "kernels/base/dtype.h"
#include "tests/cuda_emulator/async_copy.h"

namespace moeserve::emulator {
namespace {

struct LoadDeposit {
  uint32_t* registers;
  const char* row;
};

void ComputeLoad(void* const* deposits, uint32_t, int detail) {
  const int count = detail & 7;
  const bool transposed = (detail & 8) != 0;
  for (int matrix = 0; matrix < count; ++matrix) {
    uint16_t elements[8][8];
    for (int row = 0; row < 8; ++row) {
      std::memcpy(elements[row], static_cast<LoadDeposit*>(deposits[8 * matrix + row])->row, 16);
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const int i = lane / 4, j = 2 * (lane % 4);
      const uint32_t low = transposed ? elements[j][i] : elements[i][j];
      const uint32_t high = transposed ? elements[j + 1][i] : elements[i][j + 1];
      static_cast<LoadDeposit*>(deposits[lane])->registers[matrix] = low | (high << 16);
    }
  }
}

struct MmaDeposit {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

float Half(uint32_t pair, int high) {
  return F32FromBf16(static_cast<Bf16>(high ? pair >> 16 : pair & 0xffffu));
}

void ComputeMma(void* const* deposits, uint32_t, int) {
  float a[16][16], b[8][16];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto* own = static_cast<MmaDeposit*>(deposits[lane]);
    const int group = lane / 4, pair = 2 * (lane % 4);
    for (int i = 0; i < 8; ++i) {
      // Elements 2, 3, 6 and 7 are 8 rows below the other four. Elements 4 to 7 are 8 columns to
      // the right of elements 0 to 3.
      a[group + ((i & 2) ? 8 : 0)][pair + (i & 1) + (i >= 4 ? 8 : 0)] = Half(own->a[i / 2], i & 1);
    }
    for (int i = 0; i < 4; ++i) {
      b[group][pair + (i & 1) + (i >= 2 ? 8 : 0)] = Half(own->b[i / 2], i & 1);
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto* own = static_cast<MmaDeposit*>(deposits[lane]);
    for (int i = 0; i < 4; ++i) {
      const float* row = a[lane / 4 + (i >= 2 ? 8 : 0)];
      const float* column = b[2 * (lane % 4) + (i & 1)];
      float sum = own->d[i];
      for (int k = 0; k < 16; ++k) sum += row[k] * column[k];
      own->d[i] = sum;
    }
  }
}

constexpr char kLoadName[] = "ldmatrix";
constexpr char kMmaName[] = "mma.sync.m16n8k16";

}  // namespace

void LoadMatrix(uint32_t* registers, int count, bool transposed, const void* row,
                Location location) {
  if (current->lane < 8 * count) {
    const uint32_t address = SharedAddress(row, location);
    SharedPointer(address, 16, location);
    if (address % 16 != 0) Fail(location, "ldmatrix: a row's address is not aligned to 16 bytes");
  }
  LoadDeposit deposit{registers, static_cast<const char*>(row)};
  WarpCollective(~0u, kLoadName, count | (transposed ? 8 : 0), &deposit, ComputeLoad, location);
}

void MmaBf16(float* d, const uint32_t* a, const uint32_t* b, Location location) {
  MmaDeposit deposit{d, a, b};
  WarpCollective(~0u, kMmaName, 0, &deposit, ComputeMma, location);
}

}  // namespace moeserve::emulator

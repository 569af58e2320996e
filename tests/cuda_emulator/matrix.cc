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

struct MmaInt8Deposit {
  int32_t* d;
  const uint32_t* a;
  const uint32_t* b;
};

void ComputeMmaInt8(void* const* deposits, uint32_t, int a_unsigned) {
  int32_t a[16][32], b[8][32];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto* own = static_cast<MmaInt8Deposit*>(deposits[lane]);
    const int group = lane / 4, quad = 4 * (lane % 4);
    for (int i = 0; i < 16; ++i) {
      // Registers 1 and 3 are 8 rows below the other two. Registers 2 and 3 are 16 columns to the
      // right of registers 0 and 1.
      const uint32_t byte = own->a[i / 4] >> (8 * (i % 4)) & 0xffu;
      a[group + (i / 4 % 2) * 8][quad + i % 4 + (i >= 8 ? 16 : 0)] =
          a_unsigned ? static_cast<int32_t>(byte) : static_cast<int8_t>(byte);
    }
    for (int i = 0; i < 8; ++i) {
      b[group][quad + i % 4 + (i >= 4 ? 16 : 0)] =
          static_cast<int8_t>(own->b[i / 4] >> (8 * (i % 4)) & 0xffu);
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto* own = static_cast<MmaInt8Deposit*>(deposits[lane]);
    for (int i = 0; i < 4; ++i) {
      const int32_t* row = a[lane / 4 + (i >= 2 ? 8 : 0)];
      const int32_t* column = b[2 * (lane % 4) + (i & 1)];
      int32_t sum = 0;
      for (int k = 0; k < 32; ++k) sum += row[k] * column[k];
      // As on hardware, the sum wraps around.
      own->d[i] =
          static_cast<int32_t>(static_cast<uint32_t>(own->d[i]) + static_cast<uint32_t>(sum));
    }
  }
}

constexpr char kLoadName[] = "ldmatrix";
constexpr char kMmaName[] = "mma.sync.m16n8k16";
constexpr char kMmaInt8Name[] = "mma.sync.m16n8k32";

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

void MmaInt8(int32_t* d, const uint32_t* a, const uint32_t* b, bool a_unsigned, Location location) {
  MmaInt8Deposit deposit{d, a, b};
  WarpCollective(~0u, kMmaInt8Name, a_unsigned ? 1 : 0, &deposit, ComputeMmaInt8, location);
}

}  // namespace moeserve::emulator

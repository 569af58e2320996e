#include "tests/cuda_emulator/wgmma.h"

#include <cstring>

#include "kernels/base/dtype.h"
#include "tests/cuda_emulator/async_copy.h"

namespace moeserve::emulator {
namespace {

constexpr int kRows = 64;
constexpr int kDepth = 16;
constexpr int kMaxColumns = 256;

// Reads the elements (row, k) of a matrix in shared memory, which a matrix descriptor locates.
class Operand {
 public:
  Operand(uint64_t descriptor, Location location) : location_(location) {
    start_ = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
    leading_ = static_cast<uint32_t>((descriptor >> 16) & 0x3fff) << 4;
    stride_ = static_cast<uint32_t>((descriptor >> 32) & 0x3fff) << 4;
    if (((descriptor >> 49) & 7) != 0) {
      Fail(location, "wgmma: a descriptor's base offset other than 0 is not supported");
    }
    switch (descriptor >> 62) {
      case 1:
        row_bytes_ = 128;
        break;
      case 2:
        row_bytes_ = 64;
        break;
      case 3:
        row_bytes_ = 32;
        break;
      default:
        row_bytes_ = 16;
        break;
    }
    // The pattern of the swizzle repeats every 8 rows and is aligned to addresses, so the matrix
    // must begin where a pattern begins.
    if (row_bytes_ > 16 && ((start_ & ~(row_bytes_ - 1)) % (8 * row_bytes_) != 0)) {
      Fail(location,
           "wgmma: a swizzled matrix at 0x%x of shared memory does not begin where its "
           "pattern of %u bytes does",
           start_, 8 * row_bytes_);
    }
  }

  float At(int row, int k) const { return Read(Address(row, k * 2)); }

  // Reads the integer (row, k) of a matrix of int8.
  int32_t IntegerAt(int row, int k) const {
    int8_t value;
    std::memcpy(&value, SharedPointer(Address(row, k), 1, location_), 1);
    return value;
  }

  // Reads the element (row, k) of an MN-major matrix: 64 rows at one k are contiguous, groups of 8
  // k are `stride_` bytes apart and groups of 64 rows `leading_` bytes.
  float AtTransposed(int row, int k) const {
    if (row_bytes_ != 128) {
      Fail(location_, "wgmma: an MN-major matrix without the swizzle of 128 bytes");
    }
    const auto r = static_cast<uint32_t>(row), depth = static_cast<uint32_t>(k);
    const uint32_t address =
        start_ + r / 64 * leading_ + depth / 8 * stride_ + depth % 8 * row_bytes_ + r % 64 * 2;
    return Read(address ^ ((address >> 7) & 7) << 4);
  }

 private:
  // Returns the address of byte `byte` of row `row`.
  uint32_t Address(int row, int byte) const {
    const auto r = static_cast<uint32_t>(row), depth = static_cast<uint32_t>(byte);
    const uint32_t address = start_ + r / 8 * stride_ + r % 8 * row_bytes_;
    if (row_bytes_ == 16) return address + depth / 16 * leading_ + depth % 16;
    // The swizzle XORs address bits 4 and up with bits 7 and up: 1, 2 or 3 bits for rows of 2, 4 or
    // 8 units of 16 bytes.
    const uint32_t plain = address + depth;
    return plain ^ ((plain >> 7) & (row_bytes_ / 16 - 1)) << 4;
  }

  float Read(uint32_t address) const {
    Bf16 value;
    std::memcpy(&value, SharedPointer(address, 2, location_), 2);
    return F32FromBf16(value);
  }

  uint32_t start_, leading_, stride_, row_bytes_ = 16;
  Location location_;
};

// Checks that all threads of a warpgroup have issued the same product.
void CheckAgreement(const MatrixWork* const* work) {
  const MatrixWork& first = *work[0];
  for (int t = 0; t < kWarpgroupSize; ++t) {
    const MatrixWork& w = *work[t];
    if (w.n != first.n || w.b_descriptor != first.b_descriptor ||
        w.accumulate != first.accumulate || w.a_in_registers != first.a_in_registers ||
        w.a_descriptor != first.a_descriptor || w.b_transposed != first.b_transposed ||
        (w.integers == nullptr) != (first.integers == nullptr)) {
      Fail(w.location,
           "wgmma: threads of one warpgroup disagree on shape, descriptors or whether "
           "to accumulate");
    }
  }
}

void MultiplyIntegers(const MatrixWork* const* work) {
  constexpr int kIntegers = 32;  // depth
  const MatrixWork& first = *work[0];
  static int32_t b[kIntegers][kMaxColumns];
  const Operand a_operand(first.a_descriptor, first.location);
  const Operand b_operand(first.b_descriptor, first.location);
  for (int column = 0; column < first.n; ++column) {
    for (int k = 0; k < kIntegers; ++k) b[k][column] = b_operand.IntegerAt(column, k);
  }
  for (int t = 0; t < kWarpgroupSize; t += 4) {
    for (int high = 0; high < 2; ++high) {
      // The four threads that have this row.
      const int row = t / kWarpSize * 16 + t % kWarpSize / 4 + high * 8;
      static int32_t d[kMaxColumns];
      const auto at = [&](int column) -> int32_t& {
        return work[t + column % 8 / 2]->integers[column / 8 * 4 + high * 2 + column % 2];
      };
      for (int c = 0; c < first.n; ++c) d[c] = first.accumulate ? at(c) : 0;
      for (int k = 0; k < kIntegers; ++k) {
        const int32_t factor = a_operand.IntegerAt(row, k);
        for (int c = 0; c < first.n; ++c) d[c] += factor * b[k][c];
      }
      for (int c = 0; c < first.n; ++c) at(c) = d[c];
    }
  }
}

void Multiply(const MatrixWork* const* work) {
  CheckAgreement(work);
  const MatrixWork& first = *work[0];
  if (first.integers != nullptr) return MultiplyIntegers(work);
  const int n = first.n;
  static float a[kRows][kDepth];
  static float b[kDepth][kMaxColumns];
  static float d[kRows][kMaxColumns];
  const Operand b_operand(first.b_descriptor, first.location);
  for (int column = 0; column < n; ++column) {
    for (int k = 0; k < kDepth; ++k) {
      b[k][column] =
          first.b_transposed ? b_operand.AtTransposed(column, k) : b_operand.At(column, k);
    }
  }
  if (!first.a_in_registers) {
    const Operand a_operand(first.a_descriptor, first.location);
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kDepth; ++k) a[row][k] = a_operand.At(row, k);
    }
  }
  for (int t = 0; t < kWarpgroupSize; ++t) {
    const MatrixWork& w = *work[t];
    if (w.a_in_registers && std::memcmp(w.a_source, w.a_registers, sizeof(w.a_registers)) != 0) {
      Fail(w.location, "wgmma: registers of operand a changed before the wait");
    }
    const int row = t / kWarpSize * 16 + t % kWarpSize / 4, pair = 2 * (t % 4);
    for (int i = 0; i < 8 && w.a_in_registers; ++i) {
      const uint32_t both = w.a_registers[i / 2];
      a[row + ((i & 2) ? 8 : 0)][pair + (i & 1) + (i >= 4 ? 8 : 0)] =
          F32FromBf16(static_cast<Bf16>((i & 1) ? both >> 16 : both & 0xffffu));
    }
    for (int i = 0; i < n / 2; ++i) {
      d[row + ((i & 2) ? 8 : 0)][i / 4 * 8 + pair + (i & 1)] = w.accumulate ? w.d[i] : 0.0f;
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < kDepth; ++k) {
      const float factor = a[row][k];
      for (int column = 0; column < n; ++column) d[row][column] += factor * b[k][column];
    }
  }
  for (int t = 0; t < kWarpgroupSize; ++t) {
    const int row = t / kWarpSize * 16 + t % kWarpSize / 4, pair = 2 * (t % 4);
    for (int i = 0; i < n / 2; ++i) {
      work[t]->d[i] = d[row + ((i & 2) ? 8 : 0)][i / 4 * 8 + pair + (i & 1)];
    }
  }
}

void ComputeWait(void* const* deposits, int pending) {
  Thread* threads[kWarpgroupSize];
  for (int t = 0; t < kWarpgroupSize; ++t) threads[t] = static_cast<Thread*>(deposits[t]);
  const size_t groups = threads[0]->matrix_groups.size();
  for (const Thread* t : threads) {
    if (t->matrix_groups.size() != groups) {
      Fail(t->location, "wgmma: threads of one warpgroup have committed different groups");
    }
  }
  for (size_t left = groups; left > static_cast<size_t>(pending); --left) {
    const size_t count = threads[0]->matrix_groups.front().size();
    for (size_t i = 0; i < count; ++i) {
      const MatrixWork* work[kWarpgroupSize];
      for (int t = 0; t < kWarpgroupSize; ++t) {
        const auto& group = threads[t]->matrix_groups.front();
        if (group.size() != count) {
          Fail(group.empty() ? Location::current() : group.back().location,
               "wgmma: threads of one warpgroup have issued different instructions");
        }
        work[t] = &group[i];
      }
      Multiply(work);
    }
    for (Thread* t : threads) t->matrix_groups.pop_front();
  }
}

void Issue(MatrixWork work) {
  if (work.n < 8 || work.n > kMaxColumns || work.n % 8 != 0) {
    Fail(work.location, "wgmma: n = %d", work.n);
  }
  current->open_matrix_work.push_back(work);
}

MatrixWork FromRegisters(float* d, int n, const uint32_t* a, uint64_t b, bool accumulate,
                         Location location) {
  MatrixWork work;
  work.d = d;
  work.n = n;
  work.accumulate = accumulate;
  work.a_in_registers = true;
  std::memcpy(work.a_registers, a, sizeof(work.a_registers));
  work.a_source = a;
  work.b_descriptor = b;
  work.location = location;
  return work;
}

constexpr char kWaitName[] = "wgmma.wait_group";

}  // namespace

void WgmmaShared(float* d, int n, uint64_t a, uint64_t b, bool accumulate, Location location) {
  MatrixWork work;
  work.d = d;
  work.n = n;
  work.accumulate = accumulate;
  work.a_descriptor = a;
  work.b_descriptor = b;
  work.location = location;
  Issue(work);
}

void WgmmaRegisters(float* d, int n, const uint32_t* a, uint64_t b, bool accumulate,
                    Location location) {
  Issue(FromRegisters(d, n, a, b, accumulate, location));
}

void WgmmaRegistersTransposed(float* d, int n, const uint32_t* a, uint64_t b, bool accumulate,
                              Location location) {
  MatrixWork work = FromRegisters(d, n, a, b, accumulate, location);
  work.b_transposed = true;
  Issue(work);
}

void WgmmaInt8Shared(int32_t* d, int n, uint64_t a, uint64_t b, bool accumulate,
                     Location location) {
  MatrixWork work;
  work.integers = d;
  work.n = n;
  work.accumulate = accumulate;
  work.a_descriptor = a;
  work.b_descriptor = b;
  work.location = location;
  Issue(work);
}

void WgmmaCommit() {
  current->matrix_groups.push_back(std::move(current->open_matrix_work));
  current->open_matrix_work.clear();
}

void WgmmaWait(int pending, Location location) {
  WarpgroupCollective(kWaitName, pending, current, ComputeWait, location);
}

}  // namespace moeserve::emulator

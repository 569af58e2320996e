// Compares tensor-core and copy instructions, called through the primitives that kernels use, with
// plain loops. On the emulated device, also checks the errors that it must report.

#include "kernels/cuda/device/ptx.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/wgmma.cuh"
#include "tests/cuda/emulator_test_support.h"

namespace moeserve::cuda {
namespace {

// Returns random small integers, for which products and sums are exact in any order.
std::vector<Bf16> Integers(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Bf16> v(n);
  for (Bf16& x : v) x = Bf16FromF32(static_cast<float>(static_cast<int>(random() % 9) - 4));
  return v;
}

// Returns [m, n] = a [m, k] times the transpose of b [n, k].
std::vector<float> Product(const std::vector<Bf16>& a, const std::vector<Bf16>& b, size_t m,
                           size_t n, size_t k) {
  std::vector<float> d(m * n, 0.0f);
  for (size_t i = 0; i < m; ++i) {
    for (size_t j = 0; j < n; ++j) {
      for (size_t l = 0; l < k; ++l) {
        d[i * n + j] += F32FromBf16(a[i * k + l]) * F32FromBf16(b[j * k + l]);
      }
    }
  }
  return d;
}

// One warp multiplies a [16, 32] by b [8, 32], both row-major and loaded by ldmatrix. It loads b
// also from its transpose bt [32, 8].
__global__ void MmaKernel(const Bf16* a, const Bf16* b, const Bf16* bt, float* out, float* out_t) {
  auto* sa = DynamicShared<Bf16>();
  Bf16* sb = sa + 16 * 32;
  Bf16* st = sb + 8 * 32;
  const int lane = threadIdx.x;
  for (int i = lane; i < 16 * 32; i += 32) sa[i] = a[i];
  for (int i = lane; i < 8 * 32; i += 32) sb[i] = b[i];
  for (int i = lane; i < 8 * 32; i += 32) st[i] = bt[i];
  __syncwarp();
  float d[4] = {0, 0, 0, 0}, dt[4] = {0, 0, 0, 0};
  for (int k = 0; k < 32; k += 16) {
    uint32_t fa[4], fb[2], ft[2];
    LoadMatrix4(fa, sa + (lane % 16) * 32 + k + 8 * (lane / 16));
    LoadMatrix2(fb, sb + (lane % 8) * 32 + k + 8 * (lane / 8 % 2));
    LoadMatrix2Transposed(ft, st + (k + lane % 16) * 8);
    MmaBf16(d, fa, fb);
    MmaBf16(dt, fa, ft);
  }
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    out[row * 8 + column] = d[i];
    out_t[row * 8 + column] = dt[i];
  }
}

TEST(Ptx, LdmatrixAndMmaMultiplyMatrices) {
  const std::vector<Bf16> a = Integers(16 * 32, 1), b = Integers(8 * 32, 2);
  std::vector<Bf16> bt(b.size());
  for (size_t n = 0; n < 8; ++n) {
    for (size_t k = 0; k < 32; ++k) bt[k * 8 + n] = b[n * 32 + k];
  }
  const std::vector<float> expected = Product(a, b, 16, 8, 32);
  InEveryOrder([&] {
    DeviceArray<Bf16> da(a), db(b), dbt(bt);
    DeviceArray<float> out(16 * 8), out_t(16 * 8);
    Launch(MmaKernel, {.grid = dim3(1), .block = dim3(32), .shared_bytes = 2 * 32 * (16 + 8 + 8)},
           da.data(), db.data(), dbt.data(), out.data(), out_t.data());
    EXPECT_EQ(out.Read(), expected);
    EXPECT_EQ(out_t.Read(), expected);
  });
}

// One warp adds a [16, 32] times the transpose of b [8, 32] to `out`, twice.
template <bool kUnsigned>
__global__ void MmaInt8Kernel(const uint8_t* a, const uint8_t* b, int32_t* out) {
  const int group = threadIdx.x / 4, quad = 4 * (threadIdx.x % 4);
  const auto four = [](const uint8_t* p) {
    return p[0] | static_cast<uint32_t>(p[1]) << 8 | static_cast<uint32_t>(p[2]) << 16 |
           static_cast<uint32_t>(p[3]) << 24;
  };
  uint32_t fa[4], fb[2];
  int32_t d[4];
  for (int i = 0; i < 4; ++i) {
    fa[i] = four(a + (group + i % 2 * 8) * 32 + i / 2 * 16 + quad);
    d[i] = out[(group + i / 2 * 8) * 8 + quad / 2 + i % 2];
  }
  for (int i = 0; i < 2; ++i) fb[i] = four(b + group * 32 + i * 16 + quad);
  MmaInt8<kUnsigned>(d, fa, fb);
  MmaInt8<kUnsigned>(d, fa, fb);
  for (int i = 0; i < 4; ++i) out[(group + i / 2 * 8) * 8 + quad / 2 + i % 2] = d[i];
}

TEST(Ptx, MmaMultipliesIntegersExactly) {
  std::mt19937 random(7);
  std::vector<uint8_t> a(16 * 32), b(8 * 32);
  for (uint8_t& x : a) x = static_cast<uint8_t>(random());
  for (uint8_t& x : b) x = static_cast<uint8_t>(random());
  for (const bool is_unsigned : {false, true}) {
    std::vector<int32_t> expected(16 * 8);
    for (int i = 0; i < 16 * 8; ++i) {
      expected[i] = i * 1000;
      for (int k = 0; k < 32; ++k) {
        const int left = is_unsigned ? a[i / 8 * 32 + k] : static_cast<int8_t>(a[i / 8 * 32 + k]);
        expected[i] += 2 * left * static_cast<int8_t>(b[i % 8 * 32 + k]);
      }
    }
    InEveryOrder([&] {
      std::vector<int32_t> start(16 * 8);
      for (int i = 0; i < 16 * 8; ++i) start[i] = i * 1000;
      DeviceArray<uint8_t> da(a), db(b);
      DeviceArray<int32_t> out(start);
      Launch(is_unsigned ? MmaInt8Kernel<true> : MmaInt8Kernel<false>,
             {.grid = dim3(1), .block = dim3(32)}, da.data(), db.data(), out.data());
      EXPECT_EQ(out.Read(), expected);
    });
  }
}

// Thread t widens the integers 4 t to 4 t + 3, and subtracts them from `from`.
__global__ void WidenKernel(uint32_t from, uint32_t* even, uint32_t* odd) {
  const uint32_t first = 4 * threadIdx.x;
  const uint32_t bytes = first | (first + 1) << 8 | (first + 2) << 16 | (first + 3) << 24;
  even[threadIdx.x] = SubtractBf16(from, Bf16FromEvenBytes(bytes));
  odd[threadIdx.x] = SubtractBf16(from, Bf16FromOddBytes(bytes));
}

TEST(Ptx, BytesAreWidenedExactly) {
  for (const float from : {0.0f, 1024.0f}) {
    DeviceArray<uint32_t> even(64), odd(64);
    Launch(WidenKernel, {.grid = dim3(1), .block = dim3(64)},
           Bf16FromF32(from) | static_cast<uint32_t>(Bf16FromF32(from)) << 16, even.data(),
           odd.data());
    const auto expected = [&](int byte) {
      return Bf16FromF32(from - static_cast<float>(static_cast<int8_t>(byte)));
    };
    const std::vector<uint32_t> evens = even.Read(), odds = odd.Read();
    for (int t = 0; t < 64; ++t) {
      EXPECT_EQ(static_cast<Bf16>(evens[t]), expected(4 * t));
      EXPECT_EQ(static_cast<Bf16>(evens[t] >> 16), expected(4 * t + 2));
      EXPECT_EQ(static_cast<Bf16>(odds[t]), expected(4 * t + 1));
      EXPECT_EQ(static_cast<Bf16>(odds[t] >> 16), expected(4 * t + 3));
    }
  }
}

// Threads copy numbers one by one; of every third one, zeros.
__global__ void CopyAsync4Kernel(const uint32_t* in, uint32_t* out) {
  auto* shared = DynamicShared<uint32_t>();
  CopyAsync4(shared + threadIdx.x, in + threadIdx.x, threadIdx.x % 3 == 0 ? 0 : 4);
  CopyAsyncCommit();
  CopyAsyncWait<0>();
  __syncthreads();
  out[threadIdx.x] = shared[31 - threadIdx.x];
}

TEST(Ptx, CpAsyncCopiesSingleNumbers) {
  std::vector<uint32_t> numbers(32);
  for (uint32_t i = 0; i < 32; ++i) numbers[i] = 0x01010101u * (i + 1);
  InEveryOrder([&] {
    DeviceArray<uint32_t> in(numbers), out(32);
    Launch(CopyAsync4Kernel, {.grid = dim3(1), .block = dim3(32), .shared_bytes = 128}, in.data(),
           out.data());
    const std::vector<uint32_t> got = out.Read();
    for (size_t i = 0; i < 32; ++i) EXPECT_EQ(got[31 - i], i % 3 == 0 ? 0u : numbers[i]);
  });
}

#if defined(MOESERVE_CUDA_EMULATION)
TEST(Ptx, PackedBf16IsRoundedToNearestEven) {
  EXPECT_EQ(PackBf16(1.0f, -2.0f), 0xc0003f80u);
  EXPECT_EQ(PackBf16(F32FromBits(0x3f808000u), F32FromBits(0x3f818000u)), 0x3f823f80u);
  EXPECT_EQ(LowBf16(0xc0003f80u), 1.0f);
  EXPECT_EQ(HighBf16(0xc0003f80u), -2.0f);
}

#endif

// Copies stages of 32 floats with two stages in flight. Without `wait`, the kernel has the bug that
// the emulator must report.
__global__ void CopyAsyncKernel(const float* in, float* out, int stages, bool wait) {
  float* shared = DynamicShared<float>();
  const int t = threadIdx.x;
  const auto issue = [&](int stage) {
    if (stage < stages && t < 8) {
      // The last 8 of the last thread's 16 bytes are zero-filled.
      CopyAsync16(shared + stage % 3 * 32 + t * 4, in + stage * 32 + t * 4, t == 7 ? 8 : 16);
    }
    CopyAsyncCommit();
  };
  issue(0);
  issue(1);
  for (int stage = 0; stage < stages; ++stage) {
    if (wait) CopyAsyncWait<1>();
    __syncthreads();
    issue(stage + 2);
    out[stage * 32 + t] = shared[stage % 3 * 32 + t];
  }
}

TEST(Ptx, CpAsyncArrivesWithItsWaitAndNotBefore) {
  const int stages = 7;
  std::vector<float> in(stages * 32);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i + 1);
  InEveryOrder([&] {
    DeviceArray<float> device_in(in), out(in.size());
    const LaunchShape shape{.grid = dim3(1), .block = dim3(32), .shared_bytes = 3 * 32 * 4};
    Launch(CopyAsyncKernel, shape, device_in.data(), out.data(), stages, true);
    const std::vector<float> got = out.Read();
    for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(got[i], i % 32 >= 30 ? 0.0f : in[i]);
#if defined(MOESERVE_CUDA_EMULATION)
    Launch(CopyAsyncKernel, shape, device_in.data(), out.data(), stages, false);
    for (const float v : out.Read()) EXPECT_TRUE(std::isnan(v));
#endif
  });
}

// A producer warp feeds two consumer warps through a ring of kSlots buffers, alternating between
// bulk copies and cp.async.
constexpr int kSlots = 3;
constexpr int kItem = 64;  // floats

__global__ void RingKernel(const float* in, float* out, int items) {
  auto* buffer = DynamicShared<float>();
  auto* full = reinterpret_cast<uint64_t*>(buffer + kSlots * kItem);
  uint64_t* empty = full + kSlots;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kSlots; ++s) {
      MbarrierInit(full + s, 33);
      MbarrierInit(empty + s, 2);
    }
    MbarrierInitFence();
  }
  __syncthreads();
  for (int item = 0; item < items; ++item) {
    const int slot = item % kSlots;
    const auto parity = static_cast<uint32_t>(item / kSlots % 2);
    float* data = buffer + slot * kItem;
    if (warp == 0) {
      if (item >= kSlots) MbarrierWait(empty + slot, parity ^ 1u);
      if (lane == 0) {
        MbarrierArriveExpect(full + slot, kItem * 2);
        CopyBulkAsync(data, in + item * kItem, kItem * 2, full + slot);
      }
      if (lane < 8) CopyAsync16(data + kItem / 2 + lane * 4, in + item * kItem + 32 + lane * 4);
      CopyAsyncArrive(full + slot);
    } else {
      while (!MbarrierTryWait(full + slot, parity)) {
      }
      const int column = (warp - 1) * 32 + lane;
      out[item * kItem + column] = data[column];
      __syncwarp();
      if (lane == 0) MbarrierArrive(empty + slot);
    }
  }
}

TEST(Ptx, MbarriersCarryARingOfCopies) {
  const int items = 11;
  std::vector<float> in(items * kItem);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i + 1);
  InEveryOrder([&] {
    DeviceArray<float> device_in(in), out(in.size());
    Launch(RingKernel,
           {.grid = dim3(2), .block = dim3(96), .shared_bytes = kSlots * (kItem * 4 + 16)},
           device_in.data(), out.data(), items);
    EXPECT_EQ(out.Read(), in);
  });
}

// Stores a [rows, 64] bf16 matrix in shared memory in the layout of a swizzle. Layouts narrower
// than 64 columns store blocks of columns one after another.
template <Swizzle kSwizzle>
__device__ void Place(Bf16* shared, const Bf16* matrix, int rows) {
  constexpr int kColumns = kSwizzle == Swizzle::k128Bytes  ? 64
                           : kSwizzle == Swizzle::k64Bytes ? 32
                                                           : 16;
  for (int i = threadIdx.x; i < rows * 64; i += blockDim.x) {
    const int row = i / 64, column = i % 64;
    uint32_t offset;
    if constexpr (kSwizzle == Swizzle::kNone) {
      offset = row / 8 * 1024 + column / 8 * 128 + row % 8 * 16 + column % 8 * 2;
    } else {
      offset = column / kColumns * rows * kColumns * 2 +
               Swizzled<kSwizzle>((row * kColumns + column % kColumns) * 2);
    }
    shared[offset / 2] = matrix[i];
  }
}

// Loads the calling warp's 16 rows of a [64, 64] as operand a of kSteps products.
template <int kSteps>
__device__ __forceinline__ void LoadFragments(const Bf16* a, uint32_t (&fragments)[kSteps][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int k16 = 0; k16 < kSteps; ++k16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp + lane / 4 + 8 * (i % 2);
      const int column = k16 * 16 + 2 * (lane % 4) + 8 * (i / 2);
      fragments[k16][i] =
          a[row * 64 + column] | (static_cast<uint32_t>(a[row * 64 + column + 1]) << 16);
    }
  }
}

// One warpgroup computes [64, kN] = a [64, 64] times the transpose of b [kN, 64], with a from
// shared memory or from registers, in two groups of products.
template <int kN, Swizzle kSwizzle, bool kFromRegisters>
__global__ void WgmmaKernel(const Bf16* a, const Bf16* b, float* out) {
  auto* sa = DynamicShared<Bf16>();
  Bf16* sb = sa + 64 * 64;
  Place<kSwizzle>(sa, a, 64);
  Place<kSwizzle>(sb, b, kN);
  FenceAsyncShared();
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr uint32_t kRowBytes = kSwizzle == Swizzle::k128Bytes  ? 128
                                 : kSwizzle == Swizzle::k64Bytes ? 64
                                                                 : 32;
  const auto at = [&](Bf16* operand, int rows, int k) {
    if constexpr (kSwizzle == Swizzle::kNone) {
      return MatrixDescriptor(operand + k / 8 * 64, kSwizzle, 1024, 128);
    } else {
      const uint32_t byte = k * 2;
      const uint64_t descriptor = MatrixDescriptor(
          operand + byte / kRowBytes * rows * (kRowBytes / 2), kSwizzle, 8 * kRowBytes);
      return AdvanceDescriptor(descriptor, byte % kRowBytes);
    }
  };
  uint32_t fragments[4][4];
  LoadFragments(a, fragments);
  float d[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) d[i] = -1e30f;  // must be overwritten without being read
  WgmmaKeepInPlace(d);
  WgmmaFence();
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    if constexpr (kFromRegisters) {
      Wgmma<kN>::Registers(d, fragments[k16], at(sb, kN, k16 * 16), k16 > 0);
    } else {
      Wgmma<kN>::Shared(d, at(sa, 64, k16 * 16), at(sb, kN, k16 * 16), k16 > 0);
    }
    if (k16 == 1) WgmmaCommit();
  }
  WgmmaCommit();
  WgmmaKeepInPlace(d);
  WgmmaWait<1>();
  WgmmaWait<0>();
  WgmmaKeepInPlace(d);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2);
    out[row * kN + i / 4 * 8 + 2 * (lane % 4) + i % 2] = d[i];
  }
}

template <int kN, Swizzle kSwizzle>
void ExpectWgmmaMultiplies() {
  SCOPED_TRACE(::testing::Message() << "n " << kN << ", swizzle " << static_cast<int>(kSwizzle));
  const std::vector<Bf16> a = Integers(64 * 64, 3), b = Integers(kN * 64, 4);
  const std::vector<float> expected = Product(a, b, 64, kN, 64);
  DeviceArray<Bf16> da(a), db(b);
  DeviceArray<float> out(64 * kN), out_registers(64 * kN);
  const LaunchShape shape{.grid = dim3(1), .block = dim3(128), .shared_bytes = 128 * (64 + kN)};
  Launch(WgmmaKernel<kN, kSwizzle, false>, shape, da.data(), db.data(), out.data());
  Launch(WgmmaKernel<kN, kSwizzle, true>, shape, da.data(), db.data(), out_registers.data());
  EXPECT_EQ(out.Read(), expected);
  EXPECT_EQ(out_registers.Read(), expected);
}

// One warpgroup computes [64, kN] = start + a [64, 128] times the transpose of b [kN, 128].
template <int kN>
__global__ void WgmmaInt8Kernel(const int8_t* a, const int8_t* b, int32_t* out) {
  auto* sa = DynamicShared<int8_t>();
  int8_t* sb = sa + 64 * 128;
  for (uint32_t i = threadIdx.x; i < (64 + kN) * 128; i += blockDim.x) {
    sa[Swizzled<Swizzle::k128Bytes>(i)] = i < 64 * 128 ? a[i] : b[i - 64 * 128];
  }
  FenceAsyncShared();
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto place = [&](int i) {
    const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2);
    return row * kN + i / 4 * 8 + 2 * (lane % 4) + i % 2;
  };
  int32_t d[kN / 2], fresh[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    d[i] = out[place(i)];
    fresh[i] = 7;  // must be overwritten without being read
  }
  const uint64_t first = MatrixDescriptor(sa, Swizzle::k128Bytes, 1024);
  const uint64_t second = MatrixDescriptor(sb, Swizzle::k128Bytes, 1024);
  WgmmaKeepInPlace(d);
  WgmmaKeepInPlace(fresh);
  WgmmaFence();
#pragma unroll
  for (int k32 = 0; k32 < 4; ++k32) {
    const uint64_t x = AdvanceDescriptor(first, k32 * 32), y = AdvanceDescriptor(second, k32 * 32);
    WgmmaInt8<kN>::Shared(d, x, y, true);
    WgmmaInt8<kN>::Shared(fresh, x, y, k32 > 0);
  }
  WgmmaCommit();
  WgmmaKeepInPlace(d);
  WgmmaKeepInPlace(fresh);
  WgmmaWait<0>();
  WgmmaKeepInPlace(d);
  WgmmaKeepInPlace(fresh);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    out[place(i)] = d[i];
    out[64 * kN + place(i)] = fresh[i];
  }
}

template <int kN>
void ExpectWgmmaMultipliesIntegers() {
  std::mt19937 random(kN);
  std::vector<int8_t> a(64 * 128), b(kN * 128);
  for (int8_t& x : a) x = static_cast<int8_t>(random());
  for (int8_t& x : b) x = static_cast<int8_t>(random());
  std::vector<int32_t> start(2 * 64 * kN), expected(start);
  for (int i = 0; i < 64 * kN; ++i) {
    int32_t sum = 0;
    for (int k = 0; k < 128; ++k) sum += a[i / kN * 128 + k] * b[i % kN * 128 + k];
    start[i] = i * 1000;
    expected[i] = start[i] + sum;
    expected[64 * kN + i] = sum;
  }
  DeviceArray<int8_t> da(a), db(b);
  DeviceArray<int32_t> out(start);
  Launch(WgmmaInt8Kernel<kN>,
         {.grid = dim3(1), .block = dim3(128), .shared_bytes = 128 * (64 + kN)}, da.data(),
         db.data(), out.data());
  EXPECT_EQ(out.Read(), expected) << "n " << kN;
}

TEST(Ptx, WgmmaMultipliesIntegersExactly) {
  InEveryOrder([] {
    ExpectWgmmaMultipliesIntegers<64>();
    ExpectWgmmaMultipliesIntegers<96>();
    ExpectWgmmaMultipliesIntegers<128>();
    ExpectWgmmaMultipliesIntegers<192>();
  });
}

// One warpgroup computes [64, kN] = a [64, 64] times b [64, kN], with a from registers. b is stored
// in planes of 64 columns.
template <int kN>
__global__ void WgmmaTransposedKernel(const Bf16* a, const Bf16* b, float* out) {
  auto* sb = DynamicShared<Bf16>();
  constexpr uint32_t kPlane = 64 * 64;
  for (uint32_t i = threadIdx.x; i < 64 * kN; i += blockDim.x) {
    const uint32_t k = i / kN, column = i % kN;
    const uint32_t offset = Swizzled<Swizzle::k128Bytes>(k * 128 + column % 64 * 2);
    sb[column / 64 * kPlane + offset / 2] = b[i];
  }
  FenceAsyncShared();
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t fragments[4][4];
  LoadFragments(a, fragments);
  float d[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) d[i] = -1e30f;  // must be overwritten without being read
  const uint64_t descriptor = TransposedDescriptor(sb, kPlane * 2);
  WgmmaKeepInPlace(d);
  WgmmaFence();
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    Wgmma<kN>::RegistersTransposed(d, fragments[k16], AdvanceDescriptor(descriptor, k16 * 2048),
                                   k16 > 0);
  }
  WgmmaCommit();
  WgmmaKeepInPlace(d);
  WgmmaWait<0>();
  WgmmaKeepInPlace(d);
  WgmmaKeepInPlace(fragments);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2);
    out[row * kN + i / 4 * 8 + 2 * (lane % 4) + i % 2] = d[i];
  }
}

template <int kN>
void ExpectWgmmaMultipliesTransposed() {
  const std::vector<Bf16> a = Integers(64 * 64, 5), b = Integers(64 * kN, 6);
  std::vector<Bf16> columns(b.size());
  for (int k = 0; k < 64; ++k) {
    for (int n = 0; n < kN; ++n) columns[n * 64 + k] = b[k * kN + n];
  }
  DeviceArray<Bf16> da(a), db(b);
  DeviceArray<float> out(64 * kN);
  const LaunchShape shape{.grid = dim3(1), .block = dim3(128), .shared_bytes = 128 * kN};
  Launch(WgmmaTransposedKernel<kN>, shape, da.data(), db.data(), out.data());
  EXPECT_EQ(out.Read(), Product(a, columns, 64, kN, 64)) << "n " << kN;
}

TEST(Ptx, WgmmaMultipliesByTransposedMatrices) {
  InEveryOrder([] {
    ExpectWgmmaMultipliesTransposed<64>();
    ExpectWgmmaMultipliesTransposed<128>();
    ExpectWgmmaMultipliesTransposed<256>();
  });
}

TEST(Ptx, WgmmaMultipliesMatricesInEveryLayout) {
  InEveryOrder([] {
    ExpectWgmmaMultiplies<8, Swizzle::kNone>();
    ExpectWgmmaMultiplies<8, Swizzle::k32Bytes>();
    ExpectWgmmaMultiplies<16, Swizzle::k64Bytes>();
    ExpectWgmmaMultiplies<64, Swizzle::k128Bytes>();
    ExpectWgmmaMultiplies<96, Swizzle::k128Bytes>();
    ExpectWgmmaMultiplies<192, Swizzle::k128Bytes>();
    ExpectWgmmaMultiplies<256, Swizzle::kNone>();
    ExpectWgmmaMultiplies<256, Swizzle::k128Bytes>();
  });
}

// One launch in a chain of overlapping launches. Every block reads values that another block wrote,
// and overwrites values that the previous launch reads. Blocks take unequal times.
#if defined(MOESERVE_CUDA_EMULATION)
constexpr unsigned kLinkBlocks = 5;
#else
constexpr unsigned kLinkBlocks = 500;
#endif
constexpr unsigned kLinkThreads = 64, kLinkValues = kLinkBlocks * kLinkThreads;

__host__ __device__ inline uint32_t LinkValue(uint32_t value, unsigned block) {
  for (unsigned i = 0; i < block % 5 * 40; ++i) value = value * 1664525u + 1013904223u;
  return value + 1;
}
__host__ __device__ inline unsigned LinkSource(unsigned i, unsigned link) {
  return (i + (link * 3 + 1) * kLinkThreads + 7) % kLinkValues;
}
__global__ void LinkKernel(const uint32_t* in, uint32_t* out, unsigned link) {
  GridDependencyPass();
  const unsigned i = blockIdx.x * kLinkThreads + threadIdx.x;
  out[i] = LinkValue(in[LinkSource(i, link)], blockIdx.x);
}

TEST(Ptx, OverlappingLaunchesSeeWhatCameBefore) {
  constexpr unsigned kLinks = 40;
  std::vector<uint32_t> values(kLinkValues), next(kLinkValues);
  for (unsigned i = 0; i < kLinkValues; ++i) values[i] = i * 2654435761u;
  DeviceArray<uint32_t> even(values), odd(values);
  const Stream stream = std::move(Stream::Create()).value();
  const auto enqueue = [&] {
    for (unsigned link = 0; link < kLinks; ++link) {
      Launch(LinkKernel, LaunchShape{dim3(kLinkBlocks), dim3(kLinkThreads), 0, stream.get(), true},
             (link % 2 == 0 ? even : odd).data(), (link % 2 == 0 ? odd : even).data(), link);
    }
    return Status();
  };
  // Launch the chain directly, then capture and replay it.
  ASSERT_TRUE(enqueue().ok());
  const Result<GraphExec> graph = GraphExec::Capture(stream.get(), enqueue);
  ASSERT_TRUE(graph.ok()) << graph.status();
  constexpr int kReplays = 3;
  for (int i = 0; i < kReplays; ++i) ASSERT_TRUE(graph->Launch(stream.get()).ok());
  ASSERT_TRUE(stream.Synchronize().ok());
  for (unsigned run = 0; run < 1 + kReplays; ++run) {
    for (unsigned link = 0; link < kLinks; ++link) {
      for (unsigned i = 0; i < kLinkValues; ++i) {
        next[i] = LinkValue(values[LinkSource(i, link)], i / kLinkThreads);
      }
      values.swap(next);
    }
  }
  EXPECT_EQ(even.Read(), values);
}

#if defined(MOESERVE_CUDA_EMULATION)

__global__ void ImpatientKernel() {
  if (threadIdx.x != 5) GridDependencyPass();
}

enum class PtxFault {
  kNoInit,
  kTooManyArrivals,
  kNobodyWaits,
  kNeverArrives,
  kPollsInVain,
  kMisaligned,
  kOverrun
};

__global__ void FaultyPtxKernel(PtxFault fault, const float* in, float* out) {
  auto* buffer = DynamicShared<float>();
  auto* barrier = reinterpret_cast<uint64_t*>(buffer + 32);
  if (fault != PtxFault::kNoInit) MbarrierInit(barrier, 1);
  switch (fault) {
    case PtxFault::kNoInit:
      MbarrierArrive(barrier);
      break;
    case PtxFault::kTooManyArrivals:
      MbarrierExpect(barrier, 16);
      MbarrierArrive(barrier);
      MbarrierArrive(barrier);
      break;
    case PtxFault::kNobodyWaits:
      MbarrierArriveExpect(barrier, 128);
      CopyBulkAsync(buffer, in, 128, barrier);
      break;
    case PtxFault::kNeverArrives:
      MbarrierWait(barrier, 0);
      break;
    case PtxFault::kPollsInVain:
      while (!MbarrierTryWait(barrier, 0)) {
      }
      break;
    case PtxFault::kMisaligned:
      CopyAsync16(buffer + 1, in);
      break;
    case PtxFault::kOverrun:
      CopyAsync16(buffer + 32, in);
      break;
  }
  out[0] = buffer[0];
}

__global__ void ChangedOperandKernel() {
  auto* matrix = DynamicShared<Bf16>();
  for (int i = threadIdx.x; i < 16 * 64; i += blockDim.x) matrix[i] = 0;
  __syncthreads();
  uint32_t a[4] = {};
  float d[32];
  Wgmma<64>::RegistersTransposed(d, a, TransposedDescriptor(matrix, 0), false);
  WgmmaCommit();
  a[0] = 1;
  WgmmaWait<0>();
}

void RunFaultyPtx(PtxFault fault) {
  emulator::SetOrder({});  // the error message must name the thread that is found first
  DeviceArray<float> in(32), out(1);
  Launch(FaultyPtxKernel, {.grid = dim3(1), .block = dim3(1), .shared_bytes = 32 * 4 + 8}, fault,
         in.data(), out.data());
  cudaDeviceSynchronize();
}

TEST(PtxDeathTest, FaultsAreReported) {
  EXPECT_DEATH(RunFaultyPtx(PtxFault::kNoInit),
               "mbarrier at 0x80 of shared memory was not initialised");
  EXPECT_DEATH(RunFaultyPtx(PtxFault::kTooManyArrivals), "more arrivals");
  EXPECT_DEATH(RunFaultyPtx(PtxFault::kNobodyWaits), "nobody waited for");
  EXPECT_DEATH(RunFaultyPtx(PtxFault::kNeverArrives), "deadlock");
  EXPECT_DEATH(RunFaultyPtx(PtxFault::kPollsInVain), "deadlock.*\n.*polling");
  EXPECT_DEATH(RunFaultyPtx(PtxFault::kMisaligned), "not aligned");
  EXPECT_DEATH(RunFaultyPtx(PtxFault::kOverrun), "bytes \\[128, 144\\) of shared memory");
  EXPECT_DEATH(
      {
        Launch(ChangedOperandKernel, LaunchShape{dim3(1), dim3(128), 16 * 64 * 2});
        cudaDeviceSynchronize();
      },
      "registers of operand a changed before the wait");
  EXPECT_DEATH(
      {
        Launch(ImpatientKernel, LaunchShape{dim3(1), dim3(32), 0, nullptr, true});
        cudaDeviceSynchronize();
      },
      "did not call GridDependencyWait");
}

#endif

}  // namespace
}  // namespace moeserve::cuda

// Packs weights into the device's layout, and reads rows of packed weights.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_bank.h"
#include "kernels/cuda/linear/linear_image.h"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 256;

__device__ float LoadElement(const char* base, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(base)[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(base)[i];
  return dtype == DType::kBF16 ? F32FromBf16(bits) : F32FromF16(bits);
}

// Each block packs one row.
__global__ void PackRowsKernel(internal::PackRowsArgs a) {
  const int r = static_cast<int>(blockIdx.x);
  const int row = ImageRow(a.gated, a.gate_half, a.first_row + r);
  const char* source = static_cast<const char*>(a.source);
  const int element = a.image_dtype == DType::kF32 ? 4 : 2;
  const int64_t first = static_cast<int64_t>(r) * a.in_features;
  for (int k = static_cast<int>(threadIdx.x); k < a.in_features; k += kThreads) {
    char* to = a.image + ImageOffset(a.k_blocks, row, k, element);
    if (a.image_dtype == a.source_dtype && element == 2) {
      *reinterpret_cast<uint16_t*>(to) = reinterpret_cast<const uint16_t*>(source)[first + k];
      continue;
    }
    const float value = LoadElement(source, a.source_dtype, first + k);
    if (element == 4) {
      *reinterpret_cast<float*>(to) = value;
    } else {
      *reinterpret_cast<uint16_t*>(to) = Bf16FromF32(value);
    }
  }
}

struct UnpackRowsArgs {
  const char* image;
  int k_blocks;
  int in_features;
  int out_features;
  bool gated;
  uint16_t* rows;
};

// Each block copies one row.
__global__ void UnpackRowsKernel(UnpackRowsArgs a) {
  const int r = static_cast<int>(blockIdx.x);
  const bool gate_half = r >= a.out_features;
  const int row = ImageRow(a.gated, gate_half, gate_half ? r - a.out_features : r);
  uint16_t* const to = a.rows + static_cast<int64_t>(r) * a.in_features;
  for (int k = static_cast<int>(threadIdx.x); k < a.in_features; k += kThreads) {
    to[k] = *reinterpret_cast<const uint16_t*>(a.image + ImageOffset(a.k_blocks, row, k, 2));
  }
}

// Each block packs one row.
__global__ void PackInt8Kernel(internal::PackInt8Args a) {
  const int r = static_cast<int>(blockIdx.x);
  const int row = ImageRow(a.gated, a.gate_half, a.first_row + r);
  const int8_t* const source = a.source + static_cast<int64_t>(r) * a.in_features;
  for (int k = static_cast<int>(threadIdx.x); k < a.in_features; k += kThreads) {
    a.image[Int8ImageOffset(a.k_blocks, row, k)] = static_cast<char>(source[k]);
  }
}

// Returns four bits of an array of them, or 0 if there are at most i.
__device__ uint8_t NibbleAt(const uint8_t* bytes, int i, int count) {
  return i < count ? bytes[i / 2] >> (i % 2 * 4) & 15 : 0;
}

// Each block packs one row. A thread writes whole bytes; both halves of each belong to the row.
__global__ void PackInt4Kernel(internal::PackInt8Args a) {
  const int r = static_cast<int>(blockIdx.x);
  const int row = ImageRow(a.gated, a.gate_half, a.first_row + r);
  const int groups = (a.in_features + kSubGroup - 1) / kSubGroup;
  const int integer_bytes = (a.in_features + 1) / 2;
  const uint8_t* const values = reinterpret_cast<const uint8_t*>(a.source) +
                                static_cast<int64_t>(r) * (integer_bytes + groups);
  const uint8_t* const factors = values + integer_bytes;
  const int thread = static_cast<int>(threadIdx.x);
  const auto store = [&](const NibblePlace& place, int low, int high) {
    a.image[place.byte] = static_cast<char>(low | high << 4);
  };
  for (int i = thread; i < groups * 16; i += kThreads) {
    const int k = i / 16 * 32 + i % 16;
    store(Int4ValuePlace(a.k_blocks, row, k), NibbleAt(values, k, a.in_features),
          NibbleAt(values, k + 16, a.in_features));
  }
  for (int g = 2 * thread; g < groups; g += 2 * kThreads) {
    store(Int4FactorPlace(a.k_blocks, row, g), factors[g] & 15,
          g + 1 < groups ? factors[g + 1] & 15 : 0);
  }
  for (int i = thread; i < (groups + 31) / 32 * 16; i += kThreads) {
    const int g = i / 16 * 32 + i % 16;
    if (g >= groups) continue;
    store(Int4MinimumPlace(a.k_blocks, row, g), factors[g] >> 4,
          g + 16 < groups ? factors[g + 16] >> 4 : 0);
  }
}

// Each block packs one row of int8 or int4.
__global__ void PackGroupedKernel(internal::PackInt8Args a, bool int4, const F16* scales) {
  const int r = static_cast<int>(blockIdx.x);
  const int row = ImageRow(a.gated, a.gate_half, a.first_row + r);
  const int row_bytes = int4 ? (a.in_features + 1) / 2 : a.in_features;
  const uint8_t* const values =
      reinterpret_cast<const uint8_t*>(a.source) + static_cast<int64_t>(r) * row_bytes;
  const int thread = static_cast<int>(threadIdx.x);
  if (int4) {
    for (int i = thread; i < (a.in_features + 31) / 32 * 16; i += kThreads) {
      const int k = i / 16 * 32 + i % 16;
      a.image[GroupedValuePlace(true, a.k_blocks, row, k).byte] = static_cast<char>(
          NibbleAt(values, k, a.in_features) | NibbleAt(values, k + 16, a.in_features) << 4);
    }
  } else {
    for (int k = thread; k < a.in_features; k += kThreads) {
      a.image[GroupedValuePlace(false, a.k_blocks, row, k).byte] = static_cast<char>(values[k]);
    }
  }
  const int group_inputs = kInt8BlockInputs / GroupsOfBlock(int4);
  const int groups = (a.in_features + group_inputs - 1) / group_inputs;
  for (int g = thread; g < groups; g += kThreads) {
    *reinterpret_cast<F16*>(a.image + GroupedScaleOffset(int4, a.k_blocks, row, g)) =
        scales[static_cast<int64_t>(r) * groups + g];
  }
}

__global__ void PackVectorKernel(const float* values, int count, int first_row, bool gated,
                                 bool gate_half, float* packed) {
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i < count) packed[ImageRow(gated, gate_half, first_row + i)] = values[i];
}

struct ReadRowsArgs {
  const char* image;
  DType dtype;
  int k_blocks;
  int in_features;
  int out_features;
  const int32_t* ids;
  float scale;
  float* output;
  int64_t stride;
};

__global__ void ReadRowsKernel(ReadRowsArgs a) {
  GridDependencyPass();
  const int r = static_cast<int>(blockIdx.x);
  const int id = a.ids[r];
  const int row = id < 0 || id >= a.out_features ? 0 : id;
  const int element = a.dtype == DType::kF32 ? 4 : 2;
  for (int k = static_cast<int>(threadIdx.x); k < a.in_features; k += kThreads) {
    const int64_t offset = ImageOffset(a.k_blocks, row, k, element);
    a.output[r * a.stride + k] = LoadElement(a.image + offset, a.dtype, 0) * a.scale;
  }
}

}  // namespace

namespace internal {

void LaunchPackRows(const PackRowsArgs& args, cudaStream_t stream) {
  Launch(PackRowsKernel, {dim3(static_cast<unsigned>(args.rows)), dim3(kThreads), 0, stream}, args);
}

void LaunchUnpackRows(const CudaLinearBank& bank, char* rows, cudaStream_t stream) {
  const LinearBankEntry& m = bank.entry(0);
  const UnpackRowsArgs args{.image = bank.weights() + m.weights,
                            .k_blocks = m.k_blocks,
                            .in_features = m.in_features,
                            .out_features = m.out_features,
                            .gated = bank.shape().gated,
                            .rows = reinterpret_cast<uint16_t*>(rows)};
  const auto blocks = static_cast<unsigned>(m.out_features * (bank.shape().gated ? 2 : 1));
  Launch(UnpackRowsKernel, {dim3(blocks), dim3(kThreads), 0, stream}, args);
}

void LaunchPackInt8(const PackInt8Args& args, cudaStream_t stream) {
  Launch(PackInt8Kernel, {dim3(static_cast<unsigned>(args.rows)), dim3(kThreads), 0, stream}, args);
}

void LaunchPackInt4(const PackInt8Args& args, cudaStream_t stream) {
  Launch(PackInt4Kernel, {dim3(static_cast<unsigned>(args.rows)), dim3(kThreads), 0, stream}, args);
}

void LaunchPackGrouped(const PackInt8Args& args, bool int4, const F16* scales,
                       cudaStream_t stream) {
  Launch(PackGroupedKernel, {dim3(static_cast<unsigned>(args.rows)), dim3(kThreads), 0, stream},
         args, int4, scales);
}

void LaunchPackVector(const float* values, int count, int first_row, bool gated, bool gate_half,
                      float* packed, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  Launch(PackVectorKernel, {dim3(blocks), dim3(kThreads), 0, stream}, values, count, first_row,
         gated, gate_half, packed);
}

}  // namespace internal

void LaunchReadRows(const CudaLinearBank& bank, const int32_t* ids, int rows, float scale,
                    const RowsView& output, cudaStream_t stream) {
  MOESERVE_CHECK(!bank.shape().gated && bank.num_experts() == 1, "rows of a dense layer");
  MOESERVE_CHECK(!bank.row_major() && !bank.has_integers() && !bank.is_mxfp4() && !bank.is_fp8(),
                 "the image of the layer");
  MOESERVE_CHECK(output.dtype == DType::kF32, "f32 rows");
  if (rows == 0) return;
  const LinearBankEntry& m = bank.entry(0);
  const ReadRowsArgs args{.image = bank.weights() + m.weights,
                          .dtype = bank.shape().weight_dtype,
                          .k_blocks = m.k_blocks,
                          .in_features = m.in_features,
                          .out_features = m.out_features,
                          .ids = ids,
                          .scale = scale,
                          .output = static_cast<float*>(output.data),
                          .stride = output.stride};
  Launch(ReadRowsKernel, {dim3(static_cast<unsigned>(rows)), dim3(kThreads), 0, stream, true},
         args);
}

}  // namespace moeserve::cuda

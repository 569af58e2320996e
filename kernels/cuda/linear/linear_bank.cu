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
  MOESERVE_CHECK(!bank.row_major() && !bank.is_int8() && !bank.is_mxfp4(),
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

#include "kernels/cuda/dense/dense_layers.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"

namespace moeserve::cuda {
namespace {

constexpr int64_t kWideBytes = 16;  // alignment of rows

// The rows with which algorithms are tested: as many as in a large step, but at most so many that
// their outputs take this much memory.
constexpr int64_t kTestedRows = 2048;
constexpr int64_t kTestedBytes = int64_t{64} << 20;
constexpr int64_t kFewestTestedRows = 160;

int SumsPerRow(const LinearBankShape& shape) {
  return shape.out_features[0] * (shape.gated ? 2 : 1);
}

bool StartsWide(const RowsView& rows) {
  return (reinterpret_cast<uintptr_t>(rows.data) |
          static_cast<uintptr_t>(rows.stride) * SizeOf(rows.dtype)) %
             kWideBytes ==
         0;
}

// Returns whether the sums are the outputs, so that the library can store them there.
bool StoresSums(const LinearArgs& args) {
  const LinearBankShape& shape = args.bank->shape();
  return !shape.gated && !shape.bias && args.activation.kind == ActivationKind::kNone &&
         !args.pad_output && args.output.dtype == DType::kF32 && StartsWide(args.output);
}

// Returns the distance of the rows of sums, in elements.
int64_t StrideOfSums(const LinearArgs& args) {
  if (StoresSums(args)) return args.output.stride;
  return (int64_t{SumsPerRow(args.bank->shape())} + 3) / 4 * 4;
}

size_t BytesOfSums(const LinearArgs& args) {
  if (StoresSums(args)) return 0;
  return static_cast<size_t>(args.input.rows * StrideOfSums(args)) * sizeof(float);
}

// Returns bf16 values in (-2, 2) that look random; the same in every call.
std::vector<Bf16> TestValues(int64_t count) {
  std::vector<Bf16> values(static_cast<size_t>(count));
  uint32_t state = 1;
  for (Bf16& v : values) {
    state = state * 1664525u + 1013904223u;  // the linear congruential generator of Knuth and Lewis
    v = Bf16FromF32(static_cast<float>(state >> 8) * 0x1p-22f - 2.0f);
  }
  return values;
}

absl::Status Wait(cudaStream_t stream) {
  return CudaStatus(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

}  // namespace

bool DenseLayers::Fits(const LinearBank& bank, DType rows) {
  const LinearBankShape& shape = bank.shape();
  return rows == DType::kBF16 && bank.num_experts() == 1 && shape.weight_dtype == DType::kBF16 &&
         shape.quantization == Quantization::kNone && !shape.mxfp4 && !shape.fp8 &&
         shape.in_features_of(0) % 8 == 0;
}

bool DenseLayers::Fits(const LinearArgs& args) {
  return args.plan == nullptr && !args.segments && Fits(*args.bank, args.input.dtype) &&
         StartsWide(args.input);
}

DenseShape DenseLayers::ShapeOf(const LinearArgs& args) {
  const LinearBankShape& shape = args.bank->shape();
  return {.out_features = SumsPerRow(shape),
          .in_features = shape.in_features_of(0),
          .input_stride = args.input.stride,
          .output_stride = StrideOfSums(args)};
}

bool DenseLayers::Ready(const LinearArgs& args) const {
  const auto at = algorithms_.find(ShapeOf(args));
  if (at == algorithms_.end()) return false;
  if (!at->second.has_value()) return true;
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  return bank.row_major() && BytesOfSums(args) <= sums_.bytes();
}

absl::Status DenseLayers::Prepare(const LinearArgs& args, cudaStream_t stream) {
  MOESERVE_RETURN_IF_ERROR(Wait(stream));
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  const DenseShape shape = ShapeOf(args);
  auto at = algorithms_.find(shape);
  std::optional<DeviceMemory> rows;
  if (!bank.row_major()) {
    MOESERVE_ASSIGN_OR_RETURN(rows, bank.RowMajor(stream));
  }
  if (at == algorithms_.end()) {
    const char* const weights = rows.has_value() ? rows->as<char>() : bank.weights();
    MOESERVE_ASSIGN_OR_RETURN(const std::optional<int> algorithm, Select(shape, weights, stream));
    at = algorithms_.emplace(shape, algorithm).first;
  }
  if (!at->second.has_value()) return absl::OkStatus();
  if (rows.has_value()) bank.ReplaceImage(*std::move(rows));
  if (BytesOfSums(args) > sums_.bytes()) {
    sums_ = {};
    MOESERVE_ASSIGN_OR_RETURN(sums_, DeviceMemory::Allocate(BytesOfSums(args)));
  }
  return absl::OkStatus();
}

Result<std::optional<int>> DenseLayers::Select(const DenseShape& shape, const char* weights,
                                               cudaStream_t stream) {
  const int64_t output_bytes = shape.output_stride * int64_t{sizeof(float)};
  const int64_t rows = std::clamp(kTestedBytes / output_bytes, kFewestTestedRows, kTestedRows);
  std::string reason = "it has no algorithm without split sums";
  const Result<int> algorithms = library_->FindAlgorithms(shape, rows);
  if (!algorithms.ok()) reason = std::string(algorithms.status().message());
  if (algorithms.ok() && *algorithms > 0) {
    const std::vector<Bf16> values = TestValues(rows * shape.input_stride);
    const size_t input_bytes = values.size() * sizeof(Bf16);
    MOESERVE_ASSIGN_OR_RETURN(const DeviceMemory input, DeviceMemory::Allocate(input_bytes));
    MOESERVE_ASSIGN_OR_RETURN(const DeviceMemory whole,
                              DeviceMemory::Allocate(static_cast<size_t>(rows * output_bytes)));
    MOESERVE_ASSIGN_OR_RETURN(const DeviceMemory part,
                              DeviceMemory::Allocate(static_cast<size_t>(rows * output_bytes)));
    MOESERVE_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(input.data(), values.data(), input_bytes, cudaMemcpyHostToDevice, stream));
    MOESERVE_RETURN_IF_ERROR(Wait(stream));
    for (int i = 0; i < *algorithms; ++i) {
      MOESERVE_ASSIGN_OR_RETURN(const bool independent,
                                RowsAreIndependent(shape, i, weights, input.as<char>(), rows,
                                                   whole.as<float>(), part.as<float>(), stream));
      if (independent) return std::optional<int>(i);
    }
    reason = Concat("with each of its ", *algorithms,
                    " algorithms the bits of a row depend on the other rows");
  }
  warnings_.push_back(
      Concat("dense layers of ", shape.out_features, " x ", shape.in_features,
             " weights are computed by moeserve's kernels and not by the library: ", reason));
  return std::optional<int>();
}

Result<bool> DenseLayers::RowsAreIndependent(const DenseShape& shape, int algorithm,
                                             const char* weights, const char* input, int64_t rows,
                                             float* whole, float* part, cudaStream_t stream) {
  // First row and number of rows of the products that are compared with that of all rows: single
  // rows, and rows that end before, at and after the edges of usual tiles.
  const std::pair<int64_t, int64_t> kParts[] = {
      {0, 1},   {rows - 1, 1}, {37, 2},  {5, 8},        {1, 31},
      {64, 64}, {3, 127},      {7, 129}, {0, rows / 2}, {rows / 3, rows - rows / 3}};
  const size_t row_bytes = static_cast<size_t>(shape.output_stride) * sizeof(float);
  MOESERVE_ASSIGN_OR_RETURN(const DeviceMemory counter,
                            DeviceMemory::Allocate(sizeof(unsigned long long)));
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(counter.data(), 0, counter.bytes(), stream));
  // Columns after the last output are never written, and are compared, too.
  MOESERVE_CUDA_RETURN_IF_ERROR(
      cudaMemsetAsync(whole, 0, static_cast<size_t>(rows) * row_bytes, stream));
  MOESERVE_CUDA_RETURN_IF_ERROR(
      cudaMemsetAsync(part, 0, static_cast<size_t>(rows) * row_bytes, stream));
  if (!library_->Multiply(shape, algorithm, weights, input, rows, whole, stream).ok()) return false;
  for (const auto& [begin, count] : kParts) {
    const char* const first = input + begin * shape.input_stride * int64_t{sizeof(Bf16)};
    if (!library_->Multiply(shape, algorithm, weights, first, count, part, stream).ok()) {
      return false;
    }
    internal::LaunchCountDifferences(part, whole + begin * shape.output_stride,
                                     count * shape.output_stride, counter.as<unsigned long long>(),
                                     stream);
  }
  unsigned long long differences = 0;
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(&differences, counter.data(), sizeof(differences),
                                                cudaMemcpyDeviceToHost, stream));
  MOESERVE_RETURN_IF_ERROR(Wait(stream));
  return differences == 0;
}

bool DenseLayers::Run(const LinearArgs& args, cudaStream_t stream) {
  const DenseShape shape = ShapeOf(args);
  const std::optional<int> algorithm = algorithms_.at(shape);
  if (!algorithm.has_value()) return false;
  const bool stores = StoresSums(args);
  float* const sums = stores ? static_cast<float*>(args.output.data) : sums_.as<float>();
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  const absl::Status status = library_->Multiply(shape, *algorithm, bank.weights(), args.input.data,
                                                 args.input.rows, sums, stream);
  if (!status.ok()) {
    moeserve::internal::CheckFailed(__FILE__, __LINE__, "a product that was tested before",
                                    std::string(status.message()).c_str());
  }
  if (!stores) internal::LaunchDenseEpilogue(args, sums, shape.output_stride, stream);
  return true;
}

}  // namespace moeserve::cuda

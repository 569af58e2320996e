#include "kernels/cuda/linear/linear_bank.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <string>

#include "absl/strings/escaping.h"
#include "base/check.h"
#include "base/error_text.h"
#include "base/sha256.h"
#include "kernels/cuda/linear/linear_image.h"

namespace moeserve::cuda {
namespace {

// Weights are uploaded in groups of rows of about this size.
constexpr int64_t kUploadBytes = int64_t{64} << 20;

// Stops the process: an error of the device while a model is loaded is fatal.
void Require(cudaError_t error) { MOESERVE_CHECK(error == cudaSuccess, cudaGetErrorString(error)); }

void Require(const Status& status, const char* what) {
  if (status.ok()) return;
  moeserve::internal::CheckFailed(__FILE__, __LINE__, what, std::string(status.message()).c_str());
}

int Blocks(int n, int block = kImageBlock) { return (n + block - 1) / block; }

int ImageRows(int out_features, bool gated) {
  return gated ? (out_features + 7) / 8 * 16 : out_features;
}

std::string SignatureOf(const LinearBankShape& s) {
  int most_in = 0, most_out = 0;
  std::string sizes;
  for (size_t e = 0; e < s.out_features.size(); ++e) {
    const int in = s.in_features_of(static_cast<int>(e));
    sizes += Concat(in, 'x', s.out_features[e], ' ');
    most_in = std::max(most_in, in);
    most_out = std::max(most_out, s.out_features[e]);
  }
  const std::string hash = absl::BytesToHexString(Sha256(sizes)).substr(0, 16);
  return Concat(s.out_features.size(), " of up to ", most_out, " x ", most_in,
                s.gated ? " gated" : "", s.bias ? " bias " : " ",
                s.mxfp4                                 ? "mxfp4"
                : s.fp8                                 ? "fp8"
                : s.quantization == Quantization::kNone ? Name(s.weight_dtype)
                                                        : Name(s.quantization),
                ' ', hash);
}

// Checks that the kernels compute with the integer weights of this shape, if it has any.
Status CheckIntegers(const LinearBankShape& shape) {
  if (QuantGroup(shape.quantization) != kWholeRow) return absl::OkStatus();
  const int widest = *std::max_element(shape.in_features.begin(), shape.in_features.end());
  if (widest <= kWholeRow) return absl::OkStatus();
  return absl::UnimplementedError(Concat(Name(shape.quantization), " weights: expected at most ",
                                         kWholeRow, " inputs on this device, found ", widest));
}

// Returns the number of blocks of 64 inputs of a matrix of FP8, an even number.
int Fp8Blocks(int in_features) { return 2 * Blocks(in_features, kFp8ScaleInputs); }

// Returns the distance of addresses that may be in different allocations.
int64_t OffsetOf(const char* address, const char* base) {
  return reinterpret_cast<intptr_t>(address) - reinterpret_cast<intptr_t>(base);
}

Status AllocateZeros(DeviceMemory& memory, int64_t bytes) {
  MOESERVE_ASSIGN_OR_RETURN(memory, DeviceMemory::Allocate(static_cast<size_t>(bytes)));
  if (bytes == 0) return absl::OkStatus();
  return CudaStatus(cudaMemset(memory.data(), 0, static_cast<size_t>(bytes)), "cudaMemset");
}

}  // namespace

std::vector<int> SliceBlocks(const LinearBankShape& shape) {
  constexpr int kSliceInputs = 1024, kFewestInputs = 1536, kMostOutputs = 1024;
  const int experts = static_cast<int>(shape.out_features.size());
  const bool integers = shape.quantization != Quantization::kNone;
  const int block = integers ? kInt8BlockInputs : kImageBlock;
  bool sliced = shape.weight_dtype == DType::kBF16 && !integers && !shape.fp8 && experts > 1;
  for (int e = 0; e < experts; ++e) {
    if (shape.out_features[e] == 0) continue;
    sliced =
        sliced && shape.in_features_of(e) >= kFewestInputs && shape.out_features[e] <= kMostOutputs;
  }
  std::vector<int> blocks;
  for (int e = 0; e < experts; ++e) {
    const int inputs = shape.in_features_of(e);
    if (shape.fp8) {
      blocks.push_back(std::max(1, Fp8Blocks(inputs)));
      continue;
    }
    const int slices = sliced ? std::max(1, (inputs + kSliceInputs - 1) / kSliceInputs) : 1;
    blocks.push_back(std::max(1, Blocks((inputs + slices - 1) / slices, block)));
  }
  return blocks;
}

Result<std::unique_ptr<CudaLinearBank>> CudaLinearBank::Create(LinearBankShape shape,
                                                               BankMemory memory) {
  std::unique_ptr<CudaLinearBank> bank(new CudaLinearBank(std::move(shape), memory));
  const LinearBankShape& s = bank->layer_shape_;
  MOESERVE_RETURN_IF_ERROR(CheckIntegers(s));
  const bool integers = bank->has_integers();
  MOESERVE_CHECK(!s.mxfp4 || (s.weight_dtype == DType::kBF16 && !integers),
                 "MXFP4 of bf16 numbers");
  MOESERVE_CHECK(!s.fp8 || (s.weight_dtype == DType::kBF16 && !integers && !s.mxfp4),
                 "FP8 in the place of bf16 numbers");
  bank->signature_ = SignatureOf(s);
  MOESERVE_RETURN_IF_ERROR(bank->Allocate(bank->Describe()));
  return bank;
}

int64_t CudaLinearBank::ImageBytes(int expert) const {
  const LinearBankEntry& entry = entries_[static_cast<size_t>(expert)];
  const auto element = static_cast<int64_t>(SizeOf(shape_.weight_dtype));
  const int64_t block_bytes = is_mxfp4() ? kMxfp4BlockBytes
                              : is_fp8() ? kFp8BlockBytes
                              : is_grouped()
                                  ? GroupedBlockBytes(shape_.quantization == Quantization::kInt4)
                              : has_integers() ? kImageBlock * kInt8BlockInputs
                                               : kImageBlock * kImageBlock * element;
  return entry.row_blocks *
         (is_int4() ? Int4StripBytes(entry.k_blocks) : entry.k_blocks * block_bytes);
}

int64_t CudaLinearBank::Describe() {
  const LinearBankShape& s = layer_shape_;
  const int block_inputs = has_integers() ? kInt8BlockInputs : kImageBlock;
  int64_t weight_bytes = 0;
  int64_t bias_values = 0;
  const std::vector<int> slice_blocks = SliceBlocks(s);
  for (int e = 0; e < num_experts(); ++e) {
    LinearBankEntry entry{};
    entry.bias = bias_values;
    entry.in_features = s.in_features_of(e);
    entry.out_features = s.out_features[e];
    entry.k_blocks = s.fp8 ? Fp8Blocks(entry.in_features) : Blocks(entry.in_features, block_inputs);
    entry.row_blocks = Blocks(ImageRows(entry.out_features, s.gated));
    entry.slice_blocks = slice_blocks[e];
    const bool absent = shape_.is_absent(e);
    if (memory_ == BankMemory::kTogether) entry.weights = weight_bytes;
    entries_.push_back(entry);
    if (!absent) weight_bytes += ImageBytes(e);
    if (!absent || memory_ != BankMemory::kTogether) {
      bias_values += int64_t{entry.row_blocks} * kImageBlock;
    }
    placed_.push_back(!absent && memory_ != BankMemory::kHost);
    max_row_blocks_ = std::max(max_row_blocks_, entry.row_blocks);
    max_k_blocks_ = std::max(max_k_blocks_, entry.k_blocks);
    if (entry.row_blocks > 0) {
      const int slices = (entry.k_blocks + entry.slice_blocks - 1) / entry.slice_blocks;
      max_slices_ = std::max(max_slices_, slices);
    }
  }
  return bias_values;
}

std::vector<int32_t> CudaLinearBank::SortBySize() {
  std::vector<int32_t> order(entries_.size());
  std::iota(order.begin(), order.end(), 0);
  const auto cost = [&](int e) { return int64_t{entries_[e].row_blocks} * entries_[e].k_blocks; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return cost(a) > cost(b); });
  std::vector<int64_t> by_rows;
  for (const LinearBankEntry& e : entries_) by_rows.push_back(e.row_blocks);
  std::sort(by_rows.begin(), by_rows.end(), std::greater<>());
  largest_row_blocks_.push_back(0);
  for (const int64_t n : by_rows) {
    largest_row_blocks_.push_back(largest_row_blocks_.back() + n);
  }
  return order;
}

Status CudaLinearBank::Allocate(int64_t bias_values) {
  const auto zeros = [this](DeviceMemory& memory, int64_t bytes) {
    bytes_ += bytes;
    return AllocateZeros(memory, bytes);
  };
  const int64_t vector_bytes = bias_values * static_cast<int64_t>(sizeof(float));
  const size_t table_bytes = entries_.size() * sizeof(LinearBankEntry);
  MOESERVE_ASSIGN_OR_RETURN(table_, DeviceMemory::Allocate(table_bytes));
  MOESERVE_RETURN_IF_ERROR(AllocateImages());
  if (shape_.bias) MOESERVE_RETURN_IF_ERROR(zeros(bias_, vector_bytes));
  if (has_integers() && !is_grouped()) MOESERVE_RETURN_IF_ERROR(zeros(scales_, vector_bytes));
  if (is_int4()) MOESERVE_RETURN_IF_ERROR(zeros(units_, vector_bytes));
  MOESERVE_CUDA_RETURN_IF_ERROR(
      cudaMemcpy(table_.data(), entries_.data(), table_bytes, cudaMemcpyHostToDevice));
  const std::vector<int32_t> order = SortBySize();
  const size_t order_bytes = order.size() * sizeof(int32_t);
  MOESERVE_ASSIGN_OR_RETURN(order_, DeviceMemory::Allocate(order_bytes));
  MOESERVE_CUDA_RETURN_IF_ERROR(
      cudaMemcpy(order_.data(), order.data(), order_bytes, cudaMemcpyHostToDevice));
  MOESERVE_RETURN_IF_ERROR(tile_counters_.Allocate());
  // Copies from pageable memory may still be running.
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(nullptr));
  return absl::OkStatus();
}

Status CudaLinearBank::AllocateImages() {
  int64_t all = 0;
  std::vector<int64_t> bytes(entries_.size());  // of the images here
  for (int e = 0; e < num_experts(); ++e) {
    if (!shape_.is_absent(e)) bytes[e] = ImageBytes(e);
    if (memory_ == BankMemory::kHost) host_offsets_.push_back(all);
    all += bytes[e];
  }
  if (memory_ == BankMemory::kTogether) {
    bytes_ += all;
    return AllocateZeros(weights_, all);
  }
  if (memory_ == BankMemory::kSeparate) {
    bytes_ += all;
    images_.resize(entries_.size());
    for (size_t e = 0; e < images_.size(); ++e) {
      if (bytes[e] == 0) continue;
      auto image = std::make_shared<DeviceMemory>();
      MOESERVE_RETURN_IF_ERROR(AllocateZeros(*image, bytes[e]));
      entries_[e].weights = OffsetOf(image->as<char>(), weights());
      images_[e] = std::move(image);
    }
    return absl::OkStatus();
  }
  host_offsets_.push_back(all);
  Result<PinnedMemory> pinned = PinnedMemory::Allocate(static_cast<size_t>(all));
  if (pinned.ok()) {
    pinned_ = *std::move(pinned);
    if (all > 0) std::memset(pinned_.data(), 0, static_cast<size_t>(all));
    return absl::OkStatus();
  }
  // The system limits page-locked memory; copies from other memory are slower.
  pageable_.reset(new (std::nothrow) char[static_cast<size_t>(all)]());
  if (pageable_ != nullptr) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      Concat("host memory for the experts of a layer: expected ", all, " bytes, found less"));
}

Status CudaLinearBank::Place(std::span<const PlacedImage> images, cudaStream_t stream) {
  MOESERVE_CHECK(!row_major_, "a bank of DenseLayers has no image");
  const size_t bytes = entries_.size() * sizeof(LinearBankEntry);
  if (table_copy_.bytes() == 0) {
    MOESERVE_ASSIGN_OR_RETURN(table_copied_, Event::Create(false));
    MOESERVE_ASSIGN_OR_RETURN(table_copy_, PinnedMemory::Allocate(bytes));
  } else {
    MOESERVE_RETURN_IF_ERROR(table_copied_.Synchronize());
  }
  for (const auto& [expert, image] : images) {
    const auto e = static_cast<size_t>(expert);
    MOESERVE_CHECK(reinterpret_cast<uintptr_t>(image) % kImageAlignment == 0, "an aligned image");
    entries_[e].weights = image == nullptr ? 0 : OffsetOf(image, weights());
    placed_[e] = image != nullptr;
  }
  // A copy, not a kernel: what follows may read the table before it waits for an earlier kernel.
  std::memcpy(table_copy_.data(), entries_.data(), bytes);
  MOESERVE_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(table_.data(), table_copy_.data(), bytes, cudaMemcpyHostToDevice, stream));
  return table_copied_.Record(stream);
}

Status CudaLinearBank::CopyVectors(const CudaLinearBank& from, int expert, cudaStream_t stream) {
  const LinearBankEntry& to = entries_[static_cast<size_t>(expert)];
  MOESERVE_CHECK(memory_ != BankMemory::kTogether && from.signature_ == signature_,
                 "banks of the same layer, with room for all vectors");
  const size_t bytes = static_cast<size_t>(to.row_blocks) * kImageBlock * sizeof(float);
  const auto copy = [&](const DeviceMemory& source, const DeviceMemory& target) -> Status {
    if (bytes == 0 || target.bytes() == 0) return absl::OkStatus();
    MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(target.as<float>() + to.bias,
                                                  source.as<float>() + from.entry(expert).bias,
                                                  bytes, cudaMemcpyDeviceToDevice, stream));
    return absl::OkStatus();
  };
  MOESERVE_RETURN_IF_ERROR(copy(from.bias_, bias_));
  MOESERVE_RETURN_IF_ERROR(copy(from.scales_, scales_));
  return copy(from.units_, units_);
}

char* CudaLinearBank::LoadingImage(int expert) {
  const auto e = static_cast<size_t>(expert);
  if (memory_ != BankMemory::kHost) {
    MOESERVE_CHECK(placed_[e], "weights are loaded before images are taken");
    return const_cast<char*>(weights()) + entries_[e].weights;
  }
  if (loading_ == expert) return loaded_image_.as<char>();
  CloseImage();
  const auto bytes = static_cast<size_t>(ImageBytes(expert));
  if (loaded_image_.bytes() < bytes) {
    loaded_image_ = {};
    auto memory = DeviceMemory::Allocate(bytes);
    Require(memory.status(), "device memory to pack an expert");
    loaded_image_ = *std::move(memory);
  }
  Require(
      cudaMemcpy(loaded_image_.data(), host_image(expert).data(), bytes, cudaMemcpyHostToDevice));
  Require(cudaStreamSynchronize(nullptr));
  loading_ = expert;
  return loaded_image_.as<char>();
}

void CudaLinearBank::CloseImage() {
  if (loading_ < 0) return;
  const std::span<const char> image = host_image(loading_);
  Require(cudaMemcpy(const_cast<char*>(image.data()), loaded_image_.data(), image.size(),
                     cudaMemcpyDeviceToHost));
  loading_ = -1;
}

void CudaLinearBank::FinishLoading() {
  CloseImage();
  loaded_image_ = {};
}

std::span<const char> CudaLinearBank::host_image(int expert) const {
  const auto e = static_cast<size_t>(expert);
  MOESERVE_CHECK(memory_ == BankMemory::kHost, "images in host memory");
  const char* const all = pageable_ != nullptr ? pageable_.get() : pinned_.as<char>();
  return {all + host_offsets_[e], static_cast<size_t>(host_offsets_[e + 1] - host_offsets_[e])};
}

Result<DeviceMemory> CudaLinearBank::RowMajor(cudaStream_t stream) const {
  const LinearBankEntry& m = entries_[0];
  MOESERVE_CHECK(!row_major_ && !has_integers() && !is_mxfp4() && !is_fp8() && num_experts() == 1 &&
                     shape_.weight_dtype == DType::kBF16 && memory_ == BankMemory::kTogether,
                 "the image of a dense bf16 bank");
  const size_t rows = static_cast<size_t>(m.out_features) * (shape_.gated ? 2 : 1);
  MOESERVE_ASSIGN_OR_RETURN(
      DeviceMemory out,
      DeviceMemory::Allocate(rows * static_cast<size_t>(m.in_features) * sizeof(Bf16)));
  internal::LaunchUnpackRows(*this, out.as<char>(), stream);
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
  return out;
}

void CudaLinearBank::ReplaceImage(DeviceMemory rows) const {
  weights_ = std::move(rows);
  row_major_ = true;
}

const LinearBankEntry& CudaLinearBank::EntryHere(int expert) const {
  MOESERVE_CHECK(!shape_.is_absent(expert), "weights of an expert that is here");
  return entries_[expert];
}

void CudaLinearBank::LoadWeight(int expert, Half half, int row_begin, const HostTensor& weight) {
  const LinearBankEntry& m = EntryHere(expert);
  MOESERVE_CHECK(!row_major_, "weights are loaded before the first product");
  MOESERVE_CHECK(!is_fp8(), "LoadFp8() loads weights of FP8");
  MOESERVE_CHECK(weight.shape.size() == 2 && weight.shape[1] == m.in_features &&
                     row_begin + weight.shape[0] <= m.out_features,
                 "weight does not fit its bank");
  MOESERVE_CHECK(shape_.weight_dtype != DType::kF16 || weight.dtype == DType::kF16,
                 "no conversion to f16: it could overflow");
  if (weight.size() == 0) return;
  if (has_integers()) return LoadRounded(expert, half, row_begin, weight);
  const int64_t row_bytes = weight.shape[1] * static_cast<int64_t>(SizeOf(weight.dtype));
  const int64_t rows_per_piece = std::clamp<int64_t>(kUploadBytes / row_bytes, 1, weight.shape[0]);
  auto piece = DeviceMemory::Allocate(static_cast<size_t>(rows_per_piece * row_bytes));
  Require(piece.status(), "device memory to unpack a weight");
  for (int64_t r = 0; r < weight.shape[0]; r += rows_per_piece) {
    const int64_t rows = std::min(rows_per_piece, weight.shape[0] - r);
    Require(cudaMemcpy(piece->data(), static_cast<const char*>(weight.data) + r * row_bytes,
                       static_cast<size_t>(rows * row_bytes), cudaMemcpyHostToDevice));
    if (is_mxfp4()) {
      PackMxfp4(expert, half, row_begin + static_cast<int>(r), static_cast<int>(rows), *piece,
                weight.dtype);
      continue;
    }
    internal::LaunchPackRows({.source = piece->data(),
                              .source_dtype = weight.dtype,
                              .image = LoadingImage(expert),
                              .image_dtype = shape_.weight_dtype,
                              .k_blocks = m.k_blocks,
                              .in_features = m.in_features,
                              .first_row = row_begin + static_cast<int>(r),
                              .rows = static_cast<int>(rows),
                              .gated = shape_.gated,
                              .gate_half = half == Half::kGate},
                             nullptr);
    Require(cudaStreamSynchronize(nullptr));
  }
}

void CudaLinearBank::PackMxfp4(int expert, Half half, int first_row, int rows,
                               const DeviceMemory& source, DType dtype) {
  const LinearBankEntry& m = entries_[expert];
  auto misfit = DeviceMemory::Allocate(sizeof(int32_t));
  Require(misfit.status(), "device memory to check a weight");
  Require(cudaMemset(misfit->data(), 0, sizeof(int32_t)));
  internal::LaunchPackMxfp4({.source = source.data(),
                             .source_dtype = dtype,
                             .image = LoadingImage(expert),
                             .k_blocks = m.k_blocks,
                             .in_features = m.in_features,
                             .first_row = first_row,
                             .rows = rows,
                             .gated = shape_.gated,
                             .gate_half = half == Half::kGate,
                             .misfit = misfit->as<int32_t>()},
                            nullptr);
  int32_t found = 0;
  Require(cudaStreamSynchronize(nullptr));
  Require(cudaMemcpy(&found, misfit->data(), sizeof(found), cudaMemcpyDeviceToHost));
  holds_weights_ = holds_weights_ && found == 0;
}

void CudaLinearBank::LoadFp8(int expert, Half half, int row_begin, const Fp8Matrix& weight) {
  const LinearBankEntry& m = EntryHere(expert);
  MOESERVE_CHECK(is_fp8() && weight.columns == m.in_features &&
                     row_begin + weight.rows <= m.out_features &&
                     static_cast<int64_t>(weight.scales.size()) == weight.rows * weight.groups(),
                 "a matrix of FP8 does not fit its bank");
  if (weight.rows == 0 || weight.columns == 0) return;
  const int64_t rows_per_piece = std::clamp<int64_t>(kUploadBytes / weight.columns, 1, weight.rows);
  const int64_t groups = weight.groups();
  auto piece = DeviceMemory::Allocate(static_cast<size_t>(rows_per_piece * weight.columns));
  Require(piece.status(), "device memory to unpack a weight");
  auto scales = DeviceMemory::Allocate(static_cast<size_t>(rows_per_piece * groups) * 4);
  Require(scales.status(), "device memory to unpack scales");
  auto misfit = DeviceMemory::Allocate(sizeof(int32_t));
  Require(misfit.status(), "device memory to check a weight");
  Require(cudaMemset(misfit->data(), 0, sizeof(int32_t)));
  const auto bytes = static_cast<size_t>(weight.columns);
  for (int64_t r = 0; r < weight.rows; r += rows_per_piece) {
    const int64_t rows = std::min(rows_per_piece, weight.rows - r);
    Require(cudaMemcpy2D(piece->data(), bytes, weight.values + r * weight.row_stride,
                         static_cast<size_t>(weight.row_stride), bytes, static_cast<size_t>(rows),
                         cudaMemcpyHostToDevice));
    Require(cudaMemcpy(scales->data(), weight.scales.data() + r * groups,
                       static_cast<size_t>(rows * groups) * 4, cudaMemcpyHostToDevice));
    internal::LaunchPackFp8({.source = piece->as<uint8_t>(),
                             .scales = scales->as<float>(),
                             .image = LoadingImage(expert),
                             .k_blocks = m.k_blocks,
                             .in_features = m.in_features,
                             .first_row = row_begin + static_cast<int>(r),
                             .rows = static_cast<int>(rows),
                             .gated = shape_.gated,
                             .gate_half = half == Half::kGate,
                             .misfit = misfit->as<int32_t>()},
                            nullptr);
    Require(cudaStreamSynchronize(nullptr));
  }
  int32_t found = 0;
  Require(cudaMemcpy(&found, misfit->data(), sizeof(found), cudaMemcpyDeviceToHost));
  holds_weights_ = holds_weights_ && found == 0;
}

void CudaLinearBank::LoadRounded(int expert, Half half, int row_begin, const HostTensor& weight) {
  struct Integers {
    std::vector<uint8_t> bytes;
    std::vector<F16> scales;
  };
  const Quantization type = shape_.quantization;
  auto owner = std::make_shared<Integers>();
  const int64_t rows = weight.shape[0], columns = weight.shape[1];
  const int64_t row_bytes = QuantRowBytes(type, columns), row_scales = QuantScales(type, columns);
  owner->bytes.resize(static_cast<size_t>(rows * row_bytes));
  owner->scales.resize(static_cast<size_t>(rows * row_scales));
  std::vector<float> row(static_cast<size_t>(columns));
  std::vector<int8_t> values(static_cast<size_t>(QuantRowValues(type, columns)));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < columns; ++k) row[k] = ElementAsF32(weight, r * columns + k);
    QuantizeRow(type, row, values.data(), owner->scales.data() + r * row_scales);
    PackQuantizedRow(type, columns, values.data(), owner->bytes.data() + r * row_bytes);
  }
  LoadQuantized(expert, half, row_begin,
                {.type = type,
                 .rows = rows,
                 .columns = columns,
                 .values = owner->bytes.data(),
                 .scales = owner->scales.data(),
                 .owner = owner});
}

void CudaLinearBank::LoadQuantized(int expert, Half half, int row_begin,
                                   const QuantizedMatrix& weight) {
  const LinearBankEntry& m = EntryHere(expert);
  MOESERVE_CHECK(weight.type == shape_.quantization && weight.columns == m.in_features &&
                     row_begin + weight.rows <= m.out_features,
                 "quantized weight does not fit its bank");
  if (weight.rows == 0) return;
  const int64_t row_bytes = QuantRowBytes(weight.type, weight.columns);
  const int64_t rows_per_piece = std::clamp<int64_t>(kUploadBytes / row_bytes, 1, weight.rows);
  auto piece = DeviceMemory::Allocate(static_cast<size_t>(rows_per_piece * row_bytes));
  Require(piece.status(), "device memory to unpack a weight");
  const int64_t row_scales = QuantScales(weight.type, weight.columns);
  const int64_t scale_bytes = row_scales * static_cast<int64_t>(sizeof(F16));
  DeviceMemory scales;  // of a piece, if they belong in the image
  if (is_grouped()) {
    auto memory = DeviceMemory::Allocate(static_cast<size_t>(rows_per_piece * scale_bytes));
    Require(memory.status(), "device memory to unpack scales");
    scales = *std::move(memory);
  }
  for (int64_t r = 0; r < weight.rows; r += rows_per_piece) {
    const int64_t rows = std::min(rows_per_piece, weight.rows - r);
    Require(cudaMemcpy(piece->data(), weight.values + r * row_bytes,
                       static_cast<size_t>(rows * row_bytes), cudaMemcpyHostToDevice));
    const internal::PackInt8Args args{.source = piece->as<int8_t>(),
                                      .image = LoadingImage(expert),
                                      .k_blocks = m.k_blocks,
                                      .in_features = m.in_features,
                                      .first_row = row_begin + static_cast<int>(r),
                                      .rows = static_cast<int>(rows),
                                      .gated = shape_.gated,
                                      .gate_half = half == Half::kGate};
    if (is_grouped()) {
      Require(cudaMemcpy(scales.data(), weight.scales + r * row_scales,
                         static_cast<size_t>(rows * scale_bytes), cudaMemcpyHostToDevice));
      internal::LaunchPackGrouped(args, weight.type == Quantization::kInt4, scales.as<F16>(),
                                  nullptr);
    } else if (is_int4()) {
      internal::LaunchPackInt4(args, nullptr);
    } else {
      internal::LaunchPackInt8(args, nullptr);
    }
    Require(cudaStreamSynchronize(nullptr));
  }
  if (is_grouped()) return;
  // A row of int4-k has two scales, d and u.
  std::vector<float> numbers(static_cast<size_t>(weight.rows));
  for (int64_t i = 0; i < row_scales; ++i) {
    for (int64_t r = 0; r < weight.rows; ++r) {
      numbers[r] = F32FromF16(weight.scales[r * row_scales + i]);
    }
    LoadVector(expert, half, row_begin, numbers, i == 0 ? scales_ : units_);
  }
}

void CudaLinearBank::LoadBias(int expert, Half half, int row_begin, const HostTensor& bias) {
  MOESERVE_CHECK(shape_.bias, "this bank was made without biases");
  const LinearBankEntry& m = EntryHere(expert);
  MOESERVE_CHECK(row_begin + bias.size() <= m.out_features, "bias does not fit its bank");
  if (bias.size() == 0) return;
  std::vector<float> values(static_cast<size_t>(bias.size()));
  for (int64_t i = 0; i < bias.size(); ++i) values[i] = ElementAsF32(bias, i);
  LoadVector(expert, half, row_begin, values, bias_);
}

void CudaLinearBank::LoadVector(int expert, Half half, int row_begin, std::span<const float> values,
                                const DeviceMemory& memory) {
  auto piece = DeviceMemory::Allocate(values.size_bytes());
  Require(piece.status(), "device memory to unpack a vector");
  Require(cudaMemcpy(piece->data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice));
  internal::LaunchPackVector(piece->as<float>(), static_cast<int>(values.size()), row_begin,
                             shape_.gated, half == Half::kGate,
                             memory.as<float>() + entries_[expert].bias, nullptr);
  Require(cudaStreamSynchronize(nullptr));
}

}  // namespace moeserve::cuda

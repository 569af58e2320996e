// A linear bank in the device's packed layout.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/linear/tile_counters.h"
#include "kernels/movable_experts.h"

namespace moeserve::cuda {

// A block of packed weights has 64 outputs and 64 inputs, or 128 inputs of integer types.
inline constexpr int kImageBlock = 64;
inline constexpr int kInt8BlockInputs = 128;
// A block of MXFP4 has 64 outputs and 64 inputs in four strips of 16 packed rows.
inline constexpr int kMxfp4StripRows = 16;
inline constexpr int kMxfp4StripBytes = 512 + 32;  // the numbers, then their scales
inline constexpr int kMxfp4BlockBytes = kImageBlock / kMxfp4StripRows * kMxfp4StripBytes;
// A block of FP8 has as many strips. Matrices have pairs of blocks, whose 128 inputs share scales.
inline constexpr int kFp8StripRows = 16;
inline constexpr int kFp8StripBytes = 1024 + 32;  // the numbers, then half of the pair's scales
inline constexpr int kFp8BlockBytes = kImageBlock / kFp8StripRows * kFp8StripBytes;

// The position of one expert's matrix, as offsets into the bank's arrays, and its size.
struct LinearBankEntry {
  int64_t weights;  // byte offset
  int64_t bias;     // offset in values
  int32_t row_blocks;
  int32_t k_blocks;
  int32_t in_features;
  int32_t out_features;  // number of outputs; if gated, the number of hidden units
  // k blocks per slice of a sum (see SliceBlocks()); k_blocks if the sum has a single slice.
  int32_t slice_blocks;
};

// Where the packed weights ("image") of an expert lie. The bits of products do not depend on it.
enum class BankMemory : uint8_t {
  kTogether,  // those of all experts in one allocation
  kSeparate,  // each in an allocation of its own, so that experts can move
  kHost,      // in host memory; products read a copy, which Place() names
};

// Images begin at multiples of this address, in bytes, where Place() names them.
inline constexpr int64_t kImageAlignment = 128;

// A copy of an expert's image in device memory.
struct PlacedImage {
  int expert = 0;
  const char* image = nullptr;  // null: the expert has none, and no rows may be given to it
};

// Returns, for every expert, the number of k blocks in a slice of its sums of bf16 products. A sum
// of several slices is ((s0 + s1) + s2) + ..., where each slice is a chain of products of its own,
// in ascending order of the inputs. All kernels for bf16 rows sum in this way, so blocks of a
// device can compute the slices of few outputs in parallel. Only the shape decides: a bank of
// several experts with many inputs and few outputs has slices of about 1,024 inputs; all others
// have one slice per sum.
std::vector<int> SliceBlocks(const LinearBankShape& shape);

// The packed weights of a matrix [N, K] ("image") are blocks of 64 packed rows x 64 inputs, in the
// order [row block][k block], each row-major. In row r of a block, the 16-byte piece c is stored at
// piece index c ^ (r % 8). So a block that is copied unchanged into shared memory is read without
// bank conflicts, and it has the 128-byte swizzle that the tensor cores read. In a gated bank, 8
// gate rows and 8 up rows alternate: a thread that has rows r and r + 8, or columns r and r + 8, of
// a product has both halves of a hidden unit. In each expert, N and K are rounded up to 64 with
// zeros; unequal widths of experts cost nothing beyond that.
//
// Weights of type int8-channel are stored as integers in two's complement, in blocks of 64 packed
// rows x 128 inputs, whose rows have 128 bytes and the same order of 16-byte pieces; K is rounded
// up to 128. Each packed row has a scale, widened to f32. Weights of type int4-k are 4-bit integers
// in blocks of as many inputs, whose layout linear_image.h describes; each packed row has a scale d
// and a unit u of its minima. linear_image.h describes int8 and int4, too; their scales are in the
// image.
//
// Weights of MXFP4 (LinearBankShape::mxfp4) are stored in blocks of 64 packed rows x 64 inputs,
// too, with 4 bits for a number and a byte for a scale (linear_image.h). Each lane of a warp finds
// its operands of mma.sync for 16 packed rows and 64 inputs in 16 adjacent bytes. A number is at
// most 12, because the product that widens it must not need a larger scale than bf16 has.
//
// Weights of FP8 (LinearBankShape::fp8) are stored in blocks of 64 packed rows x 64 inputs with a
// byte for a number; K is rounded up to 128. Each packed row has an f32 scale for 128 inputs. A
// lane finds its operands for 16 packed rows and 64 inputs in two times 16 adjacent bytes
// (linear_image.h).
//
// The weights of a dense bf16 bank can be stored as rows instead: row-major [N, K], or [2 N, K] if
// gated, with the rows of the gate after those of the up half. DenseLayers does so for its
// products.
//
// Experts that are absent (LinearBankShape::is_absent()) have entries of their sizes without
// memory, so that everything that is derived from a bank's sizes is equal on all ranks: slices of
// sums, kernels that fit, the signature.
//
// Kernels find an image at weights() + LinearBankEntry::weights, an offset that may be negative. So
// images may lie anywhere in device memory, and Place() lets them come and go. Only what reads the
// matrix of a dense layer without the table (RowMajor(), LaunchReadRows(), joined/, dense/) needs a
// bank of kTogether. Biases, scales and units are small: unless the images lie together, the bank
// has room for those of all experts of the layer, also of absent ones.
//
// One thread must fill the bank before the first product reads it.
class CudaLinearBank : public LinearBank, public MovableExperts {
 public:
  // A ResourceExhausted error states the size. Unimplemented for weights of types int8-channel and
  // int4-k with more than kWholeRow inputs.
  static Result<std::unique_ptr<CudaLinearBank>> Create(LinearBankShape shape,
                                                        BankMemory memory = BankMemory::kTogether);

  void LoadWeight(int expert, Half half, int row_begin, const HostTensor& weight) override;
  void LoadQuantized(int expert, Half half, int row_begin, const QuantizedMatrix& weight) override;
  void LoadBias(int expert, Half half, int row_begin, const HostTensor& bias) override;
  void LoadFp8(int expert, Half half, int row_begin, const Fp8Matrix& weight) override;

  // Says where images lie from here on in the order of `stream`: products that were launched before
  // read the earlier ones. For experts of the layer that are absent, too. The caller keeps the
  // memory until such products have ended. Calls for one bank must be in order. The host waits for
  // the copy of the table by the last call, if it is not yet done.
  Status Place(std::span<const PlacedImage> images, cudaStream_t stream);
  // Returns whether products may read the expert: its image is in device memory.
  bool is_placed(int expert) const { return placed_[static_cast<size_t>(expert)]; }
  // Returns the bytes of the image of any expert of the layer.
  int64_t ImageBytes(int expert) const;
  // Copies an expert's biases, scales and units from a bank of the same layer, in the order of
  // `stream`. This bank's images do not lie together. No product may read those of the expert that
  // are replaced, and `from` must outlive the copy.
  Status CopyVectors(const CudaLinearBank& from, int expert, cudaStream_t stream);

  // kSeparate: the stream in whose order experts come and go; it outlives the bank. Without it,
  // they stay.
  void MoveOn(cudaStream_t stream) { move_stream_ = stream; }
  // MovableExperts. A bank that experts are taken from must outlive the work of the stream.
  bool CanTake() const override {
    return memory_ == BankMemory::kSeparate && move_stream_ != nullptr;
  }
  bool TakesFrom(const LinearBank& other) const override;
  void TakeExperts(const LinearBank& other) override;
  std::shared_ptr<const void> DropExpert(int expert) override;

  // kHost: to be called when all weights are loaded.
  void FinishLoading();
  // kHost: returns the image of an expert, after FinishLoading(). Page-locked if the system allows
  // it.
  std::span<const char> host_image(int expert) const;
  BankMemory memory() const { return memory_; }

  // Returns the rows of a dense bf16 bank that stores an image. Waits for the device.
  // ResourceExhausted if memory runs out.
  Result<DeviceMemory> RowMajor(cudaStream_t stream) const;
  // Replaces the image by the result of RowMajor(). No work on the device may still read the image.
  // The weights do not change, so this is permitted for banks that are otherwise immutable.
  void ReplaceImage(DeviceMemory rows) const;
  bool row_major() const { return row_major_; }
  // Returns the shape with the sizes of all experts, also of absent ones; shape() has 0 for these.
  const LinearBankShape& layer_shape() const { return layer_shape_; }
  // Whether experts are absent, or may become so.
  bool may_lack_experts() const { return !shape_.layer_out_features.empty(); }
  bool is_mxfp4() const { return shape_.mxfp4; }
  bool is_fp8() const { return shape_.fp8; }
  bool holds_weights() const override { return holds_weights_; }
  bool is_int8() const { return shape_.quantization == Quantization::kInt8Channel; }
  bool is_int4() const { return shape_.quantization == Quantization::kInt4K; }
  // int8 or int4, whose scales belong to groups of inputs.
  bool is_grouped() const {
    return shape_.quantization == Quantization::kInt8 || shape_.quantization == Quantization::kInt4;
  }
  bool has_integers() const { return shape_.quantization != Quantization::kNone; }

  // The following pointers are in device memory. weights(): the base of LinearBankEntry::weights.
  const char* weights() const { return (weights_.bytes() > 0 ? weights_ : table_).as<char>(); }
  const float* bias() const { return shape_.bias ? bias_.as<float>() : nullptr; }
  // int8-channel, int4-k: the scales of the packed rows, each at the offset of its bias; otherwise
  // null.
  const float* scales() const { return is_int8() || is_int4() ? scales_.as<float>() : nullptr; }
  // int4-k: the units of the minima of the packed rows, as `scales`; otherwise null.
  const float* units() const { return is_int4() ? units_.as<float>() : nullptr; }
  const LinearBankEntry* entries() const { return table_.as<LinearBankEntry>(); }
  // [E] experts in descending order of the size of their matrices, so that the longest work starts
  // first.
  const int32_t* order() const { return order_.as<int32_t>(); }

  // Describes the shape, with a hash of all sizes. Banks with equal signatures have equal shapes
  // and weights of the same type.
  const std::string& signature() const { return signature_; }
  const TileCounters& tile_counters() const { return tile_counters_; }

  const LinearBankEntry& entry(int expert) const { return entries_[expert]; }
  // Returns the total number of row blocks of the n experts that have the most row blocks.
  int64_t largest_row_blocks(int64_t n) const { return largest_row_blocks_[n]; }
  int max_row_blocks() const { return max_row_blocks_; }
  // Returns the largest number of slices of a sum.
  int max_slices() const { return max_slices_; }
  // Returns the largest number of k blocks of a matrix.
  int max_k_blocks() const { return max_k_blocks_; }
  // Returns the size of all device memory of the bank.
  int64_t bytes() const { return bytes_; }

 private:
  CudaLinearBank(LinearBankShape shape, BankMemory memory)
      : LinearBank(std::move(shape)), memory_(memory), layer_shape_(shape_.layer()) {}
  // Fills the entries; returns the numbers of values of the biases.
  int64_t Describe();
  // Sorts the experts by size; returns `order()`.
  std::vector<int32_t> SortBySize();
  Status Allocate(int64_t bias_values);
  Status AllocateImages();
  // Returns where to store the weights of an expert.
  char* LoadingImage(int expert);
  // kHost: copies the image that was loaded last to the host.
  void CloseImage();
  // Returns the entry of an expert that is here.
  const LinearBankEntry& EntryHere(int expert) const;
  // Rounds the rows of a weight to integers and loads them.
  void LoadRounded(int expert, Half half, int row_begin, const HostTensor& weight);
  // Stores rows [first_row, first_row + rows) of a half from device memory; updates
  // holds_weights_.
  void PackMxfp4(int expert, Half half, int first_row, int rows, const DeviceMemory& source,
                 DType dtype);
  // Loads one number for each of `values` rows of a half into `memory`, which has a number for each
  // packed row.
  void LoadVector(int expert, Half half, int row_begin, std::span<const float> values,
                  const DeviceMemory& memory);

  const BankMemory memory_;
  const LinearBankShape layer_shape_;
  std::string signature_;
  std::vector<LinearBankEntry> entries_;
  std::vector<int64_t> largest_row_blocks_;  // [E + 1] prefix sums, experts with the most row
                                             // blocks first
  int max_row_blocks_ = 0;
  int max_slices_ = 1;
  int max_k_blocks_ = 0;
  int64_t bytes_ = 0;
  mutable DeviceMemory weights_;  // kTogether; else empty
  // kSeparate: [E], null without one; else empty. The bank that an expert was taken from has the
  // same image.
  std::vector<std::shared_ptr<const DeviceMemory>> images_;
  cudaStream_t move_stream_ = nullptr;
  std::vector<bool> placed_;  // [E]
  PinnedMemory table_copy_;   // of the last Place()
  Event table_copied_;
  // kHost: the images, in page-locked memory or else in other memory.
  PinnedMemory pinned_;
  std::unique_ptr<char[]> pageable_;
  std::vector<int64_t> host_offsets_;  // [E]
  int loading_ = -1;                   // the expert whose image is in `loaded_image_`
  DeviceMemory loaded_image_;
  mutable bool row_major_ = false;
  bool holds_weights_ = true;
  DeviceMemory bias_;
  DeviceMemory scales_;
  DeviceMemory units_;
  DeviceMemory table_;
  DeviceMemory order_;
  TileCounters tile_counters_;
};

// Computes output[i] = scale * row ids[i] of the only matrix of `bank`, which is neither gated nor
// of integers, widened to f32. `ids` is in device memory; a negative id, which marks a padding row,
// reads row 0. `output` is f32 [rows, in_features].
void LaunchReadRows(const CudaLinearBank& bank, const int32_t* ids, int rows, float scale,
                    const RowsView& output, cudaStream_t stream);

namespace internal {

struct PackRowsArgs {
  const void* source = nullptr;  // device memory, [rows, in_features] of `source_dtype`
  DType source_dtype = DType::kF32;
  char* image = nullptr;  // packed weights of the whole matrix
  DType image_dtype = DType::kF32;
  int k_blocks = 0;
  int in_features = 0;
  int first_row = 0;  // row within the gate or up half
  int rows = 0;
  bool gated = false;
  bool gate_half = false;
};

void LaunchPackRows(const PackRowsArgs& args, cudaStream_t stream);

struct PackMxfp4Args {
  const void* source = nullptr;  // device memory, [rows, in_features] of `source_dtype`
  DType source_dtype = DType::kF32;
  char* image = nullptr;  // packed weights of the whole matrix, zeros where `rows` are stored
  int k_blocks = 0;
  int in_features = 0;
  int first_row = 0;  // row within the gate or up half
  int rows = 0;
  bool gated = false;
  bool gate_half = false;
  int32_t* misfit = nullptr;  // device memory, set to 1 if a number cannot be stored
};

void LaunchPackMxfp4(const PackMxfp4Args& args, cudaStream_t stream);

struct PackFp8Args {
  const uint8_t* source = nullptr;  // device memory, [rows, in_features]
  const float* scales = nullptr;    // device memory, [rows, groups of 128 inputs]
  char* image = nullptr;  // packed weights of the whole matrix, zeros where `rows` are stored
  int k_blocks = 0;
  int in_features = 0;
  int first_row = 0;  // row within the gate or up half
  int rows = 0;
  bool gated = false;
  bool gate_half = false;
  int32_t* misfit = nullptr;  // device memory, set to 1 if a number is NaN
};

void LaunchPackFp8(const PackFp8Args& args, cudaStream_t stream);

struct PackInt8Args {
  const int8_t* source = nullptr;  // device memory, [rows, in_features] if int8
  char* image = nullptr;           // packed weights of the whole matrix
  int k_blocks = 0;
  int in_features = 0;
  int first_row = 0;  // row within the gate or up half
  int rows = 0;
  bool gated = false;
  bool gate_half = false;
};

void LaunchPackInt8(const PackInt8Args& args, cudaStream_t stream);

// Packs rows of int4-k. `source` is [rows, QuantRowBytes], in the format of
// QuantizedMatrix::values.
void LaunchPackInt4(const PackInt8Args& args, cudaStream_t stream);

// Packs rows of int4 or int8, in the same format; `scales` in device memory is [rows, groups], f16.
void LaunchPackGrouped(const PackInt8Args& args, bool int4, const F16* scales, cudaStream_t stream);

// Copies the image of a dense bf16 bank to `rows`, row-major without padding.
void LaunchUnpackRows(const CudaLinearBank& bank, char* rows, cudaStream_t stream);

// Stores packed[packed row of (first_row + i)] = values[i]; both arrays are in device memory.
void LaunchPackVector(const float* values, int count, int first_row, bool gated, bool gate_half,
                      float* packed, cudaStream_t stream);

}  // namespace internal
}  // namespace moeserve::cuda

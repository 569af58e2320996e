// Products with weights of type int8-channel: the input rows are rounded to int8 (W8A8).
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/linear/linear.h"

namespace moeserve::cuda {

// Device memory for the rounded input rows of one product at a time.
class Int8Rows {
 public:
  // Returns whether the memory is too small for the input rows of `args`.
  bool MustGrow(const LinearArgs& args) const;
  // Grows the memory to the size that `args` needs. No work on the device may still use it.
  // ResourceExhausted if memory runs out.
  absl::Status Reserve(const LinearArgs& args);

  // [rows of all segments, bytes of a row]: integers, then zeros up to whole blocks of inputs. If
  // the weights are int4-k, before them the sums of each 32 integers, in 128 bytes for each 1,024
  // inputs and with zeros up to whole blocks: a sum is 16 (a + b) + c, and the block has 32 a, then
  // the b, then the c, then 32 zeros. If the weights are int8 or int4: for each block of inputs,
  // 128 integers and room for four f32 scales, those of its groups (linear_image.h).
  int8_t* values() const { return values_.as<int8_t>(); }
  // [rows of all segments]; not used for int8 and int4.
  float* scales() const { return scales_.as<float>(); }

 private:
  DeviceMemory values_;
  DeviceMemory scales_;
};

// Returns the bytes from a rounded row to the next one.
int64_t Int8RowBytes(const LinearArgs& args);

// Rounds the input rows of `args` as far as the matrices read them: with a plan and without gather,
// row a as far as the matrix of its expert does; with segments, each segment by itself, those of a
// segment after those of the segment before it. Otherwise all matrices must have equally many
// inputs. The integers and scales have the bits of RoundRowToInt8() (kernels/base/int8_rows.h), for
// each group of inputs if the weights are int8 or int4.
// When the next kernel of the stream starts, all kernels before this one have ended.
void LaunchRoundRows(const LinearArgs& args, const Int8Rows& rows, cudaStream_t stream);

// Computes the product documented at LinearArgs with device pointers; args.bank must be a
// CudaLinearBank of type int8-channel, and args.input may be f32 or bf16. Rounds the input rows
// into `rows`, which must be large enough, or in the kernel; the next product may use the same
// memory. Sums are exact, so all tiles compute the same bits; without an activation, f32 results
// have the bits of the CPU backend. `tile` is one of Int8TilesThatFit() or kAuto, or another one,
// in whose place one that fits is used: kRows8 instead of kStream8*, kRows32 instead of other
// streams, kRows128 instead of kWarpgroup*.
void LaunchLinearInt8(const LinearArgs& args, LinearTile tile, const Int8Rows& rows,
                      cudaStream_t stream, TileOrder order = TileOrder::kAuto);

// Returns the tiles that compute the product on the current device: kRows*; kStream8x16 and
// kStream8x64, which round rows in the kernel, unless rows are too long; kStream32x64; and
// kWarpgroup128, 192, 256 and 192x192, unless results with an activation are f32 or not 16-byte
// aligned. They are all kWarpgroup128 with rare activations.
std::vector<LinearTile> Int8TilesThatFit(const LinearArgs& args);
// Returns the tile that kAuto stands for.
LinearTile DefaultInt8Tile(const LinearArgs& args);

}  // namespace moeserve::cuda

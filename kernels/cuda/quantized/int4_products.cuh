// Sums of products of rows rounded to int8 with weights of type int4-k, by mma.sync. An element of
// the weights is d (s q - u m). The sum of s q x - u m x over a row's inputs is an exact integer:
// - Of each 32 inputs, m multiplies the sum of x. These sums have parts of one byte (StoreSum() in
//   quantized/round_rows.cu), so 1,024 inputs take three instructions of m16n8k32. Their blocks
//   come first; then the sums of the tile are multiplied by -u.
// - The 4-bit integers q of 32 inputs are unpacked into bytes in registers and multiplied by their
//   factor s, four at a time: s q is at most 225, so nothing is carried from one byte to the next.
#pragma once

#include <algorithm>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_image.h"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {

inline constexpr int kInt4RowBytes = 128;  // of an input row in a stage
inline constexpr uint32_t kLowNibbles = 0x0f0f0f0fu, kHighNibbles = 0xf0f0f0f0u;

// The dimensions of a tile, as those of MmaShape (linear/linear_mma.cuh).
template <int kTileRowsArg, int kWarpsAcrossArg, int kWarpsDownArg, int kMTilesArg, int kStagesArg,
          int kBlocksPerMultiprocessorArg>
struct Int4Shape {
  using Sums = int32_t[kMTilesArg][kTileRowsArg / kWarpsDownArg / 8][4];  // of a thread
  static constexpr int kTileRows = kTileRowsArg;
  static constexpr int kWarpsAcross = kWarpsAcrossArg;
  static constexpr int kWarpsDown = kWarpsDownArg;
  static constexpr int kMTiles = kMTilesArg;
  static constexpr int kNTiles = kTileRows / kWarpsDown / 8;
  static constexpr int kStages = kStagesArg;
  static constexpr int kBlocksPerMultiprocessor = kBlocksPerMultiprocessorArg;
  static constexpr int kImageTiles = kWarpsAcross * kMTiles;  // of 16 packed rows
  static constexpr int kTileImageRows = kImageTiles * kInt4TileRows;
  static constexpr int kThreads = kWarpsAcross * kWarpsDown * 32;
  // A stage has the rows, then the weights of a block.
  static constexpr int kStageRowBytes = kTileRows * kInt4RowBytes;
  static constexpr int kStageBytes = kStageRowBytes + kImageTiles * kInt4TileBytes;
  static constexpr int kPitch = kTileImageRows + 4;  // floats per row of the staged results
  static constexpr int kSharedBytes = std::max(kStages * kStageBytes, kTileRows* kPitch * 4);
  static constexpr int kRowPieces = (kTileRows * 8 + kThreads - 1) / kThreads;
  static constexpr int kStrips = kTileImageRows > kImageBlock ? 2 : 1;
  static_assert(kThreads % 8 == 0);
};

// One thread's part of the copies into the stages, which are blocks of factors m, then blocks of
// integers.
template <typename S>
class Int4StageLoader {
 public:
  __device__ Int4StageLoader(const LinearParams& p, const LinearBankEntry& m,
                             const LinearTileRange& tile)
      : input_(p.input) {
    const int thread = static_cast<int>(threadIdx.x);
    const int block = tile.image_row / kImageBlock + thread / kOfStrip;
    // If a tile of two blocks has no second block, it loads the first one again and drops the
    // results.
    const int present = block < m.row_blocks ? block : block - 1;
    const int first_tile = tile.image_row % kImageBlock / kInt4TileRows;
    weights_ = p.weights + m.weights + present * Int4StripBytes(m.k_blocks) +
               first_tile * kInt4MinimaTileBytes + thread % kOfStrip * 16;
    to_values_ = first_tile * (kInt4TileBytes - kInt4MinimaTileBytes);
    // The last group of 8 rows (n8) is read completely. The results of rows beyond the last one are
    // dropped, so their content does not matter.
    row_pieces_ = ((tile.rows + 7) / 8 * 8 - thread / 8 + S::kThreads / 8 - 1) / (S::kThreads / 8);
#pragma unroll
    for (int i = 0; i < S::kRowPieces; ++i) {
      const int r = min(thread / 8 + i * (S::kThreads / 8), tile.rows - 1);
      const char* const piece = LinearInputRow(p, tile, tile.row + r) + thread % 8 * 16;
      rows_[i] = static_cast<uint32_t>((piece - p.input) / 16);
    }
  }

  // Copies the next block of weights into `stage`.
  __device__ void LoadMinima(char* stage) {
    LoadTiles<kInt4MinimaTileBytes, kInt4MinimaBlockBytes>(stage);
  }
  __device__ void LoadIntegers(char* stage) { LoadTiles<kInt4TileBytes, kInt4BlockBytes>(stage); }
  // Must be called between the last block of factors and the first one of integers.
  __device__ void EndMinima() {
    if constexpr (S::kTileImageRows < kImageBlock) weights_ += to_values_;
  }

  // Copies the next block of the rows into `stage`.
  __device__ void LoadRows(char* stage) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < S::kRowPieces; ++i) {
      if (i < row_pieces_) {
        const int r = thread / 8 + i * (S::kThreads / 8);
        CopyAsync16(stage + r * kInt4RowBytes + (thread % 8 ^ (r & 7)) * 16,
                    input_ + int64_t{rows_[i]} * 16);
      }
      rows_[i] += kInt4RowBytes / 16;
    }
  }

 private:
  template <int kTileBytes, int kBlockBytes>
  __device__ void LoadTiles(char* stage) {
    constexpr int kPieces = S::kImageTiles * kTileBytes / 16 / S::kStrips;  // of a strip
    const int thread = static_cast<int>(threadIdx.x), first = thread % kOfStrip;
    char* const to =
        stage + S::kStageRowBytes + thread / kOfStrip * kPieces * 16 + thread % kOfStrip * 16;
#pragma unroll
    for (int i = 0; i < (kPieces + kOfStrip - 1) / kOfStrip; ++i) {
      if ((i + 1) * kOfStrip > kPieces && first + i * kOfStrip >= kPieces) continue;
      CopyAsync16(to + i * kOfStrip * 16, weights_ + i * kOfStrip * 16);
    }
    weights_ += kBlockBytes;
  }

  static constexpr int kOfStrip = S::kThreads / S::kStrips;  // threads that copy one strip
  const char* weights_;
  const char* input_;
  uint32_t rows_[S::kRowPieces];  // offsets in 16 bytes; pointers would take twice the registers
  int to_values_;
  int row_pieces_;  // number of rows_ of this thread that are loaded, from the first on
};

// Adds the products of a warp's weights `a` with 32 inputs of its rows, from the 16-byte piece
// 2 * k32 on.
template <typename S>
__device__ __forceinline__ void AddInt4Products(const char* rows, int k32, int valid_n_tiles,
                                                const uint32_t (&a)[S::kMTiles][4],
                                                typename S::Sums& sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int pair = 0; pair < S::kNTiles / 2; ++pair) {
    if (pair * 2 >= valid_n_tiles) break;
    const int row = pair * 16 + lane % 8 + lane / 16 * 8;
    const int piece = (k32 * 2 + lane / 8 % 2) ^ (row & 7);
    uint32_t both[4];
    LoadMatrix4(both, rows + row * kInt4RowBytes + piece * 16);
    const uint32_t first[2] = {both[0], both[1]};
    const uint32_t second[2] = {both[2], both[3]};
#pragma unroll
    for (int mt = 0; mt < S::kMTiles; ++mt) {
      MmaInt8<true>(sums[mt][pair * 2], a[mt], first);
      MmaInt8<true>(sums[mt][pair * 2 + 1], a[mt], second);
    }
  }
}

// Loads the operands of 8 rows for two instructions: 64 inputs from the 16-byte piece 4 * k64 on.
__device__ __forceinline__ void LoadEightRows(const char* rows, int k64, uint32_t (&b)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = lane % 8;
  LoadMatrix4(b, rows + row * kInt4RowBytes + ((k64 * 4 + lane / 8) ^ row) * 16);
}

// The part of a stage that a warp reads.
template <typename S>
struct Int4WarpStage {
  const char* rows;
  const char* weights;

  __device__ Int4WarpStage(const char* stage, int tile_bytes) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    rows = stage + warp / S::kWarpsAcross * S::kNTiles * 8 * kInt4RowBytes;
    weights = stage + S::kStageRowBytes + warp % S::kWarpsAcross * S::kMTiles * tile_bytes;
  }
};

// Adds the products of a block of factors m with the sums of 1,024 inputs.
template <typename S>
__device__ __forceinline__ void MultiplyMinima(const char* stage, int valid_n_tiles,
                                               typename S::Sums& sums) {
  const Int4WarpStage<S> own(stage, kInt4MinimaTileBytes);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t high[S::kMTiles][4], low[S::kMTiles][4];  // 16 m, which is at most 240, and m
#pragma unroll
  for (int mt = 0; mt < S::kMTiles; ++mt) {
    const uint2 packed =
        *reinterpret_cast<const uint2*>(own.weights + mt * kInt4MinimaTileBytes + lane * 8);
    low[mt][0] = packed.x & kLowNibbles;
    low[mt][1] = packed.y & kLowNibbles;
    low[mt][2] = packed.x >> 4 & kLowNibbles;
    low[mt][3] = packed.y >> 4 & kLowNibbles;
    high[mt][0] = packed.x << 4 & kHighNibbles;
    high[mt][1] = packed.y << 4 & kHighNibbles;
    high[mt][2] = packed.x & kHighNibbles;
    high[mt][3] = packed.y & kHighNibbles;
  }
  if constexpr (S::kNTiles == 1) {
    static_assert(S::kMTiles == 1);
    uint32_t b[2][4];
    LoadEightRows(own.rows, 0, b[0]);
    LoadEightRows(own.rows, 1, b[1]);
    MmaInt8<true>(sums[0][0], high[0], {b[0][0], b[0][1]});
    MmaInt8<true>(sums[0][0], high[0], {b[0][2], b[0][3]});
    MmaInt8<true>(sums[0][0], low[0], {b[1][0], b[1][1]});
  } else {
    AddInt4Products<S>(own.rows, 0, valid_n_tiles, high, sums);
    AddInt4Products<S>(own.rows, 1, valid_n_tiles, high, sums);
    AddInt4Products<S>(own.rows, 2, valid_n_tiles, low, sums);
  }
}

// A lane's weights of 16 packed rows and 64 inputs.
__device__ __forceinline__ uint4 LoadInt4Weights(const char* tile, int k64) {
  return reinterpret_cast<const uint4*>(tile)[k64 * 32 + static_cast<int>(threadIdx.x) % 32];
}

// A lane's factors s of rows r and r + 8 and of 128 inputs.
struct Int4Factors {
  uint32_t even, odd;  // of groups 0 and 2, and of 1 and 3; those of row r are in the lower half

  __device__ __forceinline__ void Load(const char* tile) {
    const int row = static_cast<int>(threadIdx.x) % 32 / 4;
    const uint32_t factors = reinterpret_cast<const uint32_t*>(tile + 1024)[row];
    even = factors & kLowNibbles;
    odd = factors >> 4 & kLowNibbles;
  }

  // Returns the operand of 32 inputs, k32 = 0..3; `weights` are those of 64 inputs.
  __device__ __forceinline__ void Unpack(const uint4& weights, int k32, uint32_t (&a)[4]) const {
    const uint32_t first = k32 % 2 == 0 ? weights.x : weights.z;
    const uint32_t second = k32 % 2 == 0 ? weights.y : weights.w;
    const uint32_t factors = k32 % 2 == 0 ? even : odd;
    const uint32_t of_first = __byte_perm(factors, 0, 0x4440u + k32 / 2);
    const uint32_t of_second = __byte_perm(factors, 0, 0x4442u + k32 / 2);
    a[0] = (first & kLowNibbles) * of_first;
    a[1] = (second & kLowNibbles) * of_second;
    a[2] = (first >> 4 & kLowNibbles) * of_first;
    a[3] = (second >> 4 & kLowNibbles) * of_second;
  }
};

// Adds the products of a block of integers.
template <typename S>
__device__ __forceinline__ void MultiplyIntegers(const char* stage, int valid_n_tiles,
                                                 typename S::Sums& sums) {
  const Int4WarpStage<S> own(stage, kInt4TileBytes);
  constexpr int kSteps = kInt8BlockInputs / 32;
  Int4Factors factors[S::kMTiles];
#pragma unroll
  for (int mt = 0; mt < S::kMTiles; ++mt) factors[mt].Load(own.weights + mt * kInt4TileBytes);
  if constexpr (S::kNTiles == 1) {
    // With a single chain of products, all operands are loaded first, so that the chain waits for
    // shared memory only once.
    const uint4 weights[2] = {LoadInt4Weights(own.weights, 0), LoadInt4Weights(own.weights, 1)};
    uint32_t b[2][4];
    LoadEightRows(own.rows, 0, b[0]);
    LoadEightRows(own.rows, 1, b[1]);
#pragma unroll
    for (int k32 = 0; k32 < kSteps; ++k32) {
      uint32_t a[4];
      factors[0].Unpack(weights[k32 / 2], k32, a);
      const uint32_t(&half)[4] = b[k32 / 2];
      MmaInt8<true>(sums[0][0], a, {half[k32 % 2 * 2], half[k32 % 2 * 2 + 1]});
    }
  } else {
#pragma unroll
    for (int k64 = 0; k64 < 2; ++k64) {
      uint4 weights[S::kMTiles];
#pragma unroll
      for (int mt = 0; mt < S::kMTiles; ++mt) {
        weights[mt] = LoadInt4Weights(own.weights + mt * kInt4TileBytes, k64);
      }
#pragma unroll
      for (int k32 = k64 * 2; k32 < k64 * 2 + 2; ++k32) {
        uint32_t a[S::kMTiles][4];
#pragma unroll
        for (int mt = 0; mt < S::kMTiles; ++mt) factors[mt].Unpack(weights[mt], k32, a[mt]);
        AddInt4Products<S>(own.rows, k32, valid_n_tiles, a, sums);
      }
    }
  }
}

// Multiplies the sums by minus the units of their packed rows; `units` are those of the tile.
template <typename S>
__device__ __forceinline__ void ScaleMinima(const int32_t* units, typename S::Sums& sums) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int mt = 0; mt < S::kMTiles; ++mt) {
    const int column =
        (thread / 32 % S::kWarpsAcross * S::kMTiles + mt) * kInt4TileRows + thread % 32 / 4;
    const int32_t factor[2] = {-units[column], -units[column + 8]};
#pragma unroll
    for (int nt = 0; nt < S::kNTiles; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[mt][nt][i] *= factor[i / 2];
    }
  }
}

// Sums the products of a tile; `shared` has S::kStages stages. Calls start(), which must store the
// units of the tile's packed rows in `units` in shared memory, as soon as results of earlier
// kernels may be read. Afterwards no thread reads `shared`.
template <typename S, typename Start>
__device__ __forceinline__ void SumInt4Products(const LinearParams& p, const LinearBankEntry& m,
                                                const LinearTileRange& tile, char* shared,
                                                const int32_t* units, typename S::Sums& sums,
                                                const Start& start) {
  Int4StageLoader<S> loader(p, m, tile);
  const int minima = Int4MinimaBlocks(m.k_blocks), blocks = minima + m.k_blocks;
  const auto load_weights = [&](int block, char* stage) {
    if (block < minima) {
      loader.LoadMinima(stage);
      if (block + 1 == minima) loader.EndMinima();
    } else {
      loader.LoadIntegers(stage);
    }
  };
#pragma unroll 1
  for (int s = 0; s < min(S::kStages - 1, blocks); ++s) {
    load_weights(s, shared + s * S::kStageBytes);
  }
  // The copies of weights were started before this wait, because weights do not depend on earlier
  // kernels.
  GridDependencyPass();
  start();
#pragma unroll 1
  for (int s = 0; s < S::kStages - 1; ++s) {
    if (s < blocks) loader.LoadRows(shared + s * S::kStageBytes);
    CopyAsyncCommit();
  }
  const int down = static_cast<int>(threadIdx.x) / 32 / S::kWarpsAcross;
  const int valid_n_tiles = (tile.rows - down * S::kNTiles * 8 + 7) / 8;
  constexpr int kLastStage = (S::kStages - 1) * S::kStageBytes;
  int stage = 0;  // offset in bytes
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    CopyAsyncWait<S::kStages - 2>();
    __syncthreads();  // afterwards all copies for this stage are visible, and no thread reads the
                      // stage before it
    const int next = block + S::kStages - 1;
    if (next < blocks) {
      char* const slot = shared + (stage == 0 ? kLastStage : stage - S::kStageBytes);
      load_weights(next, slot);
      loader.LoadRows(slot);
    }
    CopyAsyncCommit();
    const char* const own = shared + stage;
    if (block < minima) {
      MultiplyMinima<S>(own, valid_n_tiles, sums);
      if (block + 1 == minima) ScaleMinima<S>(units, sums);
    } else {
      MultiplyIntegers<S>(own, valid_n_tiles, sums);
    }
    stage = stage == kLastStage ? 0 : stage + S::kStageBytes;
  }
  CopyAsyncWait<0>();
  __syncthreads();
}

}  // namespace moeserve::cuda

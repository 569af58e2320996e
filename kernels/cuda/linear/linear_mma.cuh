// What the kernels with mma.sync share: the dimensions of a tile, the copies of its operands into
// shared memory, and the products. The weights are the m16 operand and the rows are the n8 operand,
// so a few rows waste little, and every 16-byte piece of weights is loaded once per row tile.
#pragma once

#include <algorithm>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {

inline constexpr int kMmaRowBytes = 128;  // of a row in a block: 64 bf16 or 128 int8 inputs
inline constexpr int kMmaBlockBytes = kImageBlock * kMmaRowBytes;

// The types of the operands. The fragments of 32 bytes of inputs are loaded alike for both.
struct Bf16Operands {
  using Sum = float;
  // Returns the bytes that an input row of a matrix has.
  __device__ static int RowBytes(const LinearBankEntry& m) { return m.in_features * 2; }
  __device__ static void Multiply(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    MmaBf16(sum, a, b);
  }
};
struct Int8Operands {
  using Sum = int32_t;
  __device__ static int RowBytes(const LinearBankEntry& m) { return m.k_blocks * kMmaRowBytes; }
  __device__ static void Multiply(int32_t (&sum)[4], const uint32_t (&a)[4],
                                  const uint32_t (&b)[2]) {
    MmaInt8(sum, a, b);
  }
};

// The dimensions of a tile: a block computes kTileRows rows x kTileImageRows outputs. Its warps
// form a grid of kWarpsAcross (outputs) x kWarpsDown (rows); each warp computes kMTiles x kNTiles
// instructions of m16n8.
template <typename OperandsArg, int kTileRowsArg, int kWarpsAcrossArg, int kWarpsDownArg,
          int kMTilesArg, int kStagesArg, int kBlocksPerMultiprocessorArg>
struct MmaShape {
  using Operands = OperandsArg;
  using Sums =
      typename Operands::Sum[kMTilesArg][kTileRowsArg / kWarpsDownArg / 8][4];  // of a thread
  static constexpr int kTileRows = kTileRowsArg;
  static constexpr int kWarpsAcross = kWarpsAcrossArg;
  static constexpr int kWarpsDown = kWarpsDownArg;
  static constexpr int kMTiles = kMTilesArg;
  static constexpr int kNTiles = kTileRows / kWarpsDown / 8;
  static constexpr int kStages = kStagesArg;
  static constexpr int kBlocksPerMultiprocessor = kBlocksPerMultiprocessorArg;
  static constexpr int kTileImageRows = kWarpsAcross * kMTiles * 16;
  static constexpr int kThreads = kWarpsAcross * kWarpsDown * 32;
  static constexpr int kStageBytes = (kTileImageRows + kTileRows) * kMmaRowBytes;
  static constexpr int kPitch = kTileImageRows + 4;  // floats per row of the staged results
  static constexpr int kStagedBytes = kTileRows * kPitch * 4;
  static constexpr int kSharedBytes = std::max(kStages * kStageBytes, kStagedBytes);
  static constexpr int kWeightPieces = kTileImageRows * 8 / kThreads;  // per thread and stage
  static constexpr int kRowPieces = (kTileRows * 8 + kThreads - 1) / kThreads;
  static_assert(kTileImageRows * 8 % kThreads == 0);
  static_assert(kThreads % 8 == 0);
};

// One thread's part of the copies into the stages. Each call copies one block of inputs. The
// 16-byte pieces of a thread are kThreads / 8 rows apart.
template <typename S>
class StageLoader {
 public:
  __device__ StageLoader(const LinearParams& p, const LinearBankEntry& m,
                         const LinearTileRange& tile)
      : input_(p.input) {
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t strip = static_cast<int64_t>(m.k_blocks) * kMmaBlockBytes;
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      const int block = tile.image_row / kImageBlock + i;
      // If a tile of two blocks has no second block, it loads the first one again and drops the
      // results.
      const int present = block < m.row_blocks ? block : block - 1;
      weights_[i] = p.weights + m.weights + present * strip +
                    tile.image_row % kImageBlock * kMmaRowBytes + thread * 16;
    }
    const int piece = thread % 8;
    bytes_left_ = S::Operands::RowBytes(m) - piece * 16;
    // The last group of 8 rows (n8) is read completely. The results of rows beyond the last one are
    // dropped, so their content does not matter.
    row_pieces_ = ((tile.rows + 7) / 8 * 8 - thread / 8 + S::kThreads / 8 - 1) / (S::kThreads / 8);
#pragma unroll
    for (int i = 0; i < S::kRowPieces; ++i) {
      const int r = min(thread / 8 + i * (S::kThreads / 8), tile.rows - 1);
      rows_[i] = LinearInputRow(p, tile, tile.row + r) + piece * 16;
    }
  }

  // Copies the next block of weights into `stage`.
  __device__ void LoadWeights(char* stage) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < S::kWeightPieces; ++i) {
      const int at = (thread + i * S::kThreads) * 16;
      const int in_strip = i * S::kThreads * 16 % kMmaBlockBytes;
      CopyAsync16(stage + at, weights_[i * S::kThreads * 16 / kMmaBlockBytes] + in_strip);
    }
#pragma unroll
    for (int i = 0; i < kStrips; ++i) weights_[i] += kMmaBlockBytes;
  }

  // Copies the next block of the rows into `stage`.
  template <bool kWide>
  __device__ void LoadRows(char* stage) {
    const int thread = static_cast<int>(threadIdx.x);
    char* rows = stage + S::kTileImageRows * kMmaRowBytes;
    const int valid = min(16, max(0, bytes_left_));
#pragma unroll
    for (int i = 0; i < S::kRowPieces; ++i) {
      if (i < row_pieces_) {
        const int r = thread / 8 + i * (S::kThreads / 8);
        char* to = rows + r * kMmaRowBytes + ((thread % 8 ^ (r & 7)) * 16);
        if constexpr (kWide) {
          CopyAsync16(to, valid > 0 ? rows_[i] : input_, valid);
        } else {
          const uint16_t* from = reinterpret_cast<const uint16_t*>(rows_[i]);
          uint16_t* piece = reinterpret_cast<uint16_t*>(to);
#pragma unroll
          for (int j = 0; j < 8; ++j) piece[j] = j * 2 < valid ? from[j] : uint16_t{0};
        }
      }
      rows_[i] += kMmaRowBytes;
    }
    bytes_left_ -= kMmaRowBytes;
  }

 private:
  static constexpr int kStrips = S::kTileImageRows > kImageBlock ? 2 : 1;
  const char* weights_[kStrips];
  const char* rows_[S::kRowPieces];
  const char* input_;  // a valid address for copies of 0 bytes
  int row_pieces_;     // number of rows_ of this thread that are loaded, from the first on
  int bytes_left_;     // bytes of a row from this thread's piece to the row's end; may be negative
};

template <typename S>
__device__ inline void MultiplyStage(const char* stage, int valid_n_tiles, typename S::Sums& sums) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int across = thread / 32 % S::kWarpsAcross;
  const int down = thread / 32 / S::kWarpsAcross;
  const char* weights = stage + across * S::kMTiles * 16 * kMmaRowBytes;
  const char* rows =
      stage + S::kTileImageRows * kMmaRowBytes + down * S::kNTiles * 8 * kMmaRowBytes;
  constexpr int kSteps = kMmaRowBytes / 32;
  if constexpr (S::kNTiles == 1) {
    // With a single chain of products, all fragments are loaded first, so that the chain waits for
    // shared memory only once.
    static_assert(S::kMTiles == 1);
    uint32_t a[kSteps][4], b[kSteps][2];
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) {
      const int row = lane % 16;
      LoadMatrix4(a[k16], weights + row * kMmaRowBytes + ((k16 * 2 + lane / 16) ^ (row & 7)) * 16);
      const int piece = (k16 * 2 + lane / 8 % 2) ^ (lane & 7);
      LoadMatrix2(b[k16], rows + lane % 8 * kMmaRowBytes + piece * 16);
    }
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) S::Operands::Multiply(sums[0][0], a[k16], b[k16]);
  } else {
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) {
      uint32_t a[S::kMTiles][4];
#pragma unroll
      for (int mt = 0; mt < S::kMTiles; ++mt) {
        const int row = mt * 16 + lane % 16;
        const int piece = (k16 * 2 + lane / 16) ^ (row & 7);
        LoadMatrix4(a[mt], weights + row * kMmaRowBytes + piece * 16);
      }
#pragma unroll
      for (int pair = 0; pair < S::kNTiles / 2; ++pair) {
        if (pair * 2 >= valid_n_tiles) break;
        const int row = pair * 16 + lane % 8 + lane / 16 * 8;
        const int piece = (k16 * 2 + lane / 8 % 2) ^ (row & 7);
        uint32_t both[4];
        LoadMatrix4(both, rows + row * kMmaRowBytes + piece * 16);
        const uint32_t first[2] = {both[0], both[1]};
        const uint32_t second[2] = {both[2], both[3]};
#pragma unroll
        for (int mt = 0; mt < S::kMTiles; ++mt) {
          S::Operands::Multiply(sums[mt][pair * 2], a[mt], first);
          S::Operands::Multiply(sums[mt][pair * 2 + 1], a[mt], second);
        }
      }
    }
  }
}

// Sums the products of a tile; `shared` has S::kStages stages. Calls start() as soon as results of
// earlier kernels may be read, and end_block(k) after block k of the inputs. Afterwards no thread
// reads `shared`.
template <typename S, bool kWide, typename Start, typename EndBlock>
__device__ __forceinline__ void SumProducts(const LinearParams& p, const LinearBankEntry& m,
                                            const LinearTileRange& tile, char* shared,
                                            typename S::Sums& sums, const Start& start,
                                            const EndBlock& end_block) {
  StageLoader<S> loader(p, m, tile);
  // The loops that fill the stages are not unrolled: the unrolled code would take longer to fetch
  // than to run.
#pragma unroll 1
  for (int s = 0; s < min(S::kStages - 1, m.k_blocks); ++s) {
    loader.LoadWeights(shared + s * S::kStageBytes);
  }
  // The copies of weights were started before this wait, because weights do not depend on earlier
  // kernels.
  GridDependencyPass();
  start();
#pragma unroll 1
  for (int s = 0; s < S::kStages - 1; ++s) {
    if (s < m.k_blocks) loader.template LoadRows<kWide>(shared + s * S::kStageBytes);
    CopyAsyncCommit();
  }
  const int down = static_cast<int>(threadIdx.x) / 32 / S::kWarpsAcross;
  const int valid_n_tiles = (tile.rows - down * S::kNTiles * 8 + 7) / 8;
  int stage = 0;
  for (int k = 0; k < m.k_blocks; ++k) {
    CopyAsyncWait<S::kStages - 2>();
    __syncthreads();  // afterwards all copies for stage k are visible, and no thread reads stage k
                      // - 1
    const int next = k + S::kStages - 1;
    if (next < m.k_blocks) {
      const int slot = stage == 0 ? S::kStages - 1 : stage - 1;
      loader.LoadWeights(shared + slot * S::kStageBytes);
      loader.template LoadRows<kWide>(shared + slot * S::kStageBytes);
    }
    CopyAsyncCommit();
    MultiplyStage<S>(shared + stage * S::kStageBytes, valid_n_tiles, sums);
    end_block(k);
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
  }
  CopyAsyncWait<0>();
  __syncthreads();
}

// Stores the sums of a thread in `staged` [rows][S::kPitch]. result(row, column, sum) returns the
// number that is stored, for a row and an output of the tile.
template <typename S, typename Result>
__device__ __forceinline__ void StageSums(const typename S::Sums& sums, float* staged,
                                          const Result& result) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int across = thread / 32 % S::kWarpsAcross;
  const int down = thread / 32 / S::kWarpsAcross;
#pragma unroll
  for (int mt = 0; mt < S::kMTiles; ++mt) {
    const int column = (across * S::kMTiles + mt) * 16 + lane / 4;
#pragma unroll
    for (int nt = 0; nt < S::kNTiles; ++nt) {
      const int row = (down * S::kNTiles + nt) * 8 + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row + i % 2, c = column + i / 2 * 8;
        staged[r * S::kPitch + c] = result(r, c, sums[mt][nt][i]);
      }
    }
  }
}

// The template arguments after the operands: rows of a tile, warps along the outputs, warps along
// the rows, instructions per warp along the outputs, pipeline stages, blocks per multiprocessor.
template <typename Operands>
struct MmaShapes {
  using Rows8Slice = MmaShape<Operands, 8, 1, 1, 1, 16, 4>;
  using Rows8 = MmaShape<Operands, 8, 4, 1, 1, 8, 3>;
  using Rows16 = MmaShape<Operands, 16, 4, 1, 1, 7, 3>;
  using Rows32 = MmaShape<Operands, 32, 4, 1, 1, 6, 3>;
  using Rows64Narrow = MmaShape<Operands, 64, 4, 1, 1, 5, 2>;
  using Rows64 = MmaShape<Operands, 64, 4, 2, 2, 4, 2>;
  using Rows128 = MmaShape<Operands, 128, 4, 2, 2, 3, 2>;
};

}  // namespace moeserve::cuda

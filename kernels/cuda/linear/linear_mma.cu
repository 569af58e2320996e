// bf16 products by mma.sync. The weights are the m16 operand and the rows are the n8 operand, so a
// few rows waste little, and every 16-byte piece of weights is loaded once per row tile.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kBlockBytes = kImageBlock * kImageBlock * 2;
constexpr int kRowBytes = kImageBlock * 2;  // bytes of 64 inputs

// The dimensions of a tile: a block computes kTileRows rows x kTileImageRows outputs. Its warps
// form a grid of kWarpsAcross (outputs) x kWarpsDown (rows); each warp computes kMTiles x kNTiles
// instructions of m16n8.
template <int kTileRowsArg, int kWarpsAcrossArg, int kWarpsDownArg, int kMTilesArg, int kStagesArg,
          int kBlocksPerMultiprocessorArg>
struct MmaShape {
  using Sums = float[kMTilesArg][kTileRowsArg / kWarpsDownArg / 8][4];  // of a thread
  static constexpr int kTileRows = kTileRowsArg;
  static constexpr int kWarpsAcross = kWarpsAcrossArg;
  static constexpr int kWarpsDown = kWarpsDownArg;
  static constexpr int kMTiles = kMTilesArg;
  static constexpr int kNTiles = kTileRows / kWarpsDown / 8;
  static constexpr int kStages = kStagesArg;
  static constexpr int kBlocksPerMultiprocessor = kBlocksPerMultiprocessorArg;
  static constexpr int kTileImageRows = kWarpsAcross * kMTiles * 16;
  static constexpr int kThreads = kWarpsAcross * kWarpsDown * 32;
  static constexpr int kStageBytes = (kTileImageRows + kTileRows) * kRowBytes;
  static constexpr int kPitch = kTileImageRows + 4;  // floats per row of the staged results
  static constexpr int kStagedBytes = kTileRows * kPitch * 4;
  static constexpr int kSharedBytes = std::max(kStages * kStageBytes, kStagedBytes);
  static constexpr int kWeightPieces = kTileImageRows * 8 / kThreads;  // per thread and stage
  static constexpr int kRowPieces = (kTileRows * 8 + kThreads - 1) / kThreads;
  static_assert(kTileImageRows * 8 % kThreads == 0);
  static_assert(kThreads % 8 == 0);
};

// One thread's part of the copies into the stages. Each call copies one block of 64 inputs. The
// 16-byte pieces of a thread are kThreads / 8 rows apart.
template <typename S>
class StageLoader {
 public:
  __device__ StageLoader(const LinearParams& p, const LinearBankEntry& m,
                         const LinearTileRange& tile)
      : input_(p.input) {
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t strip = static_cast<int64_t>(m.k_blocks) * kBlockBytes;
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      const int block = tile.image_row / kImageBlock + i;
      // If a tile of two blocks has no second block, it loads the first one again and drops the
      // results.
      const int present = block < m.row_blocks ? block : block - 1;
      weights_[i] = p.weights + m.weights + present * strip +
                    tile.image_row % kImageBlock * kRowBytes + thread * 16;
    }
    const int piece = thread % 8;
    bytes_left_ = m.in_features * 2 - piece * 16;
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
      const int in_strip = i * S::kThreads * 16 % kBlockBytes;
      CopyAsync16(stage + at, weights_[i * S::kThreads * 16 / kBlockBytes] + in_strip);
    }
#pragma unroll
    for (int i = 0; i < kStrips; ++i) weights_[i] += kBlockBytes;
  }

  // Copies the next block of the rows into `stage`.
  template <bool kWide>
  __device__ void LoadRows(char* stage) {
    const int thread = static_cast<int>(threadIdx.x);
    char* rows = stage + S::kTileImageRows * kRowBytes;
    const int valid = min(16, max(0, bytes_left_));
#pragma unroll
    for (int i = 0; i < S::kRowPieces; ++i) {
      if (i < row_pieces_) {
        const int r = thread / 8 + i * (S::kThreads / 8);
        char* to = rows + r * kRowBytes + ((thread % 8 ^ (r & 7)) * 16);
        if constexpr (kWide) {
          CopyAsync16(to, valid > 0 ? rows_[i] : input_, valid);
        } else {
          const uint16_t* from = reinterpret_cast<const uint16_t*>(rows_[i]);
          uint16_t* piece = reinterpret_cast<uint16_t*>(to);
#pragma unroll
          for (int j = 0; j < 8; ++j) piece[j] = j * 2 < valid ? from[j] : uint16_t{0};
        }
      }
      rows_[i] += kRowBytes;
    }
    bytes_left_ -= kRowBytes;
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
__device__ void MultiplyStage(const char* stage, int valid_n_tiles,
                              float (&sums)[S::kMTiles][S::kNTiles][4]) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int across = thread / 32 % S::kWarpsAcross;
  const int down = thread / 32 / S::kWarpsAcross;
  const char* weights = stage + across * S::kMTiles * 16 * kRowBytes;
  const char* rows = stage + S::kTileImageRows * kRowBytes + down * S::kNTiles * 8 * kRowBytes;
  constexpr int kSteps = kImageBlock / 16;
  if constexpr (S::kNTiles == 1) {
    // With a single chain of products, all fragments are loaded first, so that the chain waits for
    // shared memory only once.
    static_assert(S::kMTiles == 1);
    uint32_t a[kSteps][4], b[kSteps][2];
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) {
      const int row = lane % 16;
      LoadMatrix4(a[k16], weights + row * kRowBytes + ((k16 * 2 + lane / 16) ^ (row & 7)) * 16);
      const int piece = (k16 * 2 + lane / 8 % 2) ^ (lane & 7);
      LoadMatrix2(b[k16], rows + lane % 8 * kRowBytes + piece * 16);
    }
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) MmaBf16(sums[0][0], a[k16], b[k16]);
  } else {
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) {
      uint32_t a[S::kMTiles][4];
#pragma unroll
      for (int mt = 0; mt < S::kMTiles; ++mt) {
        const int row = mt * 16 + lane % 16;
        const int piece = (k16 * 2 + lane / 16) ^ (row & 7);
        LoadMatrix4(a[mt], weights + row * kRowBytes + piece * 16);
      }
#pragma unroll
      for (int pair = 0; pair < S::kNTiles / 2; ++pair) {
        if (pair * 2 >= valid_n_tiles) break;
        const int row = pair * 16 + lane % 8 + lane / 16 * 8;
        const int piece = (k16 * 2 + lane / 8 % 2) ^ (row & 7);
        uint32_t both[4];
        LoadMatrix4(both, rows + row * kRowBytes + piece * 16);
        const uint32_t first[2] = {both[0], both[1]};
        const uint32_t second[2] = {both[2], both[3]};
#pragma unroll
        for (int mt = 0; mt < S::kMTiles; ++mt) {
          MmaBf16(sums[mt][pair * 2], a[mt], first);
          MmaBf16(sums[mt][pair * 2 + 1], a[mt], second);
        }
      }
    }
  }
}

template <typename S>
__device__ void StageSums(const float (&sums)[S::kMTiles][S::kNTiles][4], float* staged) {
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
      staged[row * S::kPitch + column] = sums[mt][nt][0];
      staged[(row + 1) * S::kPitch + column] = sums[mt][nt][1];
      staged[row * S::kPitch + column + 8] = sums[mt][nt][2];
      staged[(row + 1) * S::kPitch + column + 8] = sums[mt][nt][3];
    }
  }
}

// Adds the sums of a slice to those of the slices before it, and clears them.
template <typename S>
__device__ __forceinline__ void EndSlice(typename S::Sums& totals, typename S::Sums& sums) {
#pragma unroll
  for (int mt = 0; mt < S::kMTiles; ++mt) {
#pragma unroll
    for (int nt = 0; nt < S::kNTiles; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        totals[mt][nt][i] += sums[mt][nt][i];
        sums[mt][nt][i] = 0.0f;
      }
    }
  }
}

// kSliced: sums may have several slices (SliceBlocks()).
template <typename S, bool kWide, bool kSliced>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerMultiprocessor)
    LinearMmaKernel(const LinearParams p) {
  if (HasTileList(p)) GridDependencyWait();
  const LinearTileRange tile =
      FindLinearTile<S::kTileRows, S::kTileImageRows>(p, static_cast<int>(blockIdx.x));
  if (tile.expert < 0) return;
  const LinearBankEntry m = p.entries[tile.expert];
  char* shared = DynamicShared<char>();
  StageLoader<S> loader(p, m, tile);
  typename S::Sums sums = {}, totals = {};
  int in_slice = 0;

  // The loops that fill the stages are not unrolled: the unrolled code would take longer to fetch
  // than to run.
#pragma unroll 1
  for (int s = 0; s < min(S::kStages - 1, m.k_blocks); ++s) {
    loader.LoadWeights(shared + s * S::kStageBytes);
  }
  // The copies of weights were started before this wait, because weights do not depend on earlier
  // kernels.
  GridDependencyPass();
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
    if (kSliced && (++in_slice == m.slice_blocks || k + 1 == m.k_blocks)) {
      EndSlice<S>(totals, sums);
      in_slice = 0;
    }
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
  }
  CopyAsyncWait<0>();
  __syncthreads();
  float* staged = reinterpret_cast<float*>(shared);
  StageSums<S>(kSliced ? totals : sums, staged);
  __syncthreads();
  StoreLinearTile<S::kTileImageRows, S::kPitch, S::kThreads>(p, m, tile, staged,
                                                             static_cast<int>(threadIdx.x));
}

template <typename S, bool kWide = true>
void LaunchShaped(const CudaLinearBank& bank, const LinearParams& p, cudaStream_t stream) {
  const int64_t tiles = internal::MaxLinearTiles(bank, p.rows, S::kTileRows, S::kTileImageRows);
  MOESERVE_CHECK(tiles <= INT32_MAX, "tiles of a linear layer");
  const LaunchShape shape{dim3(static_cast<unsigned>(tiles)), dim3(S::kThreads), S::kSharedBytes,
                          stream, true};
  if constexpr (S::kTileRows < 128) {
    if (bank.max_slices() > 1) return Launch(LinearMmaKernel<S, kWide, true>, shape, p);
  }
  Launch(LinearMmaKernel<S, kWide, false>, shape, p);
}

// The template arguments: rows of a tile, warps along the outputs, warps along the rows,
// instructions per warp along the outputs, pipeline stages, blocks per multiprocessor.
using Rows8Slice = MmaShape<8, 1, 1, 1, 16, 4>;
using Rows8 = MmaShape<8, 4, 1, 1, 8, 3>;
using Rows16 = MmaShape<16, 4, 1, 1, 7, 3>;
using Rows32 = MmaShape<32, 4, 1, 1, 6, 3>;
using Rows64Narrow = MmaShape<64, 4, 1, 1, 5, 2>;
using Rows64 = MmaShape<64, 4, 2, 2, 4, 2>;
using Rows128 = MmaShape<128, 4, 2, 2, 3, 2>;

}  // namespace

namespace internal {

void LaunchLinearMma(const CudaLinearBank& bank, const LinearParams& p, LinearTile tile,
                     cudaStream_t stream) {
  // Rows that are not 16-byte aligned (sub-tokens of odd widths) use a single tile shape, which
  // loads element by element.
  if (!p.wide_input) return LaunchShaped<Rows32, false>(bank, p, stream);
  // With few tiles, as in a narrow layer, many multiprocessors would be idle; narrower tiles use
  // more of them.
  constexpr int64_t kFewTiles = 96;
  switch (tile) {
    case LinearTile::kRows8:
      if (MaxLinearTiles(bank, p.rows, 8, kImageBlock) < kFewTiles) {
        return LaunchShaped<Rows8Slice>(bank, p, stream);
      }
      return LaunchShaped<Rows8>(bank, p, stream);
    case LinearTile::kRows16:
      return LaunchShaped<Rows16>(bank, p, stream);
    case LinearTile::kRows32:
      return LaunchShaped<Rows32>(bank, p, stream);
    case LinearTile::kRows64:
      if (MaxLinearTiles(bank, p.rows, 64, 2 * kImageBlock) < 2 * kFewTiles) {
        return LaunchShaped<Rows64Narrow>(bank, p, stream);
      }
      return LaunchShaped<Rows64>(bank, p, stream);
    default:
      // A second set of sums for slices does not fit into the registers of the largest tiles.
      if (bank.max_slices() > 1) return LaunchShaped<Rows64>(bank, p, stream);
      return LaunchShaped<Rows128>(bank, p, stream);
  }
}

}  // namespace internal
}  // namespace moeserve::cuda

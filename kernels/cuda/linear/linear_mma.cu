// bf16 products by mma.sync (linear_mma.cuh).

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_mma.cuh"

namespace moeserve::cuda {
namespace {

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
  typename S::Sums sums = {}, totals = {};
  int in_slice = 0;
  SumProducts<S, kWide>(
      p, m, tile, shared, sums, [] {},
      [&](int k) {
        if (kSliced && (++in_slice == m.slice_blocks || k + 1 == m.k_blocks)) {
          EndSlice<S>(totals, sums);
          in_slice = 0;
        }
      });
  float* staged = reinterpret_cast<float*>(shared);
  StageSums<S>(kSliced ? totals : sums, staged, [](int, int, float sum) { return sum; });
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

using Shapes = MmaShapes<Bf16Operands>;

}  // namespace

namespace internal {

void LaunchLinearMma(const CudaLinearBank& bank, const LinearParams& p, LinearTile tile,
                     cudaStream_t stream) {
  // Rows that are not 16-byte aligned (sub-tokens of odd widths) use a single tile shape, which
  // loads element by element.
  if (!p.wide_input) return LaunchShaped<Shapes::Rows32, false>(bank, p, stream);
  // With few tiles, as in a narrow layer, many multiprocessors would be idle; narrower tiles use
  // more of them.
  constexpr int64_t kFewTiles = 96;
  switch (tile) {
    case LinearTile::kRows8:
      if (MaxLinearTiles(bank, p.rows, 8, kImageBlock) < kFewTiles) {
        return LaunchShaped<Shapes::Rows8Slice>(bank, p, stream);
      }
      return LaunchShaped<Shapes::Rows8>(bank, p, stream);
    case LinearTile::kRows16:
      return LaunchShaped<Shapes::Rows16>(bank, p, stream);
    case LinearTile::kRows32:
      return LaunchShaped<Shapes::Rows32>(bank, p, stream);
    case LinearTile::kRows64:
      if (MaxLinearTiles(bank, p.rows, 64, 2 * kImageBlock) < 2 * kFewTiles) {
        return LaunchShaped<Shapes::Rows64Narrow>(bank, p, stream);
      }
      return LaunchShaped<Shapes::Rows64>(bank, p, stream);
    default:
      // A second set of sums for slices does not fit into the registers of the largest tiles.
      if (bank.max_slices() > 1) return LaunchShaped<Shapes::Rows64>(bank, p, stream);
      return LaunchShaped<Shapes::Rows128>(bank, p, stream);
  }
}

}  // namespace internal
}  // namespace moeserve::cuda

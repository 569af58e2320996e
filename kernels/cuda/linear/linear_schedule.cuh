// The order in which the blocks of a persistent grid take tiles, and the ring by which one warp of
// a block passes them to the others.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {

// A position in a ring, with the parity of the barrier phase.
template <int kSlots>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void Advance() {
    if (++stage == kSlots) {
      stage = 0;
      parity ^= 1;
    }
  }
  // Advances by n <= kSlots.
  __device__ void Skip(int n) {
    stage += n;
    if (stage >= kSlots) {
      stage -= kSlots;
      parity ^= 1;
    }
  }
};

// A tile and the matrix of its expert.
struct alignas(16) TileItem {
  LinearTileRange range;
  LinearBankEntry matrix;
};

// A ring of tiles in shared memory.
struct TileSlots {
  static constexpr int kSlots = 8;
  TileItem items[kSlots];
  uint64_t full[kSlots];
  uint64_t empty[kSlots];

  // To be called by one thread. `readers` is the number of warps that take every tile.
  __device__ void Init(uint32_t readers) {
    for (int i = 0; i < kSlots; ++i) {
      MbarrierInit(full + i, 1);
      MbarrierInit(empty + i, readers);
    }
  }
};

// Puts tiles into the ring. To be called by one whole warp.
class TileWriter {
 public:
  __device__ explicit TileWriter(TileSlots* slots) : slots_(slots) {}
  __device__ void Put(const LinearParams& p, const LinearTileRange& range) {
    MbarrierWait(slots_->empty + at_.stage, at_.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      TileItem& item = slots_->items[at_.stage];
      item.range = range;
      if (range.expert >= 0) item.matrix = p.entries[range.expert];
      MbarrierArrive(slots_->full + at_.stage);
    }
    at_.Advance();
  }
  // Where the next tile will be.
  __device__ const RingPosition<TileSlots::kSlots>& at() const { return at_; }

 private:
  TileSlots* const slots_;
  RingPosition<TileSlots::kSlots> at_;
};

// Takes tiles from the ring. To be called by whole warps.
class TileReader {
 public:
  __device__ explicit TileReader(TileSlots* slots) : slots_(slots) {}
  __device__ TileItem Take() {
    MbarrierWait(slots_->full + at_.stage, at_.parity);
    const TileItem item = slots_->items[at_.stage];
    __syncwarp();
    if (threadIdx.x % 32 == 0) MbarrierArrive(slots_->empty + at_.stage);
    at_.Advance();
    return item;
  }

 private:
  TileSlots* const slots_;
  RingPosition<TileSlots::kSlots> at_;
};

// Passes a number for each tile from the first to the second block of a cluster. The caller must
// ensure that the first block is at most kSlots tiles ahead.
struct MailSlots {
  static constexpr int kSlots = TileSlots::kSlots;
  int32_t values[kSlots];
  uint64_t full[kSlots];

  // To be called by one thread.
  __device__ void Init() {
    for (uint64_t& barrier : full) MbarrierInit(&barrier, 1);
    MbarrierArrive(full);  // the first tile has no number
  }
};

class PairMail {
 public:
  // `slots` is the address of a MailSlots in shared memory, the same in both blocks. The number
  // of a tile has the place of the tile in the ring of `writer`.
  __device__ PairMail(const TileWriter& writer, char* slots)
      : writer_(writer), slots_(reinterpret_cast<MailSlots*>(slots)) {}
  __device__ static bool Sends() { return ClusterRank() == 0; }
  // Returns the value that the first block passes. To be called by one whole warp of each block,
  // once between calls of TileWriter::Put().
  __device__ int Pass(int value) const {
    const bool first_lane = threadIdx.x % 32 == 0;
    int32_t* const slot = slots_->values + writer_.at().stage;
    uint64_t* const full = slots_->full + writer_.at().stage;
    if (Sends()) {
      if (first_lane) ClusterStoreAsync(ClusterAddress(slot, 1), value, ClusterAddress(full, 1));
    } else {
      if (first_lane) MbarrierArriveExpect(full, sizeof(value));
      MbarrierWait(full, writer_.at().parity);
      value = *slot;
    }
    return value;
  }

 private:
  const TileWriter& writer_;
  MailSlots* const slots_;
};
// The same for a single block.
struct NoMail {
  NoMail() = default;
  __device__ NoMail(const TileWriter&, char*) {}
  __device__ static bool Sends() { return true; }
  __device__ int Pass(int value) const { return value; }
};

// Returns one worker's tiles of the list of FindLinearTile(). The first tile of worker w is tile w
// of the list. Without LinearParams::counter, `workers` tiles further is its next one. With a
// counter, its next tile is the first that no worker has taken, so that workers that finish early
// take more; the counter must be 0 before the launch, and is 0 again after it. Results do not
// depend on which worker computes a tile.
//
// All functions must be called by the same whole warp. With PairMail, a worker is a cluster of two
// blocks, which take the same tiles: a warp of each block has an object, and calls its functions in
// the same order.
template <int kTileRows, int kTileImageRows, typename Mail = NoMail>
class TileSchedule {
 public:
  __device__ TileSchedule(const LinearParams& p, int worker, int workers, Mail mail = {})
      : params_(p), index_(worker), workers_(workers), mail_(mail) {}

  // Returns the first tile; its expert is negative if there is none.
  __device__ LinearTileRange First() {
    return FindLinearTile<kTileRows, kTileImageRows>(params_, index_);
  }

  // Starts to determine the next tile, and does not wait for the result. Must be called once after
  // First() and each Next() that returned a tile.
  __device__ void Fetch() {
    if (params_.counter == nullptr) {
      index_ += workers_;
    } else if (Mail::Sends() && threadIdx.x % 32 == 0) {
      index_ = atomicAdd(params_.counter, 1);
    }
  }

  // Returns the tile that Fetch() determined; its expert is negative if there is none.
  __device__ LinearTileRange Next() {
    if (params_.counter == nullptr) return First();
    const int fetched = mail_.Pass(__shfl_sync(kFullMask, index_, 0));
    const LinearTileRange tile =
        FindLinearTile<kTileRows, kTileImageRows>(params_, workers_ + fetched);
    // One fetch follows each tile, so there are as many fetches as tiles.
    const bool last = tile.expert < 0 && fetched == tile.row - 1;
    if (last && Mail::Sends() && threadIdx.x % 32 == 0) *params_.counter = 0;
    return tile;
  }

 private:
  const LinearParams& params_;
  int index_;
  const int workers_;
  const Mail mail_;
};

}  // namespace moeserve::cuda

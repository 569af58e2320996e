// Each warp of a block computes 16 outputs of all rows, as one chain of products in ascending order
// of the inputs, like all kernels for bf16 rows. Its weights stream through a ring of its own in
// shared memory. The ring is filled before the block waits for earlier kernels.
//
// The rows are the norm of the residual stream after a branch is added to it. Every cluster of
// blocks computes all of them: one per block, which stores it in the shared memory of the whole
// cluster, or, of short rows, one per warp, without a cluster. The sums replace rows that other
// blocks may still have to read, so no block waits for another cluster: the last block to have read
// a row writes its sum and its norm to device memory.
#include <algorithm>
#include <map>
#include <utility>

#include "base/check.h"
#include "base/mutex.h"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/joined/joined_stream.h"
#include "kernels/cuda/linear/linear_bank.h"
#include "kernels/cuda/linear/linear_stream.cuh"
#include "kernels/cuda/rows/norm_row.cuh"

namespace moeserve::cuda::internal {
namespace {

constexpr int kRingThreads = kNormBlock;
constexpr int kRingWarps = kRingThreads / 32;
constexpr int kStripBlock = Bf16Strips::kStripBytes;  // 16 outputs x 64 inputs
// Blocks of 64 inputs in the ring of a warp. Fewer than kFewestSlots do not hide the latency of the
// memory.
constexpr int kMostSlots = 32, kFewestSlots = 8;
constexpr int kBarrierBytes = kRingWarps * kMostSlots * 8;
constexpr int kRingHeaderBytes = kBarrierBytes + 128;
static_assert(kNormSharedFloats * 4 + 4 <= 128);

struct RingParams {
  LinearParams linear;
  LinearBankEntry entry;  // of the matrix
  int32_t* counters;      // of the blocks that have read the rows of one rank; 0 before and after
  int block_strips;       // strips of 16 outputs per block, at most
  int slots;
  int fetched;     // blocks of 64 inputs behind the first `slots` that the early copies include
  int sum_floats;  // of a row of the residual stream in shared memory
};

// A block's shared memory.
struct RingMemory {
  uint64_t* full;  // [kRingWarps][kMostSlots] mbarriers
  float* of_norm;
  int* last;    // whether this block was the last one to read its rows
  float* sums;  // [rows that the block computes][sum_floats]
  char* rows;   // [k block][rows] 64 inputs: the 16-byte piece c of row r is at index c ^ r
  char* rings;  // [block_strips][slots] of kStripBlock

  __device__ __forceinline__ RingMemory(char* shared, const RingParams& p) {
    full = reinterpret_cast<uint64_t*>(shared);
    of_norm = reinterpret_cast<float*>(shared + kBarrierBytes);
    last = reinterpret_cast<int*>(of_norm + kNormSharedFloats);
    rings = shared + kRingHeaderBytes;
    rows = rings + p.block_strips * p.slots * kStripBlock;
    sums = reinterpret_cast<float*>(rows + p.entry.k_blocks * p.linear.rows * kRowBytes);
  }
};

// Returns the place of columns [c, c + 4) of a row, c % 4 == 0.
__device__ __forceinline__ char* PlaceInRows(char* rows, int all_rows, int row, int c) {
  return rows + (c / kImageBlock * all_rows + row) * kRowBytes +
         ((c % kImageBlock / 8) ^ row) * 16 + c % 8 * 2;
}

// Where the norm of a row is stored (NormInPlace): in the shared memory of the cluster, and the sum
// in that of the block.
struct PlaceInCluster {
  float* sum;
  char* rows;
  int all_rows;
  int row;          // that of the block's rank, if there is a cluster
  uint32_t blocks;  // of the cluster

  __device__ __forceinline__ float* Sum(float* /*x*/) const { return sum; }
  __device__ __forceinline__ void Store(const NormParams& /*p*/, int64_t /*row*/, int64_t c,
                                        int /*count*/, const float4& v) const {
    uint2 bits;
    bits.x = Bf16FromF32(v.x) | static_cast<uint32_t>(Bf16FromF32(v.y)) << 16;
    bits.y = Bf16FromF32(v.z) | static_cast<uint32_t>(Bf16FromF32(v.w)) << 16;
    char* const to = PlaceInRows(rows, all_rows, row, static_cast<int>(c));
    if (blocks == 1) {
      *reinterpret_cast<uint2*>(to) = bits;
      return;
    }
    // Each block begins with itself, so that they do not all store in the memory of the same one.
#pragma unroll 1
    for (uint32_t i = 0; i < blocks; ++i) {
      const uint32_t block = (static_cast<uint32_t>(row) + i) & (blocks - 1);
      ClusterStore(ClusterAddress(to, block), bits);
    }
  }
};

// Writes zeros behind the last inputs of all rows.
__device__ __forceinline__ void ClearRowEnds(const RingParams& p, char* rows) {
  const int fours = (p.entry.k_blocks * kImageBlock - p.entry.in_features) / 4;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < fours * p.linear.rows; i += kRingThreads) {
    const int row = i / fours, c = p.entry.in_features + (i - row * fours) * 4;
    *reinterpret_cast<uint2*>(PlaceInRows(rows, p.linear.rows, row, c)) = make_uint2(0, 0);
  }
}

// The weights of a warp's strip.
struct Ring {
  const char* weights;
  char* slots;
  uint64_t* full;
  int count;  // of the slots
  int k_blocks;

  __device__ __forceinline__ Ring(const RingParams& p, const RingMemory& m, int strip, int warp)
      : slots(m.rings + warp * p.slots * kStripBlock),
        full(m.full + warp * kMostSlots),
        count(p.slots),
        k_blocks(p.entry.k_blocks) {
    constexpr int kStripsOfBlock = kImageBlock / kStripRows;
    weights = p.linear.weights + p.entry.weights +
              int64_t{strip / kStripsOfBlock} * k_blocks * Bf16Strips::kBlockBytes +
              strip % kStripsOfBlock * kStripBlock;
  }
  __device__ __forceinline__ const char* Block(int k) const {
    return weights + int64_t{k} * Bf16Strips::kBlockBytes;
  }
  // One lane calls this.
  __device__ __forceinline__ void Fill(int slot, int k) const {
    MbarrierArriveExpect(full + slot, kStripBlock);
    CopyBulkAsync(slots + slot * kStripBlock, Block(k), kStripBlock, full + slot);
  }
  // Fills the slots, and fetches `fetched` more blocks into the second-level cache. All lanes of
  // the warp call this.
  __device__ __forceinline__ void Start(int fetched) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < count) {
      MbarrierInit(full + lane, 1);
      MbarrierInitFence();
      Fill(lane, lane);
    }
#pragma unroll 1
    for (int k = count + lane; k < count + fetched; k += 32) PrefetchBulk(Block(k), kStripBlock);
    __syncwarp();
  }
};

// Computes the sums of a warp's strip.
class RingConsumer {
 public:
  __device__ __forceinline__ RingConsumer(const Ring& ring, const char* rows, int all_rows)
      : ring_(ring), rows_bytes_(all_rows * kRowBytes), lane_(static_cast<int>(threadIdx.x) % 32) {
    // Lanes of rows that do not exist load another one, whose products are not stored.
    row_ = min(lane_ % 8, all_rows - 1);
    rows_ = rows + row_ * kRowBytes;
  }

  __device__ __forceinline__ void Sum(float (&sums)[1][4]) {
    const int blocks = ring_.k_blocks;
    Fragments<1> even, odd;
    Fetch(even, 0);
    // The operands of a block are loaded while the products of the block before are computed.
#pragma unroll 1
    for (int k = 0; k < blocks; k += 2) {
      if (k + 1 < blocks) Fetch(odd, k + 1);
      Multiply<1>(sums, even, 1);
      if (k + 1 == blocks) break;
      if (k + 2 < blocks) Fetch(even, k + 2);
      Multiply<1>(sums, odd, 1);
    }
  }

 private:
  __device__ __forceinline__ void Fetch(Fragments<1>& f, int k) {
    MbarrierWait(ring_.full + slot_, parity_);
    Bf16Strips::Load(ring_.slots + slot_ * kStripBlock, f.weights);
#pragma unroll
    for (int k32 = 0; k32 < kSteps / 2; ++k32) {
      uint32_t both[4];
      LoadMatrix4(both, rows_ + k * rows_bytes_ + ((k32 * 4 + lane_ / 8) ^ row_) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) f.rows[k32 * 2 + i / 2][0][i % 2] = both[i];
    }
    __syncwarp();
    if (lane_ == 0 && k + ring_.count < ring_.k_blocks) ring_.Fill(slot_, k + ring_.count);
    if (++slot_ == ring_.count) {
      slot_ = 0;
      parity_ ^= 1;
    }
  }

  const Ring& ring_;
  const char* rows_;
  const int rows_bytes_, lane_;
  int row_;
  int slot_ = 0;
  uint32_t parity_ = 0;
};

// Orders the block's reads before, and its writes after, those of other blocks that call this. One
// thread of a block calls it, after a barrier of the block.
__device__ __forceinline__ int32_t ArriveAt(int32_t* counter) {
#if defined(MOESERVE_CUDA_EMULATION)
  return atomicAdd(counter, 1);
#else
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return before;
#endif
}

// Writes the sum and the norm of a row from shared to device memory. Each thread writes the
// elements that it has computed.
__device__ __forceinline__ void WriteRow(const RingParams& p, const NormParams& norm,
                                         const float* sum, char* rows, int row, int lane,
                                         int team) {
  float* const x = reinterpret_cast<float*>(norm.input.data) + row * norm.input.stride;
  char* const output = norm.output.data + row * norm.output.stride * 2;
  const bool aligned = Aligned16(x);
#pragma unroll 2
  for (int c = 4 * lane; c < norm.width; c += 4 * team) {
    StoreFour(x + c, 4, aligned, *reinterpret_cast<const float4*>(sum + c));
    *reinterpret_cast<uint2*>(output + c * 2) =
        *reinterpret_cast<const uint2*>(PlaceInRows(rows, p.linear.rows, row, c));
  }
}

// With kBlock, a row is the work of one block, so that a cluster has at least as many blocks as
// there are rows; otherwise it is the work of one warp, and there is no cluster.
template <bool kBlock, bool kSum>
__global__ void __launch_bounds__(kRingThreads, 1)
    JoinedStreamKernel(const RingParams p, const NormParams norm) {
#if MOESERVE_HAS_SM90A
  constexpr int kTeam = kBlock ? kRingThreads : 32;
  const RingMemory m(DynamicShared<char>(), p);
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % kTeam;
  const uint32_t blocks = kBlock ? ClusterBlocks() : 1;
  const int first_strip = static_cast<int>(blockIdx.x) * p.block_strips;
  const int all_strips = (p.entry.out_features + kStripRows - 1) / kStripRows;
  const bool multiplies = warp < min(p.block_strips, all_strips - first_strip);
  const Ring ring(p, m, first_strip + warp, warp);
  // Weights do not depend on earlier kernels.
  if (multiplies) ring.Start(p.fetched);
  ClearRowEnds(p, m.rows);
  __syncwarp();
  // The other blocks store rows in this block's memory after all have started.
  if (blocks > 1) ClusterArrive();
  GridDependencyPass();
  if (blocks > 1) ClusterWait();
  const int row = kBlock ? static_cast<int>(ClusterRank()) : warp;
  float* const sum = m.sums + (kBlock ? 0 : warp) * p.sum_floats;
  if (row < p.linear.rows) {
    NormVectorOf<kBlock, kSum>(norm, row, lane, m.of_norm,
                               PlaceInCluster{sum, m.rows, p.linear.rows, row, blocks});
  }
  __syncwarp();
  if (blocks > 1) {
    ClusterSync();
  } else {
    __syncthreads();
  }
  const bool has_rows = !kBlock || row < p.linear.rows;
  // The last warp is that most likely not to have a strip.
  if (has_rows && threadIdx.x == kRingThreads - 32) {
    int32_t* const counter = p.counters + (kBlock ? row : 0);
    const bool last = ArriveAt(counter) == static_cast<int>(gridDim.x / blocks) - 1;
    if (last) *counter = 0;
    *m.last = last ? 1 : 0;
  }
  if (multiplies) {
    __syncwarp();
    float sums[1][4] = {};
    RingConsumer(ring, m.rows, p.linear.rows).Sum(sums);
    const LinearTileRange range{0, 0, p.linear.rows, (first_strip + warp) * kStripRows};
    StoreStrip<Epilogue::kNone, 1>(p.linear, p.entry, range, sums);
  }
  if (!has_rows) return;
  __syncthreads();
  if (*m.last != 0 && row < p.linear.rows) WriteRow(p, norm, sum, m.rows, row, lane, kTeam);
#else
  __trap();
#endif
}

// Returns how many blocks of such clusters run at a time on the current device.
int BlocksAtATime(int cluster) {
  static Mutex mutex;
  static auto* const known ABSL_PT_GUARDED_BY(mutex) = new std::map<std::pair<int, int>, int>;
  int device = 0;
  MOESERVE_CHECK(cudaGetDevice(&device) == cudaSuccess, "no current CUDA device");
  MutexLock lock(mutex);
  const auto [entry, is_new] = known->try_emplace({device, cluster}, 0);
  if (!is_new) return entry->second;
  if (cluster == 1) {
    entry->second = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  } else {
    const auto blocks = static_cast<unsigned>(cluster);
    const LaunchShape shape{.grid = dim3(blocks),
                            .block = dim3(kRingThreads),
                            .shared_bytes = SharedMemoryLimit(),
                            .cluster = dim3(blocks)};
    entry->second = cluster * MaxActiveClusters(JoinedStreamKernel<true, true>, shape);
  }
  return entry->second;
}

struct RingShape {
  int cluster = 1;
  int blocks = 0;  // of the grid; 0: the launch is not possible, or takes longer than two
  int block_strips = 0, slots = 0, fetched = 0, sum_floats = 0;
  int64_t shared_bytes = 0;
};

RingShape ShapeOfRing(const LinearBankEntry& entry, int rows, int width) {
  RingShape s;
  const bool by_block = NormTeam(width) == kNormBlock;
  while (by_block && s.cluster < rows) s.cluster *= 2;
  const int resident = BlocksAtATime(s.cluster);
  // With fewer blocks, a part of the device would read no weights.
  if (resident * 4 < DeviceAttribute(cudaDevAttrMultiProcessorCount) * 3) return s;
  const int strips = (entry.out_features + kStripRows - 1) / kStripRows;
  s.block_strips = (strips + resident - 1) / resident;
  s.sum_floats = (width + 3) / 4 * 4;
  const int64_t fixed = kRingHeaderBytes + int64_t{entry.k_blocks} * rows * kRowBytes +
                        int64_t{by_block ? 1 : rows} * s.sum_floats * 4;
  const int64_t room = static_cast<int64_t>(SharedMemoryLimit()) - fixed;
  const int64_t slots = room / (int64_t{s.block_strips} * kStripBlock);
  s.slots = static_cast<int>(std::clamp<int64_t>(slots, 0, std::min(kMostSlots, entry.k_blocks)));
  if (s.block_strips > kRingWarps || s.slots < std::min(kFewestSlots, entry.k_blocks)) return s;
  s.shared_bytes = fixed + int64_t{s.block_strips} * s.slots * kStripBlock;
  // A third of the second-level cache.
  const int64_t cached = DeviceAttribute(cudaDevAttrL2CacheSize) / 3;
  s.fetched = static_cast<int>(
      std::min<int64_t>(entry.k_blocks - s.slots, cached / (int64_t{strips} * kStripBlock)));
  const int with_strips = (strips + s.block_strips - 1) / s.block_strips;
  s.blocks = (with_strips + s.cluster - 1) / s.cluster * s.cluster;
  return s;
}

// Whether the views share memory.
bool Overlaps(const RowsView& a, const RowsView& b) {
  if (a.data == nullptr || b.data == nullptr) return false;
  return a.data < b.row(b.rows) && b.data < a.row(a.rows);
}

}  // namespace

bool JoinedStreamFits(const JoinedLinear& joined, cudaStream_t stream) {
  if (joined.norm == nullptr || !HasClusters()) return false;
  const LinearArgs& args = joined.linear;
  const NormLaunch& norm = *joined.norm;
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  if (args.activation.kind != ActivationKind::kNone || bank.max_slices() > 1 ||
      (norm.sum == nullptr && norm.branch.data == nullptr)) {
    return false;
  }
  // A block may store outputs while another one still reads what its rows are made of.
  const RowsView& to = args.output;
  if (Overlaps(to, norm.input) || Overlaps(to, norm.branch) || Overlaps(to, norm.output)) {
    return false;
  }
  if (norm.sum != nullptr &&
      (Overlaps(to, norm.sum->results) ||
       (norm.sum->residual != nullptr && Overlaps(to, *norm.sum->residual)))) {
    return false;
  }
  const auto rows = static_cast<int>(args.input.rows);
  return bank.tile_counters().Of(stream) != nullptr &&
         ShapeOfRing(bank.entry(0), rows, norm.width).blocks > 0;
}

void LaunchJoinedStream(const JoinedLinear& joined, cudaStream_t stream) {
  const LinearArgs& args = joined.linear;
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  const NormParams norm = NormParamsOf(*joined.norm);
  const RingShape shape = ShapeOfRing(bank.entry(0), norm.rows, norm.width);
  static_assert(kMostJoinedRows <= TileCounters::kStride && kMostJoinedRows <= kRingWarps);
  const RingParams p{.linear = LinearParamsOf(args),
                     .entry = bank.entry(0),
                     .counters = bank.tile_counters().Of(stream),
                     .block_strips = shape.block_strips,
                     .slots = shape.slots,
                     .fetched = shape.fetched,
                     .sum_floats = shape.sum_floats};
  const LaunchShape launch{.grid = dim3(static_cast<unsigned>(shape.blocks)),
                           .block = dim3(kRingThreads),
                           .shared_bytes = static_cast<size_t>(shape.shared_bytes),
                           .stream = stream,
                           .overlaps_predecessor = true,
                           .cluster = dim3(static_cast<unsigned>(shape.cluster))};
  const bool by_block = NormTeam(norm.width) == kNormBlock, sums = joined.norm->sum != nullptr;
  const auto kernel =
      by_block ? (sums ? JoinedStreamKernel<true, true> : JoinedStreamKernel<true, false>)
               : (sums ? JoinedStreamKernel<false, true> : JoinedStreamKernel<false, false>);
  Launch(kernel, launch, p, norm);
}

}  // namespace moeserve::cuda::internal

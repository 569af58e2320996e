// Routing of up to 32 rows by one cluster of blocks. Each block computes the products of its
// columns, whose weights and rows it copies to shared memory completely: with few rows, time goes
// into the latency of copies and not into their number. The blocks send their products to the first
// block's shared memory, which then selects the experts and builds the plan. The results are those
// of route_kernel.cuh.
//
// The rows may be those of a norm that the same launch computes: each row by one block, or by one
// warp if it is short, which writes it to device memory. After a barrier of the cluster, all blocks
// read all rows.
#include <algorithm>
#include <map>
#include <type_traits>

#include "base/check.h"
#include "base/mutex.h"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/routing/route_cluster.h"
#include "kernels/cuda/rows/norm_row.cuh"

namespace moeserve::cuda {

// The products that a warp computes at a time (see ProductTile).
template <typename T_, int kRowTile_, int kColumnTile_>
struct RouteWarpTile {
  using T = T_;
  static constexpr int kRowTile = kRowTile_, kColumnTile = kColumnTile_;
  static constexpr bool kManySums = false, kHasPlanes = false;
};

namespace {

// The elements of rows and weights are copied in segments, so that the sums of the first ones are
// computed while the others arrive.
constexpr int kCopySegments = 4;

// Number of warps of a block. The kernel for any selection needs more registers.
template <RouteKernelKind kKind>
constexpr int kClusterWarpsOf = kKind == RouteKernelKind::kAny ? 12 : kRouteClusterWarps;

struct RouteClusterArgs {
  RouteKernelArgs route;
  RouteClusterShape shape;
  bool whole_pieces = false;  // rows consist of whole 16-byte pieces
  bool bulk_rows = false;     // they are copied by bulk copies
};

// What a launch computes before it routes: nothing, or a norm, whose NormParams are an argument.
struct NoNorm {};

// A block's shared memory.
template <typename T>
struct ClusterMemory {
  uint64_t* copied;  // mbarriers of the segments
  uint64_t* sent;    // mbarrier of the products, in the first block
  float* products;   // [rows][columns], in the first block
  char* rest;        // reused in the first block
  float* weights;    // [block_columns][row_elements]
  T* rows;           // [rows][row_elements]
};

template <typename T>
__device__ __forceinline__ ClusterMemory<T> CarveCluster(const RouteClusterShape& shape,
                                                         char* memory) {
  ClusterMemory<T> m;
  m.copied = reinterpret_cast<uint64_t*>(memory);
  m.sent = m.copied + kCopySegments;
  m.products = reinterpret_cast<float*>(memory + kRouteClusterBarrierBytes);
  m.rest = memory + shape.header_bytes;
  m.weights = reinterpret_cast<float*>(m.rest);
  m.rows = reinterpret_cast<T*>(m.rest + shape.weight_bytes);
  return m;
}

// The columns of a block, and the segments of the elements.
struct BlockPart {
  int first_column, columns;
  int steps, segment_steps;

  __device__ __forceinline__ int Begin(int segment) const {
    return min(segment * segment_steps, steps) * kRouterStep;
  }
  __device__ __forceinline__ int Elements(int segment) const {
    return Begin(segment + 1) - Begin(segment);
  }
  // Returns the elements of a row in a segment that is not padding.
  __device__ __forceinline__ int OfRow(int segment, int width) const {
    return max(min(width, Begin(segment + 1)) - Begin(segment), 0);
  }
};

// Calls copy(segment, index) for each of `count` pieces of each segment, first those of the first
// segment, by the lanes of a warp.
template <typename Copy>
__device__ __forceinline__ void ForEachPiece(int count, int lane, const Copy& copy) {
  for (int i = lane; i < count * kCopySegments; i += 32) {
    const int segment = i / count;
    copy(segment, i - segment * count);
  }
}

// Initialises the mbarriers and starts the copies of the weights of the block's columns.
template <typename T>
__device__ __forceinline__ void StartWeights(const RouteClusterArgs& a, const BlockPart& part,
                                             const ClusterMemory<T>& m, bool first_block) {
  const ProductArgs& p = a.route.product;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kCopySegments; ++s) MbarrierInit(m.copied + s, 1);
    if (first_block) MbarrierInit(m.sent, 1);
    MbarrierInitFence();
    for (int s = 0; s < kCopySegments; ++s) {
      int bytes = part.columns * part.Elements(s) * 4;
      if (a.bulk_rows) bytes += p.rows * part.OfRow(s, p.width) * static_cast<int>(sizeof(T));
      MbarrierArriveExpect(m.copied + s, static_cast<uint32_t>(bytes));
    }
    if (first_block) MbarrierArriveExpect(m.sent, static_cast<uint32_t>(p.rows * p.columns * 4));
  }
  __syncwarp();
  ForEachPiece(part.columns, lane, [&](int segment, int column) {
    const int begin = part.Begin(segment), elements = part.Elements(segment);
    if (elements == 0) return;
    CopyBulkAsync(m.weights + column * a.shape.row_elements + begin,
                  p.weights + (part.first_column + column) * p.padded + begin,
                  static_cast<uint32_t>(elements * 4), m.copied + segment);
  });
}

// Writes zeros behind the last elements of the rows.
template <typename T>
__device__ __forceinline__ void ClearPadding(const RouteClusterArgs& a, const ClusterMemory<T>& m) {
  const int width = a.route.product.width;
  const int padding = static_cast<int>(a.shape.row_elements) - width;
  for (int i = static_cast<int>(threadIdx.x); i < a.route.product.rows * padding;
       i += static_cast<int>(blockDim.x)) {
    const int row = i / padding;
    m.rows[row * a.shape.row_elements + width + i - row * padding] = T{0};
  }
}

// Computes the rows of a norm; the block has those from its rank on, in steps of the number of
// blocks. `shared` has room for kNormSharedFloats per team.
template <bool kBlock>
__device__ __forceinline__ void NormRows(const NormParams& p, float* shared) {
  constexpr int kTeam = kBlock ? kNormBlock : 32;
  const int thread = static_cast<int>(threadIdx.x);
  const int rank = static_cast<int>(ClusterRank()), blocks = static_cast<int>(ClusterBlocks());
  const int teams = static_cast<int>(blockDim.x) / kTeam, team = thread / kTeam;
  float* const of_team = shared + team * kNormSharedFloats;
  for (int first = rank; first < p.rows; first += teams * blocks) {
    const int row = first + team * blocks;
    if (kBlock) {
      if (first != rank) __syncthreads();  // the last rows have used `shared`
    } else if (row >= p.rows) {
      return;
    }
    const int item = row < p.rows ? row : -1;
    if (p.sum.row_offsets != nullptr) {
      NormVectorOf<kBlock, true>(p, item, thread % kTeam, of_team);
    } else {
      NormVectorOf<kBlock, false>(p, item, thread % kTeam, of_team);
    }
  }
}

// Copies the rows that the cluster has written by loads and stores, because bulk copies do not see
// them without a fence. The loads of a thread are independent of each other.
template <typename T>
__device__ __forceinline__ void CopyNormedRows(const RouteClusterArgs& a,
                                               const ClusterMemory<T>& m) {
  const ProductArgs& p = a.route.product;
  const T* input = static_cast<const T*>(p.input);
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
  const int pieces = a.whole_pieces ? p.width / kPiece : p.width;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < p.rows * pieces;
       i += static_cast<int>(blockDim.x)) {
    const int row = i / pieces, piece = i - row * pieces;
    T* const to = m.rows + row * a.shape.row_elements;
    const T* const from = input + row * p.stride;
    if (a.whole_pieces) {
      reinterpret_cast<uint4*>(to)[piece] = reinterpret_cast<const uint4*>(from)[piece];
    } else {
      to[piece] = from[piece];
    }
  }
}

// Copies the rows; bulk copies are started by the first warp.
template <typename T>
__device__ __forceinline__ void StartRows(const RouteClusterArgs& a, const BlockPart& part,
                                          const ClusterMemory<T>& m) {
  const ProductArgs& p = a.route.product;
  const T* input = static_cast<const T*>(p.input);
  if (!a.bulk_rows) {
    for (int i = static_cast<int>(threadIdx.x); i < p.rows * p.width;
         i += static_cast<int>(blockDim.x)) {
      const int row = i / p.width, element = i - row * p.width;
      m.rows[row * a.shape.row_elements + element] = input[row * p.stride + element];
    }
  } else if (threadIdx.x < 32) {
    ForEachPiece(p.rows, static_cast<int>(threadIdx.x), [&](int segment, int row) {
      const int begin = part.Begin(segment), elements = part.OfRow(segment, p.width);
      if (elements == 0) return;
      CopyBulkAsync(m.rows + row * a.shape.row_elements + begin, input + row * p.stride + begin,
                    static_cast<uint32_t>(elements * static_cast<int>(sizeof(T))),
                    m.copied + segment);
    });
  }
}

// Computes the block's products and sends them to the first block.
template <typename Tile>
__device__ __forceinline__ void SendProducts(const RouteClusterArgs& a, const BlockPart& part,
                                             const ClusterMemory<typename Tile::T>& m) {
  constexpr int kSums = Tile::kRowTile * Tile::kColumnTile;
  const ProductArgs& p = a.route.product;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int row_elements = static_cast<int>(a.shape.row_elements);
  const int column_tiles = (part.columns + Tile::kColumnTile - 1) / Tile::kColumnTile;
  const int tiles = (p.rows + Tile::kRowTile - 1) / Tile::kRowTile * column_tiles;
#pragma unroll 1
  for (int tile = warp; tile < tiles; tile += static_cast<int>(blockDim.x) / 32) {
    const int row_tile = tile / column_tiles;
    const int first_row = row_tile * Tile::kRowTile;
    const int first_column = (tile - row_tile * column_tiles) * Tile::kColumnTile;
    const float* weights = m.weights + first_column * row_elements;
    const typename Tile::T* rows = m.rows + first_row * row_elements;
    float sums[kSums] = {};
#pragma unroll 1
    for (int segment = 0; segment < kCopySegments; ++segment) {
      MbarrierWait(m.copied + segment, 0);
      const int end = part.Begin(segment + 1);
#pragma unroll 2
      for (int begin = part.Begin(segment); begin < end; begin += kRouterStep) {
        AddStep<Tile>(weights + begin, row_elements, reinterpret_cast<const char*>(rows + begin),
                      row_elements * static_cast<int>(sizeof(typename Tile::T)), lane, sums);
      }
    }
    SpreadTreeSums<kSums>(sums, lane);
    const int index = TreeSumIndex<kSums>(lane);
    const int row = first_row + index / Tile::kColumnTile;
    const int column = first_column + index % Tile::kColumnTile;
    if (lane % (32 / kSums) != 0 || row >= p.rows || column >= part.columns) continue;
    const int of_all = part.first_column + column;
    const float v = p.bias == nullptr ? sums[0] : sums[0] + p.bias[of_all];
    ClusterStoreAsync(ClusterAddress(m.products + row * p.columns + of_all, 0), v,
                      ClusterAddress(m.sent, 0));
  }
}

// The grid is one cluster. `norm` is NormParams or NoNorm.
template <typename T, RouteKernelKind kKind, typename Norm>
__global__ void __launch_bounds__(32 * kClusterWarpsOf<kKind>, 1)
    RouteClusterKernel(const RouteClusterArgs a, const Norm norm) {
  static_assert(kSharedRoutes <= 32 * kClusterWarpsOf<kKind>);
  constexpr bool kNorm = std::is_same_v<Norm, NormParams>;
  const ProductArgs& p = a.route.product;
  const ClusterMemory<T> m = CarveCluster<T>(a.shape, DynamicShared<char>());
  const int rank = static_cast<int>(ClusterRank());
  BlockPart part;
  part.first_column = rank * a.shape.block_columns;
  part.columns = max(min(a.shape.block_columns, p.columns - part.first_column), 0);
  part.steps = static_cast<int>(p.padded / kRouterStep);
  part.segment_steps = (part.steps + kCopySegments - 1) / kCopySegments;
  // Weights do not depend on earlier kernels.
  if (part.columns > 0 && threadIdx.x < 32) StartWeights(a, part, m, rank == 0);
  __syncwarp();
  if constexpr (kNorm) {
    static_assert(32 * kClusterWarpsOf<kKind> % kNormBlock == 0);
    GridDependencyPass();
    // The products arrive after the barrier of the cluster.
    if (NormTeam(norm.width) == kNormBlock) {
      NormRows<true>(norm, m.products);
    } else {
      NormRows<false>(norm, m.products);
    }
    __syncwarp();
  }
  ClusterArrive();
  if (part.columns > 0) ClearPadding(a, m);
  if constexpr (!kNorm) {
    GridDependencyPass();
    if (part.columns > 0) StartRows(a, part, m);
    __syncthreads();
  }
  ClusterWait();  // the first block's mbarrier is initialised, and the rows of a norm are written
  if constexpr (kNorm) {
    if (part.columns > 0) CopyNormedRows(a, m);
    __syncthreads();
  }
  if (a.shape.row_tile == 1) {
    SendProducts<RouteWarpTile<T, 1, 1>>(a, part, m);
  } else {
    SendProducts<RouteWarpTile<T, 4, 2>>(a, part, m);
  }
  if (rank > 0) return;
  // With all products, all warps of this block have read the rows and weights.
  MbarrierWait(m.sent, 0);
  const RouteKernelArgs& route = a.route;
  const bool keeps = KeepsRoutes(route);
  const RoutesOut out = PlaceOfRoutes(route, keeps, m.products + p.rows * p.columns);
  SelectRows<kKind>(route, 0, p.rows, m.products, p.columns, out, m.rest);
  if (!route.build_plan) return;
  __syncthreads();
  BuildPlanOf(route, keeps, out, m.rest);
}

template <typename T, RouteKernelKind kKind, typename Norm>
void LaunchClusterOf(RouteClusterArgs a, const Norm& norm, int blocks, cudaStream_t stream) {
  const RouteSettings& s = a.route.router.settings;
  const int64_t room = static_cast<int64_t>(SharedMemoryLimit()) - a.shape.header_bytes;
  a.route.select_bytes = static_cast<int>(
      kKind == RouteKernelKind::kAny ? SelectBytes(s, a.route.sort) : kSelectTopBytes);
  a.route.select_warps =
      static_cast<int>(std::min<int64_t>(kClusterWarpsOf<kKind>, room / a.route.select_bytes));
  int64_t shared = std::max(a.shape.weight_bytes + a.shape.row_bytes,
                            int64_t{a.route.select_warps} * a.route.select_bytes);
  if (a.route.build_plan) {
    shared = std::max(shared, OnePlanBytes(s.num_experts, a.route.product.rows));
  }
  MOESERVE_CHECK(a.route.select_warps > 0 && shared <= room, "memory of a router's cluster");
  Launch(RouteClusterKernel<T, kKind, Norm>,
         {.grid = dim3(static_cast<unsigned>(blocks)),
          .block = dim3(32 * kClusterWarpsOf<kKind>),
          .shared_bytes = static_cast<size_t>(a.shape.header_bytes + shared),
          .stream = stream,
          .overlaps_predecessor = true,
          .cluster = dim3(static_cast<unsigned>(blocks))},
         a, norm);
}

template <RouteKernelKind kKind, typename Norm>
void LaunchClusterKind(const RouteClusterArgs& a, const Norm& norm, DType dtype, int blocks,
                       cudaStream_t stream) {
  if (dtype == DType::kBF16) {
    LaunchClusterOf<Bf16, kKind>(a, norm, blocks, stream);
  } else {
    LaunchClusterOf<float, kKind>(a, norm, blocks, stream);
  }
}

}  // namespace

int MostRouteClusterBlocks() {
  static Mutex mutex;
  static auto* const known ABSL_PT_GUARDED_BY(mutex) = new std::map<int, int>;
  if (!HasClusters()) return 0;
  int device = 0;
  MOESERVE_CHECK(cudaGetDevice(&device) == cudaSuccess, "no current CUDA device");
  MutexLock lock(mutex);
  const auto [entry, is_new] = known->try_emplace(device, 0);
  for (const unsigned blocks : {16u, 8u}) {
    if (!is_new || entry->second > 0) break;
    const LaunchShape shape{.grid = dim3(blocks),
                            .block = dim3(32 * kRouteClusterWarps),
                            .shared_bytes = SharedMemoryLimit(),
                            .cluster = dim3(blocks)};
    if (MaxActiveClusters(RouteClusterKernel<Bf16, RouteKernelKind::kTopOfDots, NoNorm>, shape) >
        0) {
      entry->second = static_cast<int>(blocks);
    }
  }
  return entry->second;
}

void LaunchRouteCluster(const RouteKernelArgs& args, DType dtype, RouteKernelKind kind, int blocks,
                        const NormLaunch* norm, cudaStream_t stream) {
  const ProductArgs& p = args.product;
  const int element = static_cast<int>(SizeOf(dtype));
  const bool whole = p.aligned && p.width * element % 16 == 0;
  const RouteClusterArgs a{.route = args,
                           .shape = ClusterShapeOf(p.rows, p.columns, p.width, element, blocks),
                           .whole_pieces = whole,
                           .bulk_rows = whole && norm == nullptr};
  MOESERVE_CHECK(a.shape.row_elements == p.padded, "width of a router's weights");
  MOESERVE_CHECK(norm == nullptr || kind == RouteKernelKind::kTopOfDots, "the router of a norm");
  if (norm != nullptr) {
    LaunchClusterKind<RouteKernelKind::kTopOfDots>(a, NormParamsOf(*norm), dtype, blocks, stream);
  } else if (kind == RouteKernelKind::kTopOfDots) {
    LaunchClusterKind<RouteKernelKind::kTopOfDots>(a, NoNorm{}, dtype, blocks, stream);
  } else {
    LaunchClusterKind<RouteKernelKind::kAny>(a, NoNorm{}, dtype, blocks, stream);
  }
}

}  // namespace moeserve::cuda

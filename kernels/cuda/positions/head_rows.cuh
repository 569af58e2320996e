// Norms and rotary positions of the heads of a row by a team of threads: a warp, or all threads of
// a block. Kernels that do more include it, so that their rows have the bits of LaunchNorm() and
// LaunchRope().
#pragma once

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/positions/norm_rope_append.h"
#include "kernels/cuda/positions/rope.cuh"
#include "kernels/cuda/rows/norm.cuh"

namespace moeserve::cuda {

inline constexpr int kHeadUnits = 4;  // number of units that a thread loads at once

// Adjacent heads of the queries, keys or values of a token. A unit is either a pair of dimensions
// that is rotated, or a single dimension that is not rotated. sink(head, column, value) stores an
// element.
template <typename Sink>
struct HeadRows {
  Sink sink;
  int heads = 1;
  int dim = 0;
  int units = 0;  // of each head; those beyond its dimensions are zeros
  int pairs = 0;
  bool interleaved = false;
  int distance = 0;             // of the dimensions of a pair, if not interleaved
  const float* from = nullptr;  // first head of the input
  const float2* angles = nullptr;
  VectorNorm norm = {};

  // The elements of up to kHeadUnits units that a thread has loaded.
  struct Loaded {
    float x[kHeadUnits];
    float y[kHeadUnits];  // second element of a pair
    float2 angle[kHeadUnits];
    float x_scale[kHeadUnits];
    float y_scale[kHeadUnits];
  };

  __device__ __forceinline__ bool normed() const { return norm.scales != nullptr; }
  __device__ __forceinline__ int column(int unit) const {
    if (unit < pairs) return interleaved ? 2 * unit : unit;
    return unit < partner() ? unit : unit + pairs;
  }
  __device__ __forceinline__ int partner() const { return interleaved ? 1 : distance; }

  // Calls body(j, head, unit, column, offset from the first head) for units begin, begin + step and
  // so on, up to the number of units that a thread loads at once.
  template <typename Body>
  __device__ __forceinline__ void ForUnits(int begin, int step, const Body& body) const {
#pragma unroll
    for (int j = 0; j < kHeadUnits; ++j) {
      const int n = begin + j * step;
      if (n >= heads * units) break;
      const int head = heads == 1 ? 0 : n / units, unit = n - head * units;
      const int c = column(unit);
      body(j, head, unit, c, head * dim + c);
    }
  }

  __device__ __forceinline__ void Load(int begin, int step, Loaded& l) const {
    ForUnits(begin, step, [&](int j, int, int unit, int c, int at) {
      l.x[j] = c < dim ? from[at] : 0.0f;
      if (normed() && c < dim) l.x_scale[j] = norm.scales[at];
      if (unit < pairs) {
        l.y[j] = from[at + partner()];
        l.angle[j] = angles[unit];
        if (normed()) l.y_scale[j] = norm.scales[at + partner()];
      }
    });
  }

  __device__ __forceinline__ void Finish(int begin, int step, const NormFactors& factors,
                                         const Loaded& l) const {
    ForUnits(begin, step, [&](int j, int head, int unit, int c, int at) {
      float x = l.x[j], y = l.y[j];
      if (normed() && c < dim) {
        x = factors(x, l.x_scale[j]);
        if (norm.shifts != nullptr) x += norm.shifts[at];
      }
      if (unit < pairs) {
        if (normed()) {
          y = factors(y, l.y_scale[j]);
          if (norm.shifts != nullptr) y += norm.shifts[at + partner()];
        }
        Turn(x, y, l.angle[j]);
        sink(head, c + partner(), y);
      }
      sink(head, c, x);
    });
  }

  // Computes and stores all heads. With kBlock, the threads of the block share them, and they are
  // normalised as one vector; otherwise a warp computes one head. A thread issues all its loads
  // before the first sum waits for one of them; the norm's own loads of the same elements then hit
  // the cache. `shared` is that of FactorsOf(), which only kBlock uses.
  template <bool kBlock>
  __device__ __forceinline__ void Run(int lane, float* shared) const {
    constexpr int kTeam = kBlock ? kNormBlock : 32;
    Loaded loaded;
    Load(lane, kTeam, loaded);
    NormFactors factors;
    if (normed()) {
      const int width = heads * dim;
      NormVector vector;
      vector.x = const_cast<float*>(from);
      vector.threads = kBlock ? NormTeam(width) : 32;
      vector.n = lane < vector.threads ? width : 0;
      vector.lane = lane;
      vector.aligned = Aligned16(vector.x);
      vector.Load();
      factors = FactorsOf<kBlock>(vector, width, norm.layer, norm.eps, shared);
    }
    // Each element is written by the thread that has read it, so rows can be updated in place.
    const int total = heads * units;
    for (int n = lane; n < total; n += kHeadUnits * kTeam) {
      if (n != lane) Load(n, kTeam, loaded);
      Finish(n, kTeam, factors, loaded);
    }
  }
};

// Writes elements of a token's keys or values to the cache.
template <bool kBf16>
struct CacheSink {
  const KvLayerView& cache;
  void* data = nullptr;  // keys or values of the cache
  int64_t first = 0;     // index of the first head of the token's block in `data`
  int row = 0;           // of the token in its block

  __device__ __forceinline__ CacheSink(const KvLayerView& view) : cache(view) {}

  // Finds the place of a token's keys or values from kv head `head` on.
  __device__ __forceinline__ void Find(const StepView& step, int sequence, int position, bool keys,
                                       int head) {
    const int64_t block =
        step.page_tables[int64_t{sequence} * step.table_stride + position / kPageTokens];
    data = keys ? cache.keys : cache.values;
    first = block * cache.block_stride + head * cache.head_stride;
    row = position % kPageTokens;
  }
  __device__ __forceinline__ void operator()(int head, int c, float v) const {
    const int64_t at = first + head * cache.head_stride + cache.ElementOf(row, c);
    if constexpr (kBf16) {
      static_cast<Bf16*>(data)[at] = static_cast<Bf16>(PackBf16(v, 0.0f));
    } else {
      static_cast<float*>(data)[at] = v;
    }
  }
};

}  // namespace moeserve::cuda

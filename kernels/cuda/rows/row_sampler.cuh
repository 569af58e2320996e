// A block or a cluster of blocks draws a token from one row of logits. Each warp processes a
// segment of adjacent tokens, so the segment of the drawn token is found from the sums of the
// segments. A block keeps its tokens in shared memory after the first pass over them, if they fit.
// The blocks of a cluster send each other the sums over their tokens. All sums are sums of
// integers, so the result does not depend on the number of blocks.
#pragma once

#include "kernels/backend.h"
#include "kernels/base/sampling.h"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/rows/sampler_sums.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kMaxWarps = 32;
constexpr int kUnroll = 4;
constexpr int kLoads = 8;  // number of loads from global memory that a thread issues at a time
constexpr int kMaxToken = 0x7fffffff;
constexpr int kMaxBlocks = 16;  // per cluster

struct SharedState {
  // A value per warp. The blocks of a cluster use the two arrays in turn (see Exchange()).
  uint64_t scratch[2][kMaxWarps];
  uint64_t segment[kMaxWarps];  // sums over the segments of the warps
  // Sums per bin, in two 32-bit halves, because only 32-bit atomics are fast.
  uint32_t low[kSamplingBins];
  uint32_t high[kSamplingBins];
  int32_t token;
};
constexpr size_t kStateBytes = (sizeof(SharedState) + 15) / 16 * 16;
// What the blocks of a cluster send to each other, in two buffers that are used in turn.
struct ClusterState {
  uint64_t values[2][kMaxBlocks][32];
  uint64_t barriers[2];
};
constexpr size_t kClusterStateBytes = sizeof(ClusterState);
static_assert(kClusterStateBytes % 16 == 0);
static_assert(kSamplingBins == 32 * 32, "found by a warp in two steps");

__host__ __device__ constexpr int SegmentTokens(int vocabulary, int blocks, int warps) {
  return (vocabulary + 32 * blocks * warps - 1) / (32 * blocks * warps) * 32;
}

// A step of Exchange(). Not inlined, because it is called at many places.
__device__ __attribute__((noinline))
const uint64_t (*SendToBlocks(ClusterState& cluster, uint64_t value, uint32_t count,
                              uint32_t exchange))[32] {
  const uint32_t buffer = exchange % 2, parity = exchange / 2 % 2;
  const uint32_t lane = threadIdx.x % 32, blocks = ClusterBlocks();
  uint64_t* barrier = &cluster.barriers[buffer];
  if (lane < count) {
    const uint64_t* place = &cluster.values[buffer][ClusterRank()][lane];
    for (uint32_t peer = threadIdx.x / 32; peer < blocks; peer += blockDim.x / 32) {
      ClusterStoreAsync(ClusterAddress(place, peer), value, ClusterAddress(barrier, peer));
    }
  }
  if (threadIdx.x == 0) {
    MbarrierArriveExpect(barrier, static_cast<uint32_t>(sizeof(uint64_t)) * count * blocks);
  }
  MbarrierWait(barrier, parity);
  return cluster.values[buffer];
}

enum class Measure { kCount, kWeight };

// Samples from the row of a block or cluster. All threads must call the methods together, with the
// same arguments.
template <bool kCached, bool kClustered>
class RowSampler {
 public:
  // `cluster` is null outside of clusters. The cache has space for the tokens of the block.
  __device__ RowSampler(SharedState& shared, ClusterState* cluster, const float* logits,
                        float* cache, int vocabulary, int drawable)
      : shared_(shared),
        cluster_(cluster),
        logits_(logits),
        cache_(cache),
        all_(vocabulary),
        vocabulary_(drawable > 0 ? min(drawable, vocabulary) : vocabulary),
        lane_(static_cast<int>(threadIdx.x % 32)),
        warp_(static_cast<int>(threadIdx.x / 32)),
        warps_(static_cast<int>(blockDim.x / 32)),
        rank_(kClustered ? static_cast<int>(ClusterRank()) : 0),
        blocks_(kClustered ? static_cast<int>(ClusterBlocks()) : 1),
        segment_tokens_(SegmentTokens(vocabulary, blocks_, warps_)),
        block_begin_(rank_ * warps_ * segment_tokens_) {}

  __device__ void Run(const SampleRow& row, SampleResult& result);

 private:
  struct Bin {
    int index;  // -1 if the target is not reached
    uint64_t before;
    uint64_t amount;
  };

  // Returns the logit of a token of this block.
  __device__ float Logit(int token) const {
    if constexpr (kCached) return cache_[token - block_begin_];
    return logits_[token];
  }
  // Returns the first token of the segment of a warp of this block.
  __device__ int SegmentBegin(int warp) const { return block_begin_ + warp * segment_tokens_; }
  __device__ float Exponent(float logit) const { return (logit - highest_) * scale_; }

  // Calls body(token, logit) for the tokens that this thread processes and that may be drawn, in
  // ascending order.
  template <typename Body>
  __device__ __forceinline__ void ForTokens(const Body& body) const {
    const int end = min(SegmentBegin(warp_ + 1), vocabulary_);
#pragma unroll kUnroll
    for (int token = SegmentBegin(warp_) + lane_; token < end; token += 32) {
      body(token, Logit(token));
    }
  }

  // Calls body(logit) for the tokens that this thread processes and that may not be drawn.
  template <typename Body>
  __device__ __forceinline__ void ForOthers(const Body& body) const {
    const int end = min(SegmentBegin(warp_ + 1), all_);
    for (int token = SegmentBegin(warp_) + lane_; token < end; token += 32) {
      if (token >= vocabulary_) body(Logit(token));
    }
  }

  // Sends values to all blocks of the cluster, the own one included, and waits for those of all
  // blocks; returns 32 values per block. The warps that send call own(), whose result in the first
  // `count` lanes are the values. A thread may read them until it takes part in the next exchange.
  //
  // A buffer or scratch array is used again two exchanges later. A block gets there when it has the
  // values of the exchange in between, which the others send after the barrier below, when their
  // threads have read those of this one.
  template <typename Own>
  __device__ const uint64_t (*Exchange(uint32_t count, const Own& own))[32] {
    __syncthreads();
    uint64_t value = 0;
    if (warp_ < blocks_) value = own();
    return SendToBlocks(*cluster_, value, count, exchanges_++);
  }
  __device__ uint64_t* Scratch() { return shared_.scratch[kClustered ? exchanges_ % 2 : 0]; }

  // Combines the values of all threads that process the row.
  template <typename Op>
  __device__ uint64_t Reduce(uint64_t value, Op op) {
    uint64_t* scratch = Scratch();
    value = WarpReduce(value, op);
    if (lane_ == 0) scratch[warp_] = value;
    const auto of_block = [&] { return WarpReduce(lane_ < warps_ ? scratch[lane_] : 0, op); };
    if constexpr (kClustered) {
      const uint64_t(*values)[32] = Exchange(1, of_block);
      return WarpReduce(lane_ < blocks_ ? values[lane_][0] : 0, op);
    } else {
      __syncthreads();
      value = of_block();
      __syncthreads();
      return value;
    }
  }
  __device__ bool All(bool value) {
    const bool of_block = __syncthreads_and(value) != 0;
    if constexpr (!kClustered) return of_block;
    return Reduce(of_block ? 0 : 1, Largest()) == 0;
  }
  // Returns the token that one of the blocks has found.
  __device__ int Share(bool found, int token) {
    if constexpr (!kClustered) return token;
    const uint64_t own = found ? static_cast<uint64_t>(token) + 1 : 0;
    const uint64_t(*values)[32] = Exchange(1, [&] { return own; });
    return static_cast<int>(WarpReduce(lane_ < blocks_ ? values[lane_][0] : 0, Largest())) - 1;
  }

  // Stores the sum of each segment for FindSegment() and returns the sum over all segments.
  __device__ uint64_t SumSegments(uint64_t value) {
    value = WarpReduce(value, Add());
    __syncthreads();  // waits until earlier reads of the sums are done
    if (lane_ == 0) shared_.segment[warp_] = value;
    const auto of_block = [&] {
      return WarpReduce(lane_ < warps_ ? shared_.segment[lane_] : 0, Add());
    };
    if constexpr (kClustered) {
      const uint64_t(*values)[32] = Exchange(1, of_block);
      block_sum_ = lane_ < blocks_ ? values[lane_][0] : 0;
      return WarpReduce(block_sum_, Add());
    } else {
      __syncthreads();
      return of_block();
    }
  }
  // The segment in which the running sum exceeds a target, and the sum before it.
  struct Segment {
    bool here;  // whether it is in this block; otherwise, the other members are not set
    int begin;
    uint64_t before;
  };
  __device__ Segment FindSegment(uint64_t target) const {
    uint64_t before = 0;
    if constexpr (kClustered) {
      const Place block = WarpFind(block_sum_, target);
      if (block.lane != rank_) return {false, 0, 0};
      before = block.before;
    }
    const Place place = WarpFind(lane_ < warps_ ? shared_.segment[lane_] : 0, target - before);
    return {true, SegmentBegin(place.lane), before + place.before};
  }

  __device__ uint64_t KeptWeight(int token, float logit, const SamplingCutoff& cutoff,
                                 float min_p) const {
    if (!cutoff.Keeps(logit, token)) return 0;
    const float share = SamplingExp(Exponent(logit));
    return SamplingWeight(share >= min_p ? share : 0.0f);
  }
  __device__ uint64_t SumWeights(const SamplingCutoff& cutoff, float min_p) {
    uint64_t sum = 0;
    ForTokens([&](int token, float l) { sum += KeptWeight(token, l, cutoff, min_p); });
    return SumSegments(sum);
  }
  __device__ uint64_t Amount(Measure measure, float logit) const {
    return measure == Measure::kCount ? 1 : SamplingWeight(SamplingExp(Exponent(logit)));
  }

  __device__ bool Load();  // fills the cache, best_ and highest_; returns false if a logit is NaN
  __device__ SamplingCutoff Filter(const SampleRow& row);
  __device__ SamplingCutoff Cut(Measure measure, uint64_t target, float floor);
  __device__ int FindTie(uint32_t order, uint64_t index);
  __device__ int TieInSegment(int begin, uint32_t order, uint64_t index) const;
  __device__ int Draw(const SamplingCutoff& cutoff, float min_p, uint64_t target);
  __device__ int DrawInSegment(const Segment& segment, const SamplingCutoff& cutoff, float min_p,
                               uint64_t target);
  __device__ void FillLogprobs(int token, int alternatives, SampleResult& result);

  __device__ void ClearBins() {
    for (int i = static_cast<int>(threadIdx.x); i < kSamplingBins; i += warps_ * 32) {
      shared_.low[i] = 0;
      shared_.high[i] = 0;
    }
    __syncthreads();
  }
  __device__ void AddToBin(int bin, uint64_t amount) {
    const auto low = static_cast<uint32_t>(amount);
    const uint32_t old = atomicAdd(&shared_.low[bin], low);
    const uint32_t high = static_cast<uint32_t>(amount >> 32) + (old + low < old ? 1u : 0u);
    if (high != 0) atomicAdd(&shared_.high[bin], high);
  }
  __device__ uint64_t AmountOfBin(int bin) const {
    return static_cast<uint64_t>(shared_.high[bin]) << 32 | shared_.low[bin];
  }
  __device__ Bin FindBin(uint64_t target);

  SharedState& shared_;
  ClusterState* cluster_;
  const float* logits_;
  float* cache_;
  int all_;         // number of tokens
  int vocabulary_;  // number of tokens that may be drawn, which are the first ones
  int lane_;
  int warp_;
  int warps_;
  int rank_;    // of the block in the cluster
  int blocks_;  // in the cluster
  int segment_tokens_;
  int block_begin_;  // first token of the block
  uint32_t exchanges_ = 0;
  uint64_t block_sum_ = 0;  // lane l has the sum of block l's segments
  int best_ = 0;
  float highest_ = 0.0f;
  float scale_ = 0.0f;
  bool finite_ = true;
};

template <bool kCached, bool kClustered>
__device__ bool RowSampler<kCached, kClustered>::Load() {
  bool finite = true;
  const int first = SegmentBegin(warp_) + lane_;
  const int end = min(SegmentBegin(warp_ + 1), all_);
  float highest = -INFINITY;
  int best = first;
  for (int begin = first; begin < end; begin += 32 * kLoads) {
    // All loads are issued first, because stores into the cache would delay them.
    float loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int token = begin + 32 * i;
      loaded[i] = token < end ? logits_[token] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int token = begin + 32 * i;
      if (token >= end) break;
      const float logit = loaded[i];
      if constexpr (kCached) cache_[token - block_begin_] = logit;
      finite = finite && logit - logit == 0.0f;
      if (logit > highest && token < vocabulary_) {
        highest = logit;
        best = token;
      }
    }
  }
  uint64_t probability = first < min(end, vocabulary_) ? Probability(highest, best) : 0;
  if constexpr (kClustered) {
    ClusterWait();  // for the start of the other blocks
    const uint64_t bad = __syncthreads_and(finite) != 0 ? 0 : 1;
    probability = WarpReduce(probability, Largest());
    uint64_t* scratch = Scratch();
    if (lane_ == 0) scratch[warp_] = probability;
    const uint64_t(*values)[32] = Exchange(2, [&] {
      const uint64_t of_block = WarpReduce(lane_ < warps_ ? scratch[lane_] : 0, Largest());
      return lane_ == 0 ? of_block : bad;
    });
    probability = WarpReduce(lane_ < blocks_ ? values[lane_][0] : 0, Largest());
    finite_ = __any_sync(kFullMask, lane_ < blocks_ && values[lane_][1] != 0) == 0;
  } else {
    probability = Reduce(probability, Largest());
    finite_ = __syncthreads_and(finite) != 0;
  }
  best_ = TokenOf(probability);
  highest_ = F32OfOrder(static_cast<uint32_t>(probability >> 32));
  if (finite_) return true;
  bool numbers = true;
  ForTokens([&](int, float logit) { numbers = numbers && logit == logit; });
  ForOthers([&](float logit) { numbers = numbers && logit == logit; });
  return All(numbers);
}

// Returns the bin at which the running sum reaches `target` > 0. After the call, the bins may be
// cleared.
template <bool kCached, bool kClustered>
__device__ typename RowSampler<kCached, kClustered>::Bin RowSampler<kCached, kClustered>::FindBin(
    uint64_t target) {
  __syncthreads();
  uint64_t* scratch = Scratch();
  for (int chunk = warp_; chunk < 32; chunk += warps_) {
    const uint64_t sum = WarpReduce(AmountOfBin(chunk * 32 + lane_), Add());
    if (lane_ == 0) scratch[chunk] = sum;
  }
  const auto add_blocks = [&](const uint64_t(*values)[32]) {
    uint64_t sum = 0;
    for (int block = 0; block < blocks_; ++block) sum += values[block][lane_];
    return sum;
  };
  uint64_t chunk_amount;
  if constexpr (kClustered) {
    chunk_amount = add_blocks(Exchange(32, [&] { return scratch[lane_]; }));
  } else {
    __syncthreads();
    chunk_amount = scratch[lane_];
  }
  const Place chunk = WarpFind(chunk_amount, target - 1);
  Bin bin{-1, 0, 0};
  if (chunk.lane >= 0) {
    uint64_t amount;
    if constexpr (kClustered) {
      amount = add_blocks(Exchange(32, [&] { return AmountOfBin(chunk.lane * 32 + lane_); }));
    } else {
      amount = AmountOfBin(chunk.lane * 32 + lane_);
    }
    const Place place = WarpFind(amount, target - 1 - chunk.before);
    bin = {chunk.lane * 32 + place.lane, chunk.before + place.before,
           __shfl_sync(kFullMask, amount, place.lane)};
  }
  __syncthreads();
  return bin;
}

// Returns the cutoff of the shortest sequence of most probable tokens that contains `target`
// tokens, or that has a total weight of `target`. Only tokens whose shifted logit is at least
// `floor` are considered; if they do not suffice, the cutoff keeps all tokens.
template <bool kCached, bool kClustered>
__device__ SamplingCutoff RowSampler<kCached, kClustered>::Cut(Measure measure, uint64_t target,
                                                               float floor) {
  const float bins_per_unit = SamplingBinsPerUnit(floor);
  ClearBins();
  ForTokens([&](int, float logit) {
    const float x = Exponent(logit);
    if (x >= floor) AddToBin(SamplingBin(x, bins_per_unit), Amount(measure, logit));
  });
  Bin bin = FindBin(target);
  if (bin.index < 0) return {-INFINITY, kMaxToken};
  target -= bin.before;
  // `range` covers the logits in the bin. The following steps divide the range until it contains a
  // single logit.
  uint64_t range = 0;
  ForTokens([&](int, float logit) {
    const float x = Exponent(logit);
    if (x >= floor && SamplingBin(x, bins_per_unit) == bin.index) {
      const uint32_t order = OrderOfF32(logit);
      range = LargestHalves()(range, static_cast<uint64_t>(order) << 32 | ~order);
    }
  });
  range = Reduce(range, LargestHalves());
  auto highest = static_cast<uint32_t>(range >> 32);
  uint32_t lowest = ~static_cast<uint32_t>(range);
  while (highest != lowest) {
    const int shift = max(0, 22 - __clz(static_cast<int>(highest - lowest)));
    ClearBins();
    ForTokens([&](int, float logit) {
      const uint32_t order = OrderOfF32(logit);
      if (order >= lowest && order <= highest) {
        AddToBin(static_cast<int>((highest - order) >> shift), Amount(measure, logit));
      }
    });
    bin = FindBin(target);
    target -= bin.before;
    highest -= static_cast<uint32_t>(bin.index) << shift;
    lowest = highest - ((1u << shift) - 1);  // cannot wrap around, because no order is that small
  }
  const float logit = F32OfOrder(highest);
  const uint64_t each = Amount(measure, logit);
  const uint64_t index = (target - 1) / each;
  return {logit, index + 1 == bin.amount / each ? kMaxToken : FindTie(highest, index)};
}

// Returns the token with index `index` among the tokens with this logit, in ascending order of ids.
// There are more than `index` such tokens.
template <bool kCached, bool kClustered>
__device__ int RowSampler<kCached, kClustered>::FindTie(uint32_t order, uint64_t index) {
  uint64_t ties = 0;
  ForTokens([&](int, float logit) { ties += OrderOfF32(logit) == order ? 1 : 0; });
  SumSegments(ties);
  const Segment segment = FindSegment(index);
  int token = 0;
  if (segment.here) token = TieInSegment(segment.begin, order, index - segment.before);
  return Share(segment.here, token);
}

// All warps of the block compute the same result.
template <bool kCached, bool kClustered>
__device__ int RowSampler<kCached, kClustered>::TieInSegment(int begin, uint32_t order,
                                                             uint64_t index) const {
  auto rest = static_cast<int>(index);
  const int end = min(begin + segment_tokens_, vocabulary_);
  for (int first = begin; first < end; first += 32) {
    const int token = first + lane_;
    uint32_t tied = __ballot_sync(kFullMask, token < end && OrderOfF32(Logit(token)) == order);
    if (rest < __popc(tied)) {
      for (; rest > 0; --rest) tied &= tied - 1;
      return first + __ffs(static_cast<int>(tied)) - 1;
    }
    rest -= __popc(tied);
  }
  return kMaxToken;  // not reached
}

template <bool kCached, bool kClustered>
__device__ SamplingCutoff RowSampler<kCached, kClustered>::Filter(const SampleRow& row) {
  SamplingCutoff cutoff{-INFINITY, kMaxToken};
  auto size = static_cast<uint64_t>(vocabulary_);
  if (row.top_k > 0 && row.top_k < vocabulary_) {
    size = static_cast<uint64_t>(row.top_k);
    cutoff = Cut(Measure::kCount, size, SamplingFloor(0));
  }
  if (row.top_p >= 1.0) return cutoff;
  const uint64_t total = SumWeights(cutoff, 0.0f);
  if (total == 0) return cutoff;
  const uint64_t weight = NucleusWeight(row.top_p, total);
  const float floor = RaisedFloor(SamplingFloor((total - weight) / size), Exponent(cutoff.logit));
  return Cut(Measure::kWeight, weight, floor);
}

// Returns the token at which the running sum of weights exceeds `target`. SumWeights() must have
// been called before with the same cutoff and min_p.
template <bool kCached, bool kClustered>
__device__ int RowSampler<kCached, kClustered>::Draw(const SamplingCutoff& cutoff, float min_p,
                                                     uint64_t target) {
  const Segment segment = FindSegment(target);
  int token = 0;
  if (segment.here) token = DrawInSegment(segment, cutoff, min_p, target);
  return Share(segment.here, token);
}

template <bool kCached, bool kClustered>
__device__ int RowSampler<kCached, kClustered>::DrawInSegment(const Segment& segment,
                                                              const SamplingCutoff& cutoff,
                                                              float min_p, uint64_t target) {
  uint64_t* scratch = Scratch();
  uint64_t rest = target - segment.before;
  const int begin = segment.begin;
  const int end = min(begin + segment_tokens_, vocabulary_);
  for (int first = begin; first < end; first += warps_ * 32) {
    const int token = first + static_cast<int>(threadIdx.x);
    const uint64_t weight = token < end ? KeptWeight(token, Logit(token), cutoff, min_p) : 0;
    const uint64_t of_warp = WarpReduce(weight, Add());
    if (lane_ == 0) scratch[warp_] = of_warp;
    __syncthreads();
    const uint64_t amount = lane_ < warps_ ? scratch[lane_] : 0;
    const Place warp = WarpFind(amount, rest);
    if (warp.lane >= 0) {
      if (warp.lane == warp_) {
        const Place place = WarpFind(weight, rest - warp.before);
        if (place.lane == lane_) shared_.token = token;
      }
      __syncthreads();
      return shared_.token;
    }
    rest -= WarpReduce(amount, Add());
    __syncthreads();
  }
  return best_;  // not reached
}

template <bool kCached, bool kClustered>
__device__ void RowSampler<kCached, kClustered>::FillLogprobs(int token, int alternatives,
                                                              SampleResult& result) {
  const float logit_of_token = logits_[token];
  const uint64_t chosen = Probability(logit_of_token, token);
  float highest = highest_;
  if (vocabulary_ < all_) {
    uint64_t key = Probability(highest_, 0);
    ForOthers([&](float logit) { key = Largest()(key, Probability(logit, 0)); });
    highest = F32OfOrder(static_cast<uint32_t>(Reduce(key, Largest()) >> 32));
  }
  ShareSum sum;
  uint64_t rank = 0;
  uint64_t best = 0;
  ForTokens([&](int t, float logit) {
    sum.Add(expf(logit - highest));
    const uint64_t probability = Probability(logit, t);
    rank += probability > chosen ? 1 : 0;
    best = probability > best ? probability : best;
  });
  ForOthers([&](float logit) { sum.Add(expf(logit - highest)); });
  sum.high = Reduce(sum.high, Add());
  sum.low = Reduce(sum.low, Add());
  rank = Reduce(rank, Add());
  const double log_sum = log(sum.Value(highest)) + static_cast<double>(highest);
  const bool writes = rank_ == 0 && threadIdx.x == 0;
  if (writes) {
    result.logprob = static_cast<float>(static_cast<double>(logit_of_token) - log_sum);
    result.rank = static_cast<int32_t>(rank);
  }
  alternatives = min(min(alternatives, kMaxAlternatives), vocabulary_);
  for (int i = 0; i < alternatives; ++i) {
    const uint64_t winner = Reduce(best, Largest());
    const int top = TokenOf(winner);
    if (writes) {
      result.top_token[i] = top;
      result.top_logprob[i] = static_cast<float>(static_cast<double>(logits_[top]) - log_sum);
    }
    if (best == winner) {
      // The thread that processes the winning token provides its next most probable token.
      best = 0;
      ForTokens([&](int t, float logit) {
        const uint64_t probability = Probability(logit, t);
        if (probability < winner && probability > best) best = probability;
      });
    }
  }
}

template <bool kCached, bool kClustered>
__device__ void RowSampler<kCached, kClustered>::Run(const SampleRow& row, SampleResult& result) {
  const bool numbers = Load();
  int token = -1;
  if (numbers) {
    token = best_;
    scale_ = row.scale;
    if (scale_ != 0.0f) {
      const SamplingCutoff cutoff = Filter(row);
      const uint64_t mass = SumWeights(cutoff, row.min_p);
      if (mass != 0) token = Draw(cutoff, row.min_p, DrawTarget(row.uniform, mass));
    }
    if (row.logprobs >= 0) FillLogprobs(token, row.logprobs, result);
  }
  if (rank_ == 0 && threadIdx.x == 0) {
    result.token = token;
    result.finite = finite_ ? 1 : 0;
  }
}

}  // namespace
}  // namespace moeserve::cuda

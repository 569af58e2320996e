#include <algorithm>

#include "base/check.h"
#include "kernels/base/sampling.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/rows/sampler.h"

namespace moeserve::cuda {
namespace {

// A block draws a token from one row of logits. Each warp processes a segment of adjacent tokens,
// so the segment of the drawn token is found from the sums of the segments. Rows that fit are kept
// in shared memory after the first pass over them.
constexpr int kMaxWarps = 32;
// A block has one warp per 32 * kTokensPerThread tokens of the vocabulary, up to kMaxWarps.
constexpr int kTokensPerThread = 8;
constexpr int kUnroll = 4;
constexpr int kLoads = 8;  // number of loads from global memory that a thread issues at a time
constexpr int kMaxToken = 0x7fffffff;

struct SharedState {
  uint64_t scratch[kMaxWarps];
  uint64_t segment[kMaxWarps];  // sums over the segments of the warps
  // Sums per bin, in two 32-bit halves, because only 32-bit atomics are fast.
  uint32_t low[kSamplingBins];
  uint32_t high[kSamplingBins];
  int32_t token;
};
constexpr size_t kStateBytes = (sizeof(SharedState) + 15) / 16 * 16;
static_assert(kSamplingBins == 32 * 32, "found by a warp in two steps");

struct Add {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Largest {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
// Returns the larger upper half and, separately, the larger lower half.
struct LargestHalves {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const {
    const uint64_t high = (a >> 32) > (b >> 32) ? a : b;
    const uint32_t low = max(static_cast<uint32_t>(a), static_cast<uint32_t>(b));
    return (high & 0xffffffff00000000u) | low;
  }
};

template <typename T, typename Op>
__device__ __forceinline__ T WarpReduce(T value, Op op) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value = op(value, __shfl_xor_sync(kFullMask, value, offset));
  }
  return value;
}

// The first lane at which the running sum of the lanes' amounts exceeds a target, and the sum
// before that lane.
struct Place {
  int lane;  // -1 if the total does not exceed the target
  uint64_t before;
};
__device__ __forceinline__ Place WarpFind(uint64_t amount, uint64_t target) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint64_t running = amount;
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t below = __shfl_up_sync(kFullMask, running, offset);
    if (lane >= offset) running += below;
  }
  const int found = __ffs(static_cast<int>(__ballot_sync(kFullMask, running > target))) - 1;
  return {found, __shfl_sync(kFullMask, running - amount, max(found, 0))};
}

// Returns a key that is larger for a more probable token (of equal logits, for the lower id); never
// 0.
__device__ __forceinline__ uint64_t Probability(float logit, int token) {
  return static_cast<uint64_t>(OrderOfF32(logit)) << 32 | ~static_cast<uint32_t>(token);
}
__device__ __forceinline__ int TokenOf(uint64_t probability) {
  return static_cast<int>(~static_cast<uint32_t>(probability));
}

enum class Measure { kCount, kWeight };

// Samples from the row of a block. All threads of the block must call the methods together, with
// the same arguments.
template <bool kCached>
class RowSampler {
 public:
  __device__ RowSampler(SharedState& shared, const float* logits, float* cache, int vocabulary,
                        int drawable)
      : shared_(shared),
        logits_(logits),
        cache_(cache),
        all_(vocabulary),
        vocabulary_(drawable > 0 ? min(drawable, vocabulary) : vocabulary),
        lane_(static_cast<int>(threadIdx.x % 32)),
        warp_(static_cast<int>(threadIdx.x / 32)),
        warps_(static_cast<int>(blockDim.x / 32)),
        segment_tokens_((vocabulary + static_cast<int>(blockDim.x) - 1) /
                        static_cast<int>(blockDim.x) * 32) {}

  __device__ void Run(const SampleRow& row, SampleResult& result);

 private:
  struct Bin {
    int index;  // -1 if the target is not reached
    uint64_t before;
    uint64_t amount;
  };

  __device__ float Logit(int token) const {
    if constexpr (kCached) return cache_[token];
    return logits_[token];
  }
  __device__ float Exponent(float logit) const { return (logit - highest_) * scale_; }

  // Calls body(token, logit) for the tokens that this thread processes and that may be drawn, in
  // ascending order.
  template <typename Body>
  __device__ __forceinline__ void ForTokens(const Body& body) const {
    const int end = min((warp_ + 1) * segment_tokens_, vocabulary_);
#pragma unroll kUnroll
    for (int token = warp_ * segment_tokens_ + lane_; token < end; token += 32) {
      body(token, Logit(token));
    }
  }

  // Calls body(logit) for the tokens that this thread processes and that may not be drawn.
  template <typename Body>
  __device__ __forceinline__ void ForOthers(const Body& body) const {
    const int end = min((warp_ + 1) * segment_tokens_, all_);
    for (int token = warp_ * segment_tokens_ + lane_; token < end; token += 32) {
      if (token >= vocabulary_) body(Logit(token));
    }
  }

  template <typename T, typename Op>
  __device__ T BlockReduce(T value, T identity, Op op) {
    static_assert(sizeof(T) == sizeof(uint64_t));
    T* scratch = reinterpret_cast<T*>(shared_.scratch);
    value = WarpReduce(value, op);
    if (lane_ == 0) scratch[warp_] = value;
    __syncthreads();
    value = WarpReduce(lane_ < warps_ ? scratch[lane_] : identity, op);
    __syncthreads();
    return value;
  }

  // Stores the sum of each segment for FindSegment() and returns the sum over all segments.
  __device__ uint64_t SumSegments(uint64_t value) {
    value = WarpReduce(value, Add());
    __syncthreads();  // waits until earlier reads of the sums are done
    if (lane_ == 0) shared_.segment[warp_] = value;
    __syncthreads();
    return WarpReduce(lane_ < warps_ ? shared_.segment[lane_] : 0, Add());
  }
  __device__ Place FindSegment(uint64_t target) const {
    return WarpFind(lane_ < warps_ ? shared_.segment[lane_] : 0, target);
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
  __device__ int Draw(const SamplingCutoff& cutoff, float min_p, uint64_t target);
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
  const float* logits_;
  float* cache_;
  int all_;         // number of tokens
  int vocabulary_;  // number of tokens that may be drawn, which are the first ones
  int lane_;
  int warp_;
  int warps_;
  int segment_tokens_;
  int best_ = 0;
  float highest_ = 0.0f;
  float scale_ = 0.0f;
  bool finite_ = true;
};

template <bool kCached>
__device__ bool RowSampler<kCached>::Load() {
  bool finite = true;
  const int first = warp_ * segment_tokens_ + lane_;
  const int end = min((warp_ + 1) * segment_tokens_, all_);
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
      if constexpr (kCached) cache_[token] = logit;
      finite = finite && logit - logit == 0.0f;
      if (logit > highest && token < vocabulary_) {
        highest = logit;
        best = token;
      }
    }
  }
  const uint64_t probability = BlockReduce(
      first < min(end, vocabulary_) ? Probability(highest, best) : 0, uint64_t{0}, Largest());
  best_ = TokenOf(probability);
  highest_ = F32OfOrder(static_cast<uint32_t>(probability >> 32));
  finite_ = __syncthreads_and(finite) != 0;
  if (finite_) return true;
  bool numbers = true;
  ForTokens([&](int, float logit) { numbers = numbers && logit == logit; });
  ForOthers([&](float logit) { numbers = numbers && logit == logit; });
  return __syncthreads_and(numbers) != 0;
}

// Returns the bin at which the running sum reaches `target` > 0. After the call, the bins may be
// cleared.
template <bool kCached>
__device__ typename RowSampler<kCached>::Bin RowSampler<kCached>::FindBin(uint64_t target) {
  __syncthreads();
  for (int chunk = warp_; chunk < 32; chunk += warps_) {
    const uint64_t sum = WarpReduce(AmountOfBin(chunk * 32 + lane_), Add());
    if (lane_ == 0) shared_.scratch[chunk] = sum;
  }
  __syncthreads();
  const Place chunk = WarpFind(shared_.scratch[lane_], target - 1);
  Bin bin{-1, 0, 0};
  if (chunk.lane >= 0) {
    const uint64_t amount = AmountOfBin(chunk.lane * 32 + lane_);
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
template <bool kCached>
__device__ SamplingCutoff RowSampler<kCached>::Cut(Measure measure, uint64_t target, float floor) {
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
  range = BlockReduce(range, uint64_t{0}, LargestHalves());
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
template <bool kCached>
__device__ int RowSampler<kCached>::FindTie(uint32_t order, uint64_t index) {
  uint64_t ties = 0;
  ForTokens([&](int, float logit) { ties += OrderOfF32(logit) == order ? 1 : 0; });
  SumSegments(ties);
  const Place segment = FindSegment(index);
  auto rest = static_cast<int>(index - segment.before);
  // All warps compute the same result.
  const int begin = segment.lane * segment_tokens_;
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

template <bool kCached>
__device__ SamplingCutoff RowSampler<kCached>::Filter(const SampleRow& row) {
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
template <bool kCached>
__device__ int RowSampler<kCached>::Draw(const SamplingCutoff& cutoff, float min_p,
                                         uint64_t target) {
  const Place segment = FindSegment(target);
  uint64_t rest = target - segment.before;
  const int begin = segment.lane * segment_tokens_;
  const int end = min(begin + segment_tokens_, vocabulary_);
  for (int first = begin; first < end; first += warps_ * 32) {
    const int token = first + static_cast<int>(threadIdx.x);
    const uint64_t weight = token < end ? KeptWeight(token, Logit(token), cutoff, min_p) : 0;
    const uint64_t of_warp = WarpReduce(weight, Add());
    if (lane_ == 0) shared_.scratch[warp_] = of_warp;
    __syncthreads();
    const uint64_t amount = lane_ < warps_ ? shared_.scratch[lane_] : 0;
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

template <bool kCached>
__device__ void RowSampler<kCached>::FillLogprobs(int token, int alternatives,
                                                  SampleResult& result) {
  const uint64_t chosen = Probability(Logit(token), token);
  float highest = highest_;
  if (vocabulary_ < all_) {
    uint64_t key = Probability(highest_, 0);
    ForOthers([&](float logit) { key = Largest()(key, Probability(logit, 0)); });
    key = BlockReduce(key, uint64_t{0}, Largest());
    highest = F32OfOrder(static_cast<uint32_t>(key >> 32));
  }
  double sum = 0.0;
  uint64_t rank = 0;
  uint64_t best = 0;
  ForTokens([&](int t, float logit) {
    sum += static_cast<double>(expf(logit - highest));
    const uint64_t probability = Probability(logit, t);
    rank += probability > chosen ? 1 : 0;
    best = probability > best ? probability : best;
  });
  ForOthers([&](float logit) { sum += static_cast<double>(expf(logit - highest)); });
  sum = BlockReduce(sum, 0.0, Add());
  rank = BlockReduce(rank, uint64_t{0}, Add());
  const double log_sum = log(sum) + static_cast<double>(highest);
  if (threadIdx.x == 0) {
    result.logprob = static_cast<float>(static_cast<double>(Logit(token)) - log_sum);
    result.rank = static_cast<int32_t>(rank);
  }
  alternatives = min(min(alternatives, kMaxAlternatives), vocabulary_);
  for (int i = 0; i < alternatives; ++i) {
    const uint64_t winner = BlockReduce(best, uint64_t{0}, Largest());
    const int top = TokenOf(winner);
    if (threadIdx.x == 0) {
      result.top_token[i] = top;
      result.top_logprob[i] = static_cast<float>(static_cast<double>(Logit(top)) - log_sum);
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

template <bool kCached>
__device__ void RowSampler<kCached>::Run(const SampleRow& row, SampleResult& result) {
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
  if (threadIdx.x == 0) {
    result.token = token;
    result.finite = finite_ ? 1 : 0;
  }
}

template <bool kCached>
__global__ void __launch_bounds__(kMaxWarps * 32, 1) SampleKernel(SampleLaunch args) {
  GridDependencyPass();
  const SampleRow row = args.rows[blockIdx.x];
  if (row.row < 0) return;
  char* memory = DynamicShared<char>();
  RowSampler<kCached> sampler(
      *reinterpret_cast<SharedState*>(memory), args.logits + row.row * args.stride,
      reinterpret_cast<float*>(memory + kStateBytes), args.vocabulary, row.drawable);
  sampler.Run(row, args.results[blockIdx.x]);
}

}  // namespace

void LaunchSample(const SampleLaunch& args, cudaStream_t stream) {
  MOESERVE_CHECK(args.vocabulary >= 1 && args.vocabulary <= 1 << 23 &&
                     args.stride >= args.vocabulary && args.count >= 0,
                 "shape of the logits");
  const int per_warp = 32 * kTokensPerThread;
  const int warps = std::min((args.vocabulary + per_warp - 1) / per_warp, kMaxWarps);
  LaunchShape shape{dim3(static_cast<unsigned>(args.count)),
                    dim3(static_cast<unsigned>(warps * 32)), kStateBytes, stream, true};
  const size_t with_row = kStateBytes + static_cast<size_t>(args.vocabulary) * sizeof(float);
  if (with_row <= SharedMemoryLimit()) {
    shape.shared_bytes = with_row;
    Launch(SampleKernel<true>, shape, args);
  } else {
    Launch(SampleKernel<false>, shape, args);
  }
}

}  // namespace moeserve::cuda

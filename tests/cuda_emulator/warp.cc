#include "tests/cuda_emulator/warp.h"

#include <algorithm>

namespace moeserve::emulator {
namespace {

template <Shuffle kKind>
void ComputeShuffle(void* const* deposits, uint32_t arrived, int width) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (((arrived >> lane) & 1u) == 0) continue;
    auto* own = static_cast<ShuffleDeposit*>(deposits[lane]);
    const int begin = lane & ~(width - 1);
    int source = lane;
    switch (kKind) {
      case Shuffle::kIndex:
        source = begin + (own->argument & (width - 1));
        break;
      case Shuffle::kXor:
        // As on hardware, a lane outside its segment can be read only in lower segments.
        source = lane ^ (own->argument & 31);
        if (source >= begin + width) source = lane;
        break;
      case Shuffle::kUp:
        source = lane - (own->argument & 31);
        if (source < begin) source = lane;
        break;
      case Shuffle::kDown:
        source = lane + (own->argument & 31);
        if (source >= begin + width) source = lane;
        break;
    }
    if (((arrived >> source) & 1u) == 0) {
      Fail(Location::current(), "a shuffle: lane %d reads lane %d, which takes no part (mask 0x%x)",
           lane, source, arrived);
    }
    own->result = static_cast<ShuffleDeposit*>(deposits[source])->value;
  }
}

struct VoteDeposit {
  uint64_t value;
  uint32_t result;
};

void ComputeBallot(void* const* deposits, uint32_t arrived, int) {
  uint32_t ballot = 0;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (((arrived >> lane) & 1u) == 0) continue;
    if (static_cast<VoteDeposit*>(deposits[lane])->value != 0) ballot |= 1u << lane;
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if ((arrived >> lane) & 1u) static_cast<VoteDeposit*>(deposits[lane])->result = ballot;
  }
}

void ComputeMatchAny(void* const* deposits, uint32_t arrived, int) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (((arrived >> lane) & 1u) == 0) continue;
    auto* own = static_cast<VoteDeposit*>(deposits[lane]);
    own->result = 0;
    for (int other = 0; other < kWarpSize; ++other) {
      if (((arrived >> other) & 1u) == 0) continue;
      if (static_cast<VoteDeposit*>(deposits[other])->value == own->value) {
        own->result |= 1u << other;
      }
    }
  }
}

uint32_t Combine(Reduction kind, uint32_t a, uint32_t b) {
  const auto sa = static_cast<int32_t>(a), sb = static_cast<int32_t>(b);
  switch (kind) {
    case Reduction::kAdd:
      return a + b;
    case Reduction::kMinSigned:
      return static_cast<uint32_t>(std::min(sa, sb));
    case Reduction::kMaxSigned:
      return static_cast<uint32_t>(std::max(sa, sb));
    case Reduction::kMin:
      return std::min(a, b);
    case Reduction::kMax:
      return std::max(a, b);
    case Reduction::kAnd:
      return a & b;
    case Reduction::kOr:
      return a | b;
    case Reduction::kXor:
      return a ^ b;
  }
  return 0;
}

void ComputeReduce(void* const* deposits, uint32_t arrived, int detail) {
  const auto kind = static_cast<Reduction>(detail);
  bool first = true;
  uint32_t result = 0;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (((arrived >> lane) & 1u) == 0) continue;
    const auto value = static_cast<uint32_t>(static_cast<VoteDeposit*>(deposits[lane])->value);
    result = first ? value : Combine(kind, result, value);
    first = false;
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if ((arrived >> lane) & 1u) static_cast<VoteDeposit*>(deposits[lane])->result = result;
  }
}

// The collectives compare these names as pointers.
constexpr char kIndexName[] = "__shfl_sync";
constexpr char kXorName[] = "__shfl_xor_sync";
constexpr char kUpName[] = "__shfl_up_sync";
constexpr char kDownName[] = "__shfl_down_sync";
constexpr char kBallotName[] = "a vote";
constexpr char kMatchName[] = "__match_any_sync";
constexpr char kReduceName[] = "a __reduce_*_sync";

}  // namespace

void ShuffleLanes(uint32_t mask, Shuffle kind, int width, ShuffleDeposit* deposit,
                  Location location) {
  if (width < 1 || width > kWarpSize || (width & (width - 1)) != 0) {
    Fail(location, "a shuffle's width %d is no power of two up to 32", width);
  }
  switch (kind) {
    case Shuffle::kIndex:
      return WarpCollective(mask, kIndexName, width, deposit, ComputeShuffle<Shuffle::kIndex>,
                            location);
    case Shuffle::kXor:
      return WarpCollective(mask, kXorName, width, deposit, ComputeShuffle<Shuffle::kXor>,
                            location);
    case Shuffle::kUp:
      return WarpCollective(mask, kUpName, width, deposit, ComputeShuffle<Shuffle::kUp>, location);
    case Shuffle::kDown:
      return WarpCollective(mask, kDownName, width, deposit, ComputeShuffle<Shuffle::kDown>,
                            location);
  }
}

uint32_t Ballot(uint32_t mask, bool predicate, Location location) {
  VoteDeposit deposit{predicate ? 1u : 0u, 0};
  WarpCollective(mask, kBallotName, 0, &deposit, ComputeBallot, location);
  return deposit.result;
}

uint32_t MatchAny(uint32_t mask, uint64_t value, Location location) {
  VoteDeposit deposit{value, 0};
  WarpCollective(mask, kMatchName, 0, &deposit, ComputeMatchAny, location);
  return deposit.result;
}

uint32_t Reduce(uint32_t mask, Reduction kind, uint32_t value, Location location) {
  VoteDeposit deposit{value, 0};
  WarpCollective(mask, kReduceName, static_cast<int>(kind), &deposit, ComputeReduce, location);
  return deposit.result;
}

}  // namespace moeserve::emulator

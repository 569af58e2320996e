// Emulates warp intrinsics (shuffles, votes, reductions) and block barriers.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <source_location>

#include "tests/cuda_emulator/scheduler.h"

namespace moeserve::emulator {

enum class Shuffle : uint8_t { kIndex, kXor, kUp, kDown };

struct ShuffleDeposit {
  uint64_t value;
  uint64_t result;
  int argument;
};

// `width` must be a power of two up to 32.
void ShuffleLanes(uint32_t mask, Shuffle kind, int width, ShuffleDeposit* deposit,
                  Location location);
uint32_t Ballot(uint32_t mask, bool predicate, Location location);
uint32_t MatchAny(uint32_t mask, uint64_t value, Location location);
enum class Reduction : uint8_t { kAdd, kMinSigned, kMaxSigned, kMin, kMax, kAnd, kOr, kXor };
uint32_t Reduce(uint32_t mask, Reduction kind, uint32_t value, Location location);

template <typename T>
inline T ShuffleValue(uint32_t mask, T value, Shuffle kind, int argument, int width,
                      Location location) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  ShuffleDeposit deposit{0, 0, argument};
  std::memcpy(&deposit.value, &value, sizeof(T));
  ShuffleLanes(mask, kind, width, &deposit, location);
  T result;
  std::memcpy(&result, &deposit.result, sizeof(T));
  return result;
}

namespace names {

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = kWarpSize,
                     Location location = Location::current()) {
  return ShuffleValue(mask, value, Shuffle::kIndex, source, width, location);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = kWarpSize,
                         Location location = Location::current()) {
  return ShuffleValue(mask, value, Shuffle::kXor, lane_mask, width, location);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = kWarpSize,
                        Location location = Location::current()) {
  return ShuffleValue(mask, value, Shuffle::kUp, static_cast<int>(delta), width, location);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = kWarpSize,
                          Location location = Location::current()) {
  return ShuffleValue(mask, value, Shuffle::kDown, static_cast<int>(delta), width, location);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              Location location = Location::current()) {
  return Ballot(mask, predicate != 0, location);
}
inline int __any_sync(unsigned mask, int predicate, Location location = Location::current()) {
  return Ballot(mask, predicate != 0, location) != 0;
}
inline int __all_sync(unsigned mask, int predicate, Location location = Location::current()) {
  return Ballot(mask, predicate == 0, location) == 0;
}
template <typename T>
inline unsigned __match_any_sync(unsigned mask, T value, Location location = Location::current()) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return MatchAny(mask, bits, location);
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned v, Location at = Location::current()) {
  return Reduce(mask, Reduction::kAdd, v, at);
}
inline int __reduce_add_sync(unsigned mask, int v, Location at = Location::current()) {
  return static_cast<int>(Reduce(mask, Reduction::kAdd, static_cast<uint32_t>(v), at));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v, Location at = Location::current()) {
  return Reduce(mask, Reduction::kMin, v, at);
}
inline int __reduce_min_sync(unsigned mask, int v, Location at = Location::current()) {
  return static_cast<int>(Reduce(mask, Reduction::kMinSigned, static_cast<uint32_t>(v), at));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v, Location at = Location::current()) {
  return Reduce(mask, Reduction::kMax, v, at);
}
inline int __reduce_max_sync(unsigned mask, int v, Location at = Location::current()) {
  return static_cast<int>(Reduce(mask, Reduction::kMaxSigned, static_cast<uint32_t>(v), at));
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned v, Location at = Location::current()) {
  return Reduce(mask, Reduction::kAnd, v, at);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned v, Location at = Location::current()) {
  return Reduce(mask, Reduction::kOr, v, at);
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned v, Location at = Location::current()) {
  return Reduce(mask, Reduction::kXor, v, at);
}

inline void __syncwarp(unsigned mask = ~0u, Location location = Location::current()) {
  WarpCollective(mask, "__syncwarp", 0, nullptr, nullptr, location);
}
inline void __syncthreads(Location location = Location::current()) {
  BarrierSync(0, 0, 0, nullptr, location);
}
inline int __syncthreads_count(int predicate, Location location = Location::current()) {
  return BarrierSync(0, 0, predicate != 0, nullptr, location);
}
inline int __syncthreads_or(int predicate, Location location = Location::current()) {
  return BarrierSync(0, 0, predicate != 0, nullptr, location) != 0;
}
inline int __syncthreads_and(int predicate, Location location = Location::current()) {
  return BarrierSync(0, 0, predicate == 0, nullptr, location) == 0;
}

}  // namespace names
}  // namespace moeserve::emulator

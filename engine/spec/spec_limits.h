// Bounds on the sizes of a specification. They lie far beyond every published model and keep the
// arithmetic on sizes, and the memory that a hostile configuration can ask for, small.
#pragma once

#include <cstdint>

namespace moeserve {

inline constexpr int kMaxLayers = 10'000;
inline constexpr int kMaxExperts = 65'536;              // of one routed layer
inline constexpr int64_t kMaxExpertsOfModel = 131'072;  // of all routed layers together
inline constexpr int kMaxVocabulary = 1 << 24;
inline constexpr int kMaxPositions = 1 << 24;
inline constexpr int kMaxWidth = 1 << 20;  // of a row: hidden, inner, heads * head_dim
inline constexpr int64_t kMaxParameters = int64_t{1} << 50;

}  // namespace moeserve

// Upper bounds on the sizes in a specification. They are far above every published model. They keep
// size arithmetic free of overflow and limit the memory that a hostile configuration can request.
#pragma once

#include <cstdint>

namespace moeserve {

inline constexpr int kMaxLayers = 10'000;
inline constexpr int kMaxExperts = 65'536;              // in one routed layer
inline constexpr int64_t kMaxExpertsOfModel = 131'072;  // in all routed layers together
// In one routed layer: experts times sub-tokens of a token, which bounds a token's routes.
inline constexpr int64_t kMaxRoutesOfToken = 1 << 18;
inline constexpr int kMaxExpertDepth = 1'024;   // sub-layers of an expert
inline constexpr int kMaxProjectionDepth = 16;  // linear layers of a split projection
inline constexpr int kMaxVocabulary = 1 << 24;
inline constexpr int kMaxPositions = 1 << 24;
inline constexpr int kMaxTokenTypes = 256;
inline constexpr int kMaxLabels = 1 << 20;                       // of a classifier
inline constexpr int kMaxDenseModules = 16;                      // behind a pooling
inline constexpr int kMaxTaps = 1'024;                           // of a convolution
inline constexpr int64_t kMaxStateFloats = int64_t{1} << 28;     // of a recurrence of a layer
inline constexpr int kMaxBuckets = 1 << 16;                      // of relative positions
inline constexpr int64_t kMaxRelativeBiases = int64_t{1} << 26;  // heads * distances with buckets
inline constexpr int kMaxWidth = 1 << 20;  // width of a row: hidden, inner, heads * head_dim
// log2 of the largest factor of a key with XPOS; that of a query is at least the inverse. Products
// with such factors neither overflow f32 and bf16 nor lose small queries to underflow.
inline constexpr double kMaxXposBits = 64.0;
inline constexpr int64_t kMaxParameters = int64_t{1} << 50;

}  // namespace moeserve

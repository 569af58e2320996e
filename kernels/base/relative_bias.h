// Biases of relative positions in attention ("Exploring the Limits of Transfer Learning with a
// Unified Text-to-Text Transformer", section 2.1): distances form buckets, and each bucket has one
// learned bias per head.
#pragma once

#include <cstdint>
#include <vector>

namespace moeserve {

struct RelativeBias {
  int buckets = 32;            // rows of the stored table
  int max_distance = 128;      // the last bucket has this distance and all larger ones
  bool bidirectional = false;  // the second half of the buckets is for keys after the query, which
                               // causal attention does not see
  bool per_layer = false;      // every layer has a table of its own; else all layers share one

  // Returns the number of buckets of keys at or before the query.
  int used_buckets() const { return bidirectional ? buckets / 2 : buckets; }
  // Returns the number of buckets that have a single distance: 0, 1, 2, ...
  int exact_buckets() const { return used_buckets() / 2; }
};

// Returns the buckets of the distances 0, 1, 2, ... (the query's position minus the key's): all of
// them up to distance positions - 1, or up to the first distance of the last bucket, which has all
// larger distances, too. As in the original code, the logarithms are those of f32, which decides on
// which side of a limit a distance is. Requires exact_buckets() of at least 1 and a max_distance
// above it.
std::vector<int> BucketsOfDistances(const RelativeBias& bias, int64_t positions);

// Returns the bucket of one distance, which is negative for keys after the query. Without
// `bidirectional`, all of these have bucket 0, as in the original code.
int BucketOfDistance(const RelativeBias& bias, int64_t distance);

// Returns the buckets of the distances -(D - 1), ..., -1, 0, 1, ..., D - 1, where D is the size of
// BucketsOfDistances(bias, positions): larger distances have the buckets of the first and of the
// last element. This is the order of AttentionArgs::bias without `causal`.
std::vector<int> BucketsOfSignedDistances(const RelativeBias& bias, int64_t positions);

}  // namespace moeserve

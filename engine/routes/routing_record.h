// The routes of one request: the experts that its tokens chose and their gate weights.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace moeserve {

// The routes of adjacent tokens of a request as compressed rows. A token has
// RouteLayout::rows_per_token rows, ordered by layer, attention before feed_forward, and within a
// block by sub-token. Row r chose the experts at indices [offsets[r], offsets[r + 1]) of `experts`,
// in ascending order, each with its final gate weight.
struct RoutingRecord {
  int first_position = 0;  // position of the first token; 0: the first token of the prompt
  int tokens = 0;
  // Ranges [begin, end) of positions that were not computed for this request. Their routes were
  // recorded for the request that filled the prefix cache, or for the sample that computed the
  // shared prompt.
  std::vector<std::pair<int, int>> reused;
  std::vector<uint32_t> offsets;  // [tokens * rows_per_token + 1]
  std::vector<uint16_t> experts;  // [A], A = offsets.back(): number of routes of all rows
  std::vector<float> weights;     // [A]
};

// Appends `next`, which must begin where `to` ends.
void Append(RoutingRecord& to, const RoutingRecord& next);

// Returns the routes of the tokens [begin, end), counted from the record's first token.
RoutingRecord Slice(const RoutingRecord& record, int begin, int end, int rows_per_token);

}  // namespace moeserve

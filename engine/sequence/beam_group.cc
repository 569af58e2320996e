#include "engine/sequence/beam_group.h"

#include <algorithm>
#include <utility>

#include "engine/sequence/sequence.h"

namespace moeserve {

BeamGroup::BeamGroup(const BeamParams& beam_params, std::vector<TokenId> ends, int limit)
    : params(beam_params), search(beam_params, std::move(ends), limit) {}

BeamGroup::~BeamGroup() = default;

int BeamGroup::SharedTokens() const {
  const std::vector<TokenId>& first = beams.front().sequence->tokens;
  // The last token of a beam is computed together with those of the others.
  auto end = first.end() - 1;
  for (const Beam& beam : beams) {
    end = std::mismatch(first.begin(), end, beam.sequence->tokens.begin()).first;
  }
  return static_cast<int>(end - first.begin());
}

}  // namespace moeserve

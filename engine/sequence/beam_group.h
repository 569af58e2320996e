// The beams of one request. Used by the engine thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/beam/beam_search.h"
#include "engine/request.h"
#include "kernels/route_counters.h"

namespace moeserve {

struct Sequence;

// A token of a beam or a hypothesis, and the ones before it.
struct ScoredToken {
  int before = -1;  // index in BeamGroup::scored
  TokenLogprob logprob;
};

struct Beam {
  std::unique_ptr<Sequence> sequence;
  int scored = -1;  // index of the last token in BeamGroup::scored, if logprobs are requested
};

// A beam that has ended. It holds no memory of the device.
struct Hypothesis {
  int number = 0;               // FinishedBeam::number
  std::vector<TokenId> tokens;  // behind the prompt
  bool stopped = false;         // not only the number of tokens has ended it
  int scored = -1;
  int computed = 0;  // the following members are about this number of leading tokens
  TokenRoutes work;
  std::vector<uint64_t> expert_counts;   // if requested
  std::optional<RoutingRecord> routing;  // if requested
  ExpertWork source;
  std::optional<RoutingRecord> source_routing;  // if requested
};

// A request with beam search is submitted as a sequence, the leader; further ones, in
// Sequence::samples, stand for its other results. The leader computes the prompt, then its memory
// passes to the first beam. The scheduler knows the leader only: its beams are computed and
// preempted as one. After a preemption, the leader computes again what all beams share.
struct BeamGroup {
  // `limit`: the largest number of tokens behind the prompt.
  BeamGroup(const BeamParams& params, std::vector<TokenId> ends, int limit);
  ~BeamGroup();

  // Returns the number of leading tokens that the beams share, less than all of any beam. There is
  // a beam.
  int SharedTokens() const;

  const BeamParams params;
  BeamSearch search;
  std::vector<Beam> beams;  // the running ones, in the order of `search`
  std::vector<Beam> next;   // those of the next step, while it is made
  // Sequences without memory, for reuse.
  std::vector<std::unique_ptr<Sequence>> spare;
  bool forked = false;  // whether the beams have memory; if not, the leader has it, or nobody
  std::vector<Hypothesis> hypotheses;  // those in search.finished(), in any order
  std::vector<ScoredToken> scored;     // of all beams, if logprobs are requested
};

}  // namespace moeserve

// The requests of a load run, drawn from a seed: the same on every machine, for every target.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/text/token_id.h"

namespace moeserve::server {

// An inclusive range of token counts.
struct LengthRange {
  int min = 0;
  int max = 0;
};

// "128" or "16:512", at least 1 and at most 2^24. InvalidArgument: anything else.
Result<LengthRange> ParseLengthRange(std::string_view text);

enum class LengthDistribution : uint8_t { kUniform, kLogUniform };

struct WorkloadOptions {
  uint64_t seed = 0;
  LengthRange prompt{32, 256};
  LengthRange output{32, 128};
  LengthDistribution lengths = LengthDistribution::kUniform;
  double long_share = 0.0;  // share of requests with lengths from `long_prompt`
  LengthRange long_prompt{2048, 4096};
  int prefix_tokens = 0;                // of a common prefix for a share of the prompts
  double prefix_share = 1.0;            // of requests
  int vocab_size = 0;                   // prompts are ids in [0, vocab_size)
  std::vector<std::string> texts = {};  // if not empty, prompts are drawn from these texts
};

struct LoadRequest {
  int64_t index = 0;
  bool long_prompt = false;
  bool shared_prefix = false;
  std::vector<TokenId> prompt;  // empty if `text` is the prompt
  std::string text;
  int output_tokens = 0;  // generates exactly this many
};

// Immutable and thread-safe.
class Workload {
 public:
  // InvalidArgument: a share outside [0, 1], an empty range, no vocabulary, or texts together with
  // options for ids.
  static Result<Workload> Create(WorkloadOptions options);

  // Returns request `index`, a function of the options and `index` only. Warm-up requests have the
  // numbers -1, -2 and so on.
  LoadRequest Make(int64_t index) const;

  const WorkloadOptions& options() const { return options_; }
  // Most tokens of prompt and output together. Texts count 0, because only the server tokenizes.
  int max_total_tokens() const;

 private:
  explicit Workload(WorkloadOptions options);

  WorkloadOptions options_;
  std::vector<TokenId> prefix_;
};

// Times of a Poisson process: gaps are independent and exponential.
class PoissonArrivals {
 public:
  // `rate` > 0, in arrivals per second.
  PoissonArrivals(double rate, uint64_t seed);
  // Returns the time of the next arrival, seconds from the start; strictly ascending.
  double Next();

 private:
  double rate_;
  uint64_t state_;
  double time_ = 0.0;
};

}  // namespace moeserve::server

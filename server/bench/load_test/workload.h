// The requests of a load run. They are drawn from a seed and are the same on every machine and for
// every target.
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

// Parses a range such as "128" or "16:512", with lengths from 1 to 2^24. InvalidArgument for any
// other text.
Result<LengthRange> ParseLengthRange(std::string_view text);

enum class LengthDistribution : uint8_t { kUniform, kLogUniform };

struct WorkloadOptions {
  uint64_t seed = 0;
  LengthRange prompt{32, 256};
  LengthRange output{32, 128};
  LengthDistribution lengths = LengthDistribution::kUniform;
  double long_share = 0.0;  // share of requests whose prompt length is from `long_prompt`
  LengthRange long_prompt{2048, 4096};
  int prefix_tokens = 0;                // length of the shared prefix
  double prefix_share = 1.0;            // share of requests with that prefix
  int vocab_size = 0;                   // random prompts consist of ids in [0, vocab_size)
  std::vector<std::string> texts = {};  // if not empty, prompts are drawn from these texts
};

struct LoadRequest {
  int64_t index = 0;
  bool long_prompt = false;
  bool shared_prefix = false;
  std::vector<TokenId> prompt;  // empty if `text` is the prompt
  std::string text;
  int output_tokens = 0;  // exact number of tokens to generate
};

// Immutable and thread-safe.
class Workload {
 public:
  // Returns InvalidArgument for a share outside [0, 1], an empty range, no vocabulary, or texts
  // together with options for token ids.
  static Result<Workload> Create(WorkloadOptions options);

  // Returns request number `index`, which depends on the options and `index` only. Warm-up requests
  // have the numbers -1, -2 and so on.
  LoadRequest Make(int64_t index) const;

  const WorkloadOptions& options() const { return options_; }
  // Returns the largest sum of prompt and output tokens of a request. A text prompt counts as 0
  // tokens, because only the server tokenizes it.
  int max_total_tokens() const;

 private:
  explicit Workload(WorkloadOptions options);

  WorkloadOptions options_;
  std::vector<TokenId> prefix_;
};

// Arrival times of a Poisson process: the gaps are independent and exponentially distributed.
class PoissonArrivals {
 public:
  // `rate` is in arrivals per second and must be positive.
  PoissonArrivals(double rate, uint64_t seed);
  // Returns the time of the next arrival in seconds from the start. The times are strictly
  // increasing.
  double Next();

 private:
  double rate_;
  uint64_t state_;
  double time_ = 0.0;
};

}  // namespace moeserve::server

// How long steps take, so that prompts get the share of a step that running answers can bear.
#pragma once

#include <algorithm>
#include <array>
#include <bit>

namespace moeserve {

// Learns from the steps it is told of. A step's time is taken for the time of its decoding rows
// plus a time for each prompt token.
class StepTime {
 public:
  // Prompt tokens that make a step with these decoding rows about twice as long as without them;
  // `limit` where nothing decodes.
  int PromptTokens(int decode_rows, int limit) const {
    if (decode_rows == 0) return limit;
    if (prompt_seconds_ <= 0.0) return std::min(limit, kUnknown);
    double decode = 0.0;
    for (size_t b = Bucket(decode_rows) + 1; b-- > 0 && decode == 0.0;) decode = decode_[b];
    if (decode == 0.0) return std::min(limit, kUnknown);
    return std::min(limit, std::max(kLeast, static_cast<int>(decode / prompt_seconds_)));
  }

  void Observe(int decode_rows, int prompt_tokens, double seconds) {
    if (prompt_tokens == 0) {
      Mix(decode_[Bucket(decode_rows)], seconds);
      return;
    }
    if (prompt_tokens < kLeast) return;  // mostly overhead
    const double decode = decode_rows == 0 ? 0.0 : decode_[Bucket(decode_rows)];
    if (decode_rows > 0 && decode == 0.0) return;
    Mix(prompt_seconds_, std::max(seconds - decode, 0.1 * seconds) / prompt_tokens);
  }

 private:
  static constexpr int kLeast = 16;
  static constexpr int kUnknown = 64;

  // Row counts between powers of two share a figure.
  static size_t Bucket(int rows) {
    return std::min<size_t>(std::bit_width(static_cast<unsigned>(rows)), 16);
  }
  static void Mix(double& mean, double value) {
    mean = mean == 0.0 ? value : 0.9 * mean + 0.1 * value;
  }

  std::array<double, 17> decode_{};  // seconds; 0: not seen
  double prompt_seconds_ = 0.0;
};

}  // namespace moeserve

// Normalizers rewrite a text before it is cut into pieces.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/text/tokenizer/byte_sources.h"

namespace moeserve {

struct NormalizeContext {
  explicit NormalizeContext(std::string_view text)
      : max_bytes(kMaxGrowth * text.size() + kMinMaxBytes) {}

  // In: the text continues an earlier one, so nothing is inserted in front of it.
  bool continued = false;
  // In: a result that is longer is an error. A damaged or hostile file can let a text grow without
  // bounds.
  size_t max_bytes;
  // Out: the first character of the result does not stem from the first character of the text.
  bool start_moved = false;
  // Out, if not null and empty before: the sources of the result in the text.
  ByteSources* sources = nullptr;

 private:
  // In Unicode's forms, no character becomes more than 18 characters.
  static constexpr size_t kMaxGrowth = 64;
  static constexpr size_t kMinMaxBytes = 64 * 1024;
};

// Immutable after construction; any number of threads may use one object.
class Normalizer {
 public:
  virtual ~Normalizer() = default;

  // Returns the normalised form of `text`. Both are valid UTF-8. Sets `context->start_moved` if
  // that is so and never clears it. InvalidArgument if a pattern search exceeds its limits,
  // ResourceExhausted if the result exceeds `context->max_bytes`.
  virtual absl::StatusOr<std::string> Apply(std::string_view text,
                                            NormalizeContext* context) const = 0;

  // A cheap test that returns true only if Apply() would return `text` itself.
  virtual bool IsUnchanged(std::string_view text) const = 0;

  absl::StatusOr<std::string> Normalize(std::string_view text) const {
    NormalizeContext context(text);
    return Apply(text, &context);
  }
};

inline absl::Status NormalizedTooLong() {
  return absl::ResourceExhaustedError(
      "the tokenizer's normalizer makes the text far longer than it is");
}

// Applies its stages in order; without stages it changes nothing.
class SequenceNormalizer : public Normalizer {
 public:
  explicit SequenceNormalizer(std::vector<std::unique_ptr<Normalizer>> stages)
      : stages_(std::move(stages)) {}

  absl::StatusOr<std::string> Apply(std::string_view text,
                                    NormalizeContext* context) const override {
    std::string out(text);
    ByteSources* const sources = context->sources;
    SourceCursor(text, sources).Keep(text.size());
    ByteSources local;
    for (const auto& stage : stages_) {
      if (stage->IsUnchanged(out)) continue;
      local.clear();
      if (sources != nullptr) context->sources = &local;
      absl::StatusOr<std::string> result = stage->Apply(out, context);
      context->sources = sources;
      if (!result.ok()) return result;
      out = *std::move(result);
      if (out.size() > context->max_bytes) return NormalizedTooLong();
      if (sources == nullptr) continue;
      for (int32_t& source : local) source = source < 0 ? source : (*sources)[source];
      sources->swap(local);
    }
    return out;
  }

  bool IsUnchanged(std::string_view text) const override {
    return std::all_of(stages_.begin(), stages_.end(),
                       [&](const auto& stage) { return stage->IsUnchanged(text); });
  }

 private:
  std::vector<std::unique_ptr<Normalizer>> stages_;
};

}  // namespace moeserve

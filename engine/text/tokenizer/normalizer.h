// Normalizers rewrite a text before it is cut into pieces.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace moeserve {

// Immutable after construction; any number of threads may use one object.
class Normalizer {
 public:
  virtual ~Normalizer() = default;

  // Returns the normalised form of `text`. Both are valid UTF-8.
  virtual std::string Normalize(std::string_view text) const = 0;

  // A cheap test that returns true only if Normalize() would return `text` itself.
  virtual bool IsUnchanged(std::string_view text) const = 0;
};

// Unicode normalization form C, with the Unicode version of Hugging Face's tables.
class NfcNormalizer : public Normalizer {
 public:
  std::string Normalize(std::string_view text) const override;
  bool IsUnchanged(std::string_view text) const override;
};

// Applies its steps in order; without steps it changes nothing.
class SequenceNormalizer : public Normalizer {
 public:
  explicit SequenceNormalizer(std::vector<std::unique_ptr<Normalizer>> steps)
      : steps_(std::move(steps)) {}

  std::string Normalize(std::string_view text) const override;
  bool IsUnchanged(std::string_view text) const override;

 private:
  std::vector<std::unique_ptr<Normalizer>> steps_;
};

}  // namespace moeserve

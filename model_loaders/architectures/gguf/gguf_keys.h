// Reads typed keys of the metadata of a GGUF file and collects errors.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/error_text.h"
#include "model_loaders/files/gguf/gguf_file.h"

namespace moeserve {

// After an error, a function returns its fallback or zero, so that one run reports several errors.
// The caller must check `problems` before it uses the values.
class GgufKeys {
 public:
  // Keys that begin with a dot stand for keys of the architecture: with "llama" as `architecture`,
  // ".block_count" is "llama.block_count". The keys `ignored`, which are whole names, are read as
  // if the file did not have them; null: none. All arguments must outlive the object.
  GgufKeys(const GgufFile& file, std::string_view architecture, Problems* problems,
           const std::vector<std::string>* ignored = nullptr)
      : file_(file), architecture_(architecture), problems_(*problems), ignored_(ignored) {}

  // Each function returns the value of `key`, or `fallback` if the key is absent. A key without
  // `fallback` is required. Int() also takes an array whose items are all the same integer. Real()
  // returns an f32 value as the shortest decimal number that rounds to it, which is what the
  // model's authors wrote.
  int Int(std::string_view key, std::optional<int> fallback = std::nullopt);
  double Real(std::string_view key, std::optional<double> fallback = std::nullopt);
  bool Bool(std::string_view key, bool fallback);
  std::optional<std::string_view> Text(std::string_view key);
  std::optional<int> OptionalInt(std::string_view key);
  // Return a number or truth for each of `layers` layers: `key` is an array of this length, or one
  // value for all layers. Truths may also be the integers 0 and 1.
  std::vector<int> Ints(std::string_view key, int layers, std::optional<int> fallback);
  std::vector<bool> Flags(std::string_view key, int layers);
  // The same for numbers, of which none may be negative; without the key, they are 0.
  std::vector<float> Floats(std::string_view key, int layers);

  // Refuses any value of `key` except the number, or the truth, that this is.
  void Require(std::string_view key, double value);
  // The key does not change a model's answers.
  void Ignore(std::string_view key) { Find(key); }

  // Returns null if the key is absent.
  const GgufValue* Find(std::string_view key);
  void Fault(std::string_view key, std::string_view expected, std::string_view found);
  // Reports every key of the architecture that was not read as unknown.
  void RefuseOthers();
  std::string NameOf(std::string_view key) const;

 private:
  bool IsIgnored(std::string_view name) const;
  // Like Find(), but reports an absent key if it is required.
  const GgufValue* FindNumber(std::string_view key, std::string_view expected, bool required);

  const GgufFile& file_;
  const std::string_view architecture_;
  Problems& problems_;
  const std::vector<std::string>* const ignored_;
  std::set<std::string, std::less<>> read_;
};

}  // namespace moeserve

// Collects the first failure of Validate()'s checks.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>

#include "absl/status/status.h"

namespace moeserve {

inline std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

// Checks one relation after the other and keeps the first failure. The path of a key is built only
// on failure, because a large model has many relations.
class Checker {
 public:
  bool ok() const { return status_.ok(); }
  absl::Status status() const { return status_; }

  void Fail(const std::string& path, const std::string& expected, const std::string& found) {
    if (!ok()) return;
    status_ = absl::InvalidArgumentError(path + ": expected " + expected + ", found " + found);
  }

  // `because` explains a bound that depends on another key: " (num_experts is 8)".
  void Int(const std::string& scope, const char* key, int64_t value, int64_t low, int64_t high,
           const std::string& because = "") {
    if (!ok() || (value >= low && value <= high)) return;
    const std::string range =
        low == high ? std::to_string(low)
                    : "an integer in [" + std::to_string(low) + ", " + std::to_string(high) + "]";
    Fail(scope + key, range, std::to_string(value) + because);
  }

  void Divides(const std::string& scope, const char* key, int64_t value, const char* whole_key,
               int64_t whole) {
    if (!ok() || whole % value == 0) return;
    Fail(scope + key, "a divisor of " + std::to_string(whole),
         std::to_string(value) + " (" + whole_key + " is " + std::to_string(whole) + ")");
  }

  // Checks that `value` is within [low, high]; NaN fails.
  void Real(const std::string& scope, const char* key, double value, double low, double high) {
    if (!ok() || (value >= low && value <= high)) return;
    Fail(scope + key, "a number in [" + Number(low) + ", " + Number(high) + "]", Number(value));
  }

  // Checks a factor that the f32 arithmetic multiplies by: f32 must be able to hold it.
  void Factor(const std::string& scope, const char* key, double value) {
    constexpr double kLargest = std::numeric_limits<float>::max();
    if (!ok() || std::fabs(value) <= kLargest) return;
    Fail(scope + key, "a number that f32 can hold", Number(value));
  }

  void Positive(const std::string& scope, const char* key, double value) {
    Factor(scope, key, value);
    if (!ok() || value > 0) return;
    Fail(scope + key, "a number above 0", Number(value));
  }

  void Set(const std::string& scope, const char* key, bool value, bool expected,
           const std::string& because) {
    if (!ok() || value == expected) return;
    Fail(scope + key, expected ? "true" : "false", (value ? "true" : "false") + because);
  }

 private:
  absl::Status status_;
};

inline std::string Is(const char* key, int64_t value) {
  return std::string(" (") + key + " is " + std::to_string(value) + ")";
}

}  // namespace moeserve

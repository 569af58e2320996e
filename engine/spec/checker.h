// What the checks of Validate() share, and its checks of positions.
#pragma once

#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "base/error_text.h"
#include "engine/spec/settings.h"

namespace moeserve {

inline std::string Number(double value) { return ValueText(value, 9); }

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
  void Int(const std::string& scope, std::string_view key, int64_t value, int64_t low, int64_t high,
           const std::string& because = "") {
    if (!ok() || (value >= low && value <= high)) return;
    const std::string range =
        low == high ? std::to_string(low)
                    : "an integer in [" + std::to_string(low) + ", " + std::to_string(high) + "]";
    Fail(Concat(scope, key), range, std::to_string(value) + because);
  }

  void Divides(const std::string& scope, const char* key, int64_t value, const char* whole_key,
               int64_t whole) {
    if (!ok() || whole % value == 0) return;
    Fail(scope + key, "a divisor of " + std::to_string(whole),
         std::to_string(value) + " (" + whole_key + " is " + std::to_string(whole) + ")");
  }

  // Checks the range of a setting; NaN fails.
  void Range(const std::string& scope, const char* key, double value, const Rule& rule) {
    // The f32 arithmetic multiplies by numbers without limits.
    constexpr double kLargest = std::numeric_limits<float>::max();
    const bool limited = rule.high < kNoLimit;
    if (!ok()) return;
    if ((rule.above || !limited) && !(std::fabs(value) <= kLargest)) {
      Fail(scope + key, "a number that f32 can hold", Number(value));
    } else if (rule.above ? !(value > rule.low) : !limited && !(value >= rule.low)) {
      Fail(scope + key, (rule.above ? "a number above " : "a number >= ") + Number(rule.low),
           Number(value));
    } else if (limited && !(value >= rule.low && value <= rule.high)) {
      Fail(scope + key, "a number in [" + Number(rule.low) + ", " + Number(rule.high) + "]",
           Number(value));
    }
  }

  // Fails if `fault` holds, having found the pieces, which Concat() joins.
  template <typename... Pieces>
  void Refuse(bool fault, const std::string& scope, std::string_view key, std::string_view expected,
              const Pieces&... found) {
    if (ok() && fault) Fail(Concat(scope, key), std::string(expected), Concat(found...));
  }

 private:
  absl::Status status_;
};

inline std::string Is(const char* key, int64_t value) {
  return std::string(" (") + key + " is " + std::to_string(value) + ")";
}

// Checks the settings of a structure against their rules in settings.h. `scope` is the path of the
// structure with a period at its end, or empty. `context` is that of the table.
template <typename S, typename... Context>
void CheckSettings(Checker& check, const std::string& scope, const S& spec,
                   const Context&... context);

template <typename S>
class SettingsChecker : public SettingsVisitor<SettingsChecker<S>, const S> {
 public:
  SettingsChecker(Checker& check, const std::string& scope, const S& spec)
      : SettingsVisitor<SettingsChecker, const S>(spec), check_(check), scope_(scope) {}

  template <typename T>
  void Row(const char* key, const T& value, const T* assumed, const Rule& rule) {
    if (rule.used) Range(key, value, rule);
    if (rule.off.empty() || value == *assumed) return;
    check_.Fail(scope_ + key, ValueText(*assumed, 9),
                Concat(ValueText(value, 9), " (", rule.off, ')'));
  }

  void Widths(const char* key, std::vector<int> S::*member, const Rule& rule) {
    int i = 0;
    for (const int width : this->spec.*member)
      Range(Concat(key, '[', i++, ']').c_str(), width, rule);
  }

  template <typename T, typename... Context>
  void Object(const char* key, T S::*member, Need = {}, const Context&... context) {
    const auto& part = this->spec.*member;
    if constexpr (requires { part.has_value(); }) {
      if (part.has_value()) CheckSettings(check_, Concat(scope_, key, '.'), *part, context...);
    } else {
      CheckSettings(check_, Concat(scope_, key, '.'), part, context...);
    }
  }

  template <typename T>
  void List(const char* key, std::vector<T> S::*member, int most) {
    const std::vector<T>& list = this->spec.*member;
    check_.Int(scope_, key, std::ssize(list), 0, most, " objects");
    for (size_t i = 0; check_.ok() && i < list.size(); ++i) {
      CheckSettings(check_, Concat(scope_, key, '[', i, "]."), list[i]);
    }
  }

 private:
  template <typename T>
  void Range(const char* key, const T& value, const Rule& rule) {
    if constexpr (std::is_same_v<T, int>) {
      if (value < rule.low || value > rule.high) {
        check_.Int(scope_, key, value, static_cast<int64_t>(rule.low),
                   static_cast<int64_t>(rule.high));
      }
    } else if constexpr (std::is_floating_point_v<T>) {
      check_.Range(scope_, key, value, rule);
    } else if constexpr (std::is_same_v<T, std::vector<double>> ||
                         std::is_same_v<T, std::vector<int>>) {
      for (const auto element : value) Range(key, element, rule);
    } else if constexpr (requires { value.has_value(); }) {
      if (value.has_value()) Range(key, *value, rule);
    }
  }

  Checker& check_;
  const std::string& scope_;
};

template <typename S, typename... Context>
void CheckSettings(Checker& check, const std::string& scope, const S& spec,
                   const Context&... context) {
  SettingsChecker<S> checker(check, scope, spec);
  Settings(checker, spec, context...);
}

// The checks of positions (check_position.cc).

// Checks ModelSpec::position, but not how it fits the heads of the layers.
void CheckPosition(Checker& check, const ModelSpec& spec);

// Checks ModelSpec::relative_bias, but not whether the layers can have it.
void CheckRelativeBias(Checker& check, const ModelSpec& spec);

// Check that the rotated dimensions fit the heads of a layer, and that the layer can have the
// biases of relative positions. `scope` is the path of the layer's attention object.
void CheckRopeOfLayer(Checker& check, const ModelSpec& spec, const std::string& scope,
                      const AttentionSpec& attention);
void CheckBiasOfLayer(Checker& check, const ModelSpec& spec, const std::string& scope,
                      const AttentionSpec& attention);

// Check how the settings of a recurrent mixer fit together (check_recurrent.cc).
void CheckDelta(Checker& check, const std::string& scope, const DeltaSpec& delta);
void CheckStateSpace(Checker& check, const std::string& scope, const StateSpaceSpec& ssm);

}  // namespace moeserve

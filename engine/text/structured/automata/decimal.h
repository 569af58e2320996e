// Exact decimal numbers of JSON texts.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

namespace moeserve::structured {

// +-0.d1d2...dn * 10^point. No leading or trailing zero digits; zero has none and is not negative.
struct Decimal {
  bool negative = false;
  std::string digits;
  int64_t point = 0;

  // The shortest digits that read back as `value`, which is finite.
  static Decimal Shortest(double value);
  // `text` is a JSON number with an exponent of at most a few digits.
  static Decimal Parse(std::string_view text);
  bool is_zero() const { return digits.empty(); }
  bool is_integer() const { return point >= static_cast<int64_t>(digits.size()); }
  // Without exponent: "-12.5", "1000", "0.001".
  std::string Plain() const;
  // With an exponent, as shortest-digits writers spell very large and very small numbers: "1e-07",
  // "-1.5e+16". Not for zero.
  std::string Scientific() const;
  Decimal Negated() const;

  bool operator==(const Decimal&) const = default;
  std::strong_ordering operator<=>(const Decimal& other) const;
};

}  // namespace moeserve::structured

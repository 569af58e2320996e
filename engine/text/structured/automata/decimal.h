// Exact decimal numbers as JSON texts spell them.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

namespace moeserve::structured {

// The number +-0.d1d2...dn * 10^point, where d1...dn are `digits`. They have no leading or trailing
// zeros; the number zero has no digits and is not negative.
struct Decimal {
  bool negative = false;
  std::string digits;
  int64_t point = 0;

  // Returns the shortest decimal number that reads back as `value`, which must be finite.
  static Decimal Shortest(double value);
  // Parses `text`, which must be a JSON number with an exponent of at most a few digits.
  static Decimal Parse(std::string_view text);
  bool is_zero() const { return digits.empty(); }
  bool is_integer() const { return point >= static_cast<int64_t>(digits.size()); }
  // Returns the number without an exponent: "-12.5", "1000", "0.001".
  std::string Plain() const;
  // Returns the number with an exponent: "1e-07", "-1.5e+16", as programs that write the shortest
  // digits spell very large and very small numbers. Not for zero.
  std::string Scientific() const;
  Decimal Negated() const;

  bool operator==(const Decimal&) const = default;
  std::strong_ordering operator<=>(const Decimal& other) const;
};

}  // namespace moeserve::structured

#include "engine/text/structured/automata/decimal.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

namespace moeserve::structured {

Decimal Decimal::Parse(std::string_view text) {
  Decimal out;
  if (!text.empty() && text[0] == '-') {
    out.negative = true;
    text.remove_prefix(1);
  }
  const size_t e = text.find_first_of("eE");
  int64_t exponent = 0;
  if (e != std::string_view::npos) {
    bool down = false;
    for (const char c : text.substr(e + 1)) {
      if (c == '-') down = true;
      if (c >= '0' && c <= '9' && exponent < 1000000) exponent = exponent * 10 + (c - '0');
    }
    if (down) exponent = -exponent;
    text = text.substr(0, e);
  }
  const size_t dot = std::min(text.find('.'), text.size());
  out.digits = std::string(text.substr(0, dot));
  if (dot < text.size()) out.digits += text.substr(dot + 1);
  out.point = static_cast<int64_t>(dot) + exponent;
  const size_t zeros = std::min(out.digits.find_first_not_of('0'), out.digits.size());
  out.digits.erase(0, zeros);
  out.point -= static_cast<int64_t>(zeros);
  out.digits.erase(out.digits.find_last_not_of('0') + 1);
  if (out.digits.empty()) out = Decimal();
  return out;
}

Decimal Decimal::Shortest(double value) {
  char buffer[32];
  const auto end =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  return Parse(std::string_view(buffer, static_cast<size_t>(end.ptr - buffer)));
}

std::string Decimal::Scientific() const {
  std::string out = negative ? "-" : "";
  out += digits[0];
  if (digits.size() > 1) out += "." + digits.substr(1);
  const int64_t exponent = point - 1;
  out += exponent < 0 ? "e-" : "e+";
  const std::string magnitude = std::to_string(std::abs(exponent));
  if (magnitude.size() < 2) out += '0';
  return out + magnitude;
}

std::string Decimal::Plain() const {
  if (is_zero()) return "0";
  std::string out = negative ? "-" : "";
  const int64_t n = static_cast<int64_t>(digits.size());
  if (point <= 0) {
    out += "0." + std::string(static_cast<size_t>(-point), '0') + digits;
  } else if (point >= n) {
    out += digits + std::string(static_cast<size_t>(point - n), '0');
  } else {
    out += digits.substr(0, static_cast<size_t>(point)) + "." +
           digits.substr(static_cast<size_t>(point));
  }
  return out;
}

Decimal Decimal::Negated() const {
  Decimal out = *this;
  if (!out.is_zero()) out.negative = !out.negative;
  return out;
}

std::strong_ordering Decimal::operator<=>(const Decimal& other) const {
  const int sign = is_zero() ? 0 : negative ? -1 : 1;
  const int other_sign = other.is_zero() ? 0 : other.negative ? -1 : 1;
  if (sign != other_sign) return sign <=> other_sign;
  if (sign == 0) return std::strong_ordering::equal;
  // Digits have no leading zeros, so `point` decides; if it is equal, the digits are compared as
  // text.
  std::strong_ordering magnitude = point <=> other.point;
  if (magnitude == 0) magnitude = digits.compare(other.digits) <=> 0;
  return sign > 0 ? magnitude : 0 <=> magnitude;
}

}  // namespace moeserve::structured

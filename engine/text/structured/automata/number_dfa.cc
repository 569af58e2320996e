#include "engine/text/structured/automata/number_dfa.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace moeserve::structured {
namespace {

constexpr int kMaxExponent = 307;
// Numbers with exponents -4 to 15 are written as plain decimals.
constexpr int kMinSmallExponent = 5;
constexpr int kMinLargeExponent = 16;

enum class Cmp : int8_t { kLess, kEqual, kGreater };
enum class NumberPhase : int8_t { kStart, kMinus, kZero, kInteger, kDot, kFraction, kE, kExponent };

Cmp Compare(int a, int b) { return a < b ? Cmp::kLess : a > b ? Cmp::kGreater : Cmp::kEqual; }

// The digits of a bound, by which the magnitude of a number is compared digit by digit.
class BoundDigits {
 public:
  explicit BoundDigits(const Decimal& magnitude) : bound_(magnitude) {}

  // Returns the number of digits before the bound's decimal point; a number with more such digits
  // is greater.
  int64_t integer_digits() const { return std::max<int64_t>(bound_.point, 0); }
  int integer_digit(int64_t i) const { return Digit(i); }
  int fraction_digit(int64_t i) const { return Digit(bound_.point + i); }
  int64_t fraction_digits() const {
    return std::max<int64_t>(static_cast<int64_t>(bound_.digits.size()) - bound_.point, 0);
  }
  // The digits and the exponent of the bound as a number with one digit before the point.
  int mantissa_digit(int64_t i) const { return Digit(i); }
  int64_t mantissa_digits() const { return static_cast<int64_t>(bound_.digits.size()); }
  int64_t exponent() const { return bound_.point - 1; }
  bool is_zero() const { return bound_.is_zero(); }

 private:
  int Digit(int64_t i) const {
    if (i < 0 || i >= static_cast<int64_t>(bound_.digits.size())) return 0;
    return bound_.digits[static_cast<size_t>(i)] - '0';
  }
  Decimal bound_;
};

// The bounds on the magnitude of positive or of negative numbers.
struct Side {
  bool possible = true;
  std::optional<BoundDigits> bound[2];  // lower bound, upper bound
  bool exclusive[2] = {false, false};

  // Returns whether a number that compares with the bound as `cmp` is allowed. `which` is 0 for the
  // lower bound, 1 for the upper bound.
  bool Allows(int which, Cmp cmp) const {
    if (!bound[which]) return true;
    if (cmp == Cmp::kEqual) return !exclusive[which];
    return cmp == (which == 0 ? Cmp::kGreater : Cmp::kLess);
  }
};

Side MakeSide(const NumberRange& range, bool negative) {
  Side side;
  std::optional<NumberBound> low = negative ? range.max : range.min;
  std::optional<NumberBound> high = negative ? range.min : range.max;
  if (negative && low) low->value = low->value.Negated();
  if (negative && high) high->value = high->value.Negated();
  if (high && high->value.negative) side.possible = false;
  if (low && !low->value.negative) {
    side.bound[0].emplace(low->value);
    side.exclusive[0] = low->exclusive;
  }
  if (high && side.possible) {
    side.bound[1].emplace(high->value);
    side.exclusive[1] = high->exclusive;
  }
  return side;
}

// What the automaton must remember about the part of a number that has been read. Fields that no
// longer matter are zero, so that texts which differ only in such fields have the same state.
struct NumberState {
  NumberPhase phase = NumberPhase::kStart;
  bool negative = false;
  int64_t count = 0;       // digits read: kInteger: before the point; kFraction: after it
  bool one_digit = false;  // exactly one non-zero digit was read before the point
  // Comparison with the bounds as a plain decimal.
  std::array<Cmp, 2> plain = {Cmp::kEqual, Cmp::kEqual};
  // Comparison with the bounds as a mantissa.
  std::array<Cmp, 2> mantissa = {Cmp::kEqual, Cmp::kEqual};
  int64_t remainder = 0;
  // kExponent: the sign has been read. `two` and `three` are intervals [first, last] of the values
  // that the digits still to come may have if the exponent has two or three digits in all; empty if
  // first > last.
  int exponent_digits = 0;
  bool exponent_done = false;
  std::array<int, 2> two = {1, 0};
  std::array<int, 2> three = {1, 0};

  auto Key() const {
    return std::tie(phase, negative, count, one_digit, plain, mantissa, remainder, exponent_digits,
                    exponent_done, two, three);
  }
  bool operator<(const NumberState& other) const { return Key() < other.Key(); }
};

class Builder {
 public:
  explicit Builder(const NumberRange& range)
      : range_(range), sides_{MakeSide(range, false), MakeSide(range, true)} {}

  bool Accepting(const NumberState& s) const {
    const Side& side = sides_[s.negative];
    switch (s.phase) {
      case NumberPhase::kZero:
      case NumberPhase::kInteger:
        if (s.remainder != 0) return false;
        return side.Allows(0, WithoutFraction(s, 0)) && side.Allows(1, WithoutFraction(s, 1));
      case NumberPhase::kFraction:
        return side.Allows(0, AtEnd(s, 0)) && side.Allows(1, AtEnd(s, 1));
      case NumberPhase::kExponent:
        return s.exponent_done;
      default:
        return false;
    }
  }

  std::optional<NumberState> Next(const NumberState& s, char c) const {
    const bool digit = c >= '0' && c <= '9';
    switch (s.phase) {
      case NumberPhase::kStart:
        if (c == '-') {
          NumberState next;
          next.phase = NumberPhase::kMinus;
          next.negative = true;
          return next;
        }
        [[fallthrough]];
      case NumberPhase::kMinus:
        if (!digit || !sides_[s.negative].possible) return std::nullopt;
        return FirstDigit(s.negative, c - '0');
      case NumberPhase::kZero:
      case NumberPhase::kInteger:
        if (digit && s.phase == NumberPhase::kInteger) return IntegerDigit(s, c - '0');
        if (range_.integer) return std::nullopt;
        if (c == '.') return Point(s);
        if (c == 'e' && s.one_digit) return Exponent(s);
        return std::nullopt;
      case NumberPhase::kDot:
      case NumberPhase::kFraction:
        if (digit) return FractionDigit(s, c - '0');
        if (c == 'e' && s.one_digit && s.phase == NumberPhase::kFraction) return Exponent(s);
        return std::nullopt;
      case NumberPhase::kE:
        if (c == '+' || c == '-') return ExponentSign(s, c == '-');
        return std::nullopt;
      case NumberPhase::kExponent:
        return digit ? ExponentDigit(s, c - '0') : std::nullopt;
    }
    return std::nullopt;
  }

 private:
  static Cmp Step(Cmp so_far, int digit, int bound_digit) {
    return so_far == Cmp::kEqual ? Compare(digit, bound_digit) : so_far;
  }

  NumberState FirstDigit(bool negative, int digit) const {
    NumberState s;
    s.negative = negative;
    s.phase = digit == 0 ? NumberPhase::kZero : NumberPhase::kInteger;
    s.one_digit = digit != 0 && !range_.integer;
    s.count = digit != 0;
    s.remainder = digit % range_.multiple_of;
    for (int i = 0; i < 2; ++i) {
      const auto& bound = sides_[negative].bound[i];
      if (!bound) continue;
      if (digit != 0) {
        s.plain[i] = Step(Cmp::kEqual, digit, bound->integer_digit(0));
        if (s.one_digit) s.mantissa[i] = Step(Cmp::kEqual, digit, bound->mantissa_digit(0));
      }
    }
    return Capped(s);
  }

  NumberState IntegerDigit(NumberState s, int digit) const {
    for (int i = 0; i < 2; ++i) {
      const auto& bound = sides_[s.negative].bound[i];
      if (bound && s.count < bound->integer_digits()) {
        s.plain[i] = Step(s.plain[i], digit, bound->integer_digit(s.count));
      }
    }
    s.count += 1;
    s.one_digit = false;
    s.mantissa = {Cmp::kEqual, Cmp::kEqual};
    s.remainder = (s.remainder * 10 + digit) % range_.multiple_of;
    return Capped(s);
  }

  // Limits the digit count, because numbers with more digits than every bound need not be
  // distinguished.
  NumberState Capped(NumberState s) const {
    int64_t most = 0;
    for (const auto& bound : sides_[s.negative].bound) {
      if (bound) most = std::max(most, bound->integer_digits());
    }
    if (s.count > most) {
      s.count = most + 1;
      for (int i = 0; i < 2; ++i) {
        s.plain[i] = sides_[s.negative].bound[i] ? Cmp::kGreater : Cmp::kEqual;
      }
    }
    return s;
  }

  // Returns the comparison with bound `i` when all digits before the point have been read.
  Cmp AtPoint(const NumberState& s, int i) const {
    const auto& bound = sides_[s.negative].bound[i];
    if (!bound) return Cmp::kEqual;
    const int64_t count = s.phase == NumberPhase::kZero ? 0 : s.count;
    Cmp cmp = Compare(static_cast<int>(std::min<int64_t>(count, 1 << 20)),
                      static_cast<int>(bound->integer_digits()));
    if (cmp == Cmp::kEqual && count > 0) cmp = s.plain[i];
    return cmp;
  }
  Cmp WithoutFraction(const NumberState& s, int i) const {
    const Cmp cmp = AtPoint(s, i);
    const auto& bound = sides_[s.negative].bound[i];
    if (!bound || cmp != Cmp::kEqual) return cmp;
    return bound->fraction_digits() > 0 ? Cmp::kLess : Cmp::kEqual;
  }

  Cmp AtEnd(const NumberState& s, int i) const {
    const auto& bound = sides_[s.negative].bound[i];
    if (!bound || s.plain[i] != Cmp::kEqual) return s.plain[i];
    return s.count < bound->fraction_digits() ? Cmp::kLess : Cmp::kEqual;
  }

  NumberState Point(NumberState s) const {
    for (int i = 0; i < 2; ++i) s.plain[i] = AtPoint(s, i);
    s.phase = NumberPhase::kDot;
    s.count = 0;
    s.remainder = 0;
    return s;
  }

  NumberState FractionDigit(NumberState s, int digit) const {
    s.phase = NumberPhase::kFraction;
    int64_t most = 0;
    for (int i = 0; i < 2; ++i) {
      const auto& bound = sides_[s.negative].bound[i];
      if (!bound) continue;
      s.plain[i] = Step(s.plain[i], digit, bound->fraction_digit(s.count));
      most = std::max(most, bound->fraction_digits());
      if (s.one_digit) {
        s.mantissa[i] = Step(s.mantissa[i], digit, bound->mantissa_digit(s.count + 1));
        most = std::max(most, bound->mantissa_digits());
      }
    }
    s.count = std::min(s.count + 1, most);
    return s;
  }

  NumberState Exponent(const NumberState& s) const {
    NumberState next;
    next.phase = NumberPhase::kE;
    next.negative = s.negative;
    const int64_t read = 1 + (s.phase == NumberPhase::kFraction ? s.count : 0);
    for (int i = 0; i < 2; ++i) {
      const auto& bound = sides_[s.negative].bound[i];
      if (!bound) continue;
      next.mantissa[i] = s.mantissa[i];
      if (s.mantissa[i] == Cmp::kEqual && read < bound->mantissa_digits()) {
        next.mantissa[i] = Cmp::kLess;
      }
    }
    return next;
  }

  NumberState ExponentSign(const NumberState& s, bool down) const {
    // Computes the interval of exponents for which the number is within the bounds.
    int64_t first = down ? -kMaxExponent : kMinLargeExponent;
    int64_t last = down ? -kMinSmallExponent : kMaxExponent;
    const Side& side = sides_[s.negative];
    if (side.bound[0] && !side.bound[0]->is_zero()) {
      const bool in = side.Allows(0, s.mantissa[0]);
      first = std::max(first, side.bound[0]->exponent() + (in ? 0 : 1));
    }
    if (side.bound[1]) {
      const bool in = side.Allows(1, s.mantissa[1]);
      last = side.bound[1]->is_zero() ? first - 1
                                      : std::min(last, side.bound[1]->exponent() - (in ? 0 : 1));
    }
    NumberState next;
    next.phase = NumberPhase::kExponent;
    if (first > last) return next;
    int low = static_cast<int>(down ? -last : first);
    int high = static_cast<int>(down ? -first : last);
    next.two = {low, std::min(high, 99)};
    next.three = {std::max(low, 100), high};
    return Tidy(next);
  }

  static NumberState Tidy(NumberState s) {
    if (s.two[0] > s.two[1]) s.two = {1, 0};
    if (s.three[0] > s.three[1]) s.three = {1, 0};
    return s;
  }

  static std::optional<NumberState> ExponentDigit(NumberState s, int digit) {
    // Restricts `range` to the numbers that start with `digit` and removes that digit. `width` is
    // the number of values that the digits after it can have.
    const auto rest = [digit](std::array<int, 2> range, int width) {
      const int base = digit * width;
      return std::array<int, 2>{std::max(range[0] - base, 0), std::min(range[1] - base, width - 1)};
    };
    const int read = s.exponent_digits++;
    s.exponent_done = read == 1 ? s.two[0] <= digit && digit <= s.two[1]
                                : read == 2 && s.three[0] <= digit && digit <= s.three[1];
    if (read > 2) return std::nullopt;
    s.two = read == 0 ? rest(s.two, 10) : std::array<int, 2>{1, 0};
    s.three = read == 0   ? rest(s.three, 100)
              : read == 1 ? rest(s.three, 10)
                          : std::array<int, 2>{1, 0};
    s = Tidy(s);
    if (!s.exponent_done && s.two[0] > s.two[1] && s.three[0] > s.three[1]) return std::nullopt;
    return s;
  }

  const NumberRange& range_;
  const std::array<Side, 2> sides_;
};

}  // namespace

bool NumberRange::Contains(const Decimal& value) const {
  if (min && (value < min->value || (min->exclusive && value == min->value))) return false;
  if (max && (value > max->value || (max->exclusive && value == max->value))) return false;
  if (!integer) return true;
  if (!value.is_integer()) return false;
  int64_t remainder = 0;
  for (const char c : value.Plain()) {
    if (c != '-') remainder = (remainder * 10 + (c - '0')) % multiple_of;
  }
  return remainder == 0;
}

Result<ByteDfa> NumberDfa(const NumberRange& range, CompileBudget* budget) {
  constexpr std::string_view kBytes = "0123456789-+.e";
  ByteDfa dfa;
  dfa.num_classes = static_cast<int>(kBytes.size()) + 1;
  dfa.class_of.fill(static_cast<uint8_t>(kBytes.size()));
  for (size_t i = 0; i < kBytes.size(); ++i) {
    dfa.class_of[static_cast<uint8_t>(kBytes[i])] = static_cast<uint8_t>(i);
  }
  const Builder builder(range);
  std::map<NumberState, int32_t> ids;
  std::vector<NumberState> states;
  const auto id_of = [&](const NumberState& state) {
    const auto [it, added] = ids.try_emplace(state, static_cast<int32_t>(states.size()));
    if (added) {
      states.push_back(state);
      dfa.AddState(builder.Accepting(state), false);
    }
    return it->second;
  };
  id_of(NumberState());
  for (size_t s = 0; s < states.size(); ++s) {
    MOESERVE_RETURN_IF_ERROR(budget->AddStates(1, dfa.num_classes));
    MOESERVE_RETURN_IF_ERROR(budget->Tick(64));
    const NumberState state = states[s];
    for (size_t c = 0; c < kBytes.size(); ++c) {
      const std::optional<NumberState> next = builder.Next(state, kBytes[c]);
      if (next) dfa.SetNext(static_cast<int32_t>(s), static_cast<int>(c), id_of(*next));
    }
  }
  return dfa;
}

}  // namespace moeserve::structured

#include "engine/text/structured/automata/multiple_dfa.h"

#include <algorithm>
#include <vector>

#include "base/error_text.h"
#include "engine/text/structured/automata/pattern.h"

namespace moeserve::structured {

// After `places` digits behind the point, the digits read so far are a number n. The text is
// a multiple of `step` / 10^`decimals` if n * 10^(decimals - places) is one of `step`. So a state
// is n modulo `step`, and the number of places.
Result<ByteDfa> MultipleDfa(const Decimal& number, CompileBudget* budget) {
  const int64_t length = static_cast<int64_t>(number.digits.size());
  const int decimals = static_cast<int>(std::max<int64_t>(length - number.point, 0));
  constexpr int64_t kMaxStep = 100'000;  // more states are not allowed anyway
  int64_t step = 0;
  for (int64_t i = 0; i < std::max(length, number.point); ++i) {
    step = 10 * step + (i < length ? number.digits[static_cast<size_t>(i)] - '0' : 0);
    if (step > kMaxStep) {
      return absl::InvalidArgumentError(Concat("multipleOf: multiples of ", number.Plain(),
                                               " need more automaton states than allowed"));
    }
  }

  ByteDfa dfa;
  // Class 0 is every other byte; the classes of the digits follow each other.
  constexpr int kMinus = 11;
  constexpr int kPoint = 12;
  dfa.num_classes = 13;
  for (int digit = 0; digit < 10; ++digit) {
    dfa.class_of['0' + digit] = static_cast<uint8_t>(1 + digit);
  }
  dfa.class_of['-'] = kMinus;
  dfa.class_of['.'] = kPoint;
  MOESERVE_RETURN_IF_ERROR(budget->AddStates(2 + step * (decimals + 2), dfa.num_classes));
  const int32_t start = dfa.AddState(false, true);
  const int32_t signed_start = dfa.AddState(false, true);
  // The states of the integer digits, then those after each number of places.
  const auto state_of = [&](int64_t rest, int places) {
    return static_cast<int32_t>(2 + (places + 1) * step + rest);
  };
  for (int places = -1; places <= decimals; ++places) {
    int64_t scale = 1;  // modulo `step`
    for (int i = std::max(places, 0); i < decimals; ++i) scale = scale * 10 % step;
    for (int64_t rest = 0; rest < step; ++rest) dfa.AddState(rest * scale % step == 0, true);
    MOESERVE_RETURN_IF_ERROR(budget->Tick(step));
  }
  for (int digit = 0; digit < 10; ++digit) {
    dfa.SetNext(start, 1 + digit, state_of(digit % step, -1));
    dfa.SetNext(signed_start, 1 + digit, state_of(digit % step, -1));
    for (int64_t rest = 0; rest < step; ++rest) {
      const int64_t next = (10 * rest + digit) % step;
      dfa.SetNext(state_of(rest, -1), 1 + digit, state_of(next, -1));
      for (int places = 0; places < decimals; ++places) {
        dfa.SetNext(state_of(rest, places), 1 + digit, state_of(next, places + 1));
      }
    }
    MOESERVE_RETURN_IF_ERROR(budget->Tick(step * (decimals + 1)));
  }
  for (int64_t rest = 0; rest < step; ++rest) {
    dfa.SetNext(state_of(rest, -1), kPoint, state_of(rest, 0));
    // Behind all decimals, only zeros keep a multiple.
    dfa.SetNext(state_of(rest, decimals), 1, state_of(rest, decimals));
  }
  dfa.SetNext(start, kMinus, signed_start);
  return dfa;
}

Result<ByteDfa> PlainNumberDfa(CompileBudget* budget) {
  return PatternDfa("-?(?:\\d+|\\d\\.\\d{1,14}|\\d{2,3}\\.\\d{1,12}|\\d{4,9}\\.\\d{1,6})",
                    MatchMode::kWholeText, Encoding::kUtf8, budget);
}

Result<ByteDfa> FractionDfa(CompileBudget* budget) {
  MOESERVE_ASSIGN_OR_RETURN(const ByteDfa plain, PlainNumberDfa(budget));
  MOESERVE_ASSIGN_OR_RETURN(const ByteDfa fraction, PatternDfa("\\.\\d*[1-9]", MatchMode::kSearch,
                                                               Encoding::kUtf8, budget));
  return Intersection(plain, fraction, budget);
}

}  // namespace moeserve::structured

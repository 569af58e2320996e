// Bounds on numbers compared with integer arithmetic.
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "engine/text/structured/automata/number_dfa.h"
#include "tests/structured/support.h"

namespace moeserve::testing {
namespace {

using structured::ByteDfa;
using structured::ByteSet;
using structured::CompileBudget;
using structured::Decimal;
using structured::NumberBound;
using structured::NumberRange;

ByteDfa Build(const NumberRange& range) {
  CompileBudget budget(100000, std::chrono::seconds(10));
  auto dfa = structured::NumberDfa(range, &budget);
  EXPECT_TRUE(dfa.ok());
  EXPECT_TRUE(dfa->Finish(ByteSet().set(), &budget).ok());
  return *std::move(dfa);
}

// A decimal number with up to three digits after the point, and its value in thousandths.
struct Spelt {
  std::string text;
  int64_t thousandths;
};

Spelt RandomDecimal(Random* random) {
  static constexpr int64_t kScales[] = {10, 1000, 100000, 10000000};
  int64_t value = static_cast<int64_t>(random->Next() % kScales[random->Below(4)]);
  const bool negative = random->Below(2);
  int digits = random->Below(4);
  // Zeros at the end and around the point are error-prone in comparisons.
  if (random->Below(3) == 0) value -= value % 1000;
  int64_t shown = value;
  for (int i = digits; i < 3; ++i) shown /= 10;
  for (int i = digits; i < 3; ++i) value -= value % static_cast<int64_t>(std::pow(10, 3 - digits));
  char text[64];
  const int64_t scale = static_cast<int64_t>(std::pow(10, digits));
  if (digits == 0) {
    std::snprintf(text, sizeof(text), "%lld", static_cast<long long>(shown));
  } else {
    std::snprintf(text, sizeof(text), "%lld.%0*lld", static_cast<long long>(shown / scale), digits,
                  static_cast<long long>(shown % scale));
  }
  return {(negative ? "-" : "") + std::string(text), negative ? -value : value};
}

TEST(NumberTest, PlainDecimalsAreComparedExactly) {
  Random random(3);
  int inside = 0;
  for (int round = 0; round < 300; ++round) {
    NumberRange range;
    const Spelt low = RandomDecimal(&random);
    const Spelt high = RandomDecimal(&random);
    if (random.Below(4)) range.min = {Decimal::Parse(low.text), random.Below(2) == 0};
    if (random.Below(4)) range.max = {Decimal::Parse(high.text), random.Below(2) == 0};
    const ByteDfa dfa = Build(range);
    for (int i = 0; i < 200; ++i) {
      const Spelt x = i == 0 ? low : i == 1 ? high : RandomDecimal(&random);
      bool expected = true;
      if (range.min) {
        expected &= range.min->exclusive ? x.thousandths > low.thousandths
                                         : x.thousandths >= low.thousandths;
      }
      if (range.max) {
        expected &= range.max->exclusive ? x.thousandths < high.thousandths
                                         : x.thousandths <= high.thousandths;
      }
      inside += expected;
      ASSERT_EQ(dfa.Matches(x.text), expected) << low.text << " " << high.text << ": " << x.text;
      ASSERT_EQ(range.Contains(Decimal::Parse(x.text)), expected) << x.text;
    }
  }
  EXPECT_GT(inside, 5000);
}

TEST(NumberTest, ExponentsAreComparedExactly) {
  Random random(4);
  int inside = 0;
  const auto spell = [&](int exponent) {
    std::string text = random.Below(2) ? "-" : "";
    text += static_cast<char>('1' + random.Below(9));
    if (random.Below(2)) text += "." + std::to_string(random.Below(100));
    char e[16];
    std::snprintf(e, sizeof(e), "e%+03d", exponent);
    return text + e;
  };
  const auto exponent = [&] {
    static constexpr int kExponents[] = {-300, -100, -99, -30, -9,  -6, -5,
                                         16,   17,   25,  99,  100, 300};
    return kExponents[random.Below(std::size(kExponents))];
  };
  for (int round = 0; round < 300; ++round) {
    NumberRange range;
    const std::string low = spell(exponent());
    const std::string high = random.Below(4) ? spell(exponent()) : "12.5";
    if (random.Below(4)) range.min = {Decimal::Parse(low), random.Below(2) == 0};
    if (random.Below(4)) range.max = {Decimal::Parse(high), random.Below(2) == 0};
    const ByteDfa dfa = Build(range);
    for (int i = 0; i < 100; ++i) {
      const std::string text = i == 0 ? low : spell(exponent());
      // The numbers have few digits, so that different numbers are different doubles.
      const double x = std::strtod(text.c_str(), nullptr);
      bool expected = true;
      if (range.min) {
        const double bound = std::strtod(low.c_str(), nullptr);
        expected &= range.min->exclusive ? x > bound : x >= bound;
      }
      if (range.max) {
        const double bound = std::strtod(high.c_str(), nullptr);
        expected &= range.max->exclusive ? x < bound : x <= bound;
      }
      inside += expected;
      ASSERT_EQ(dfa.Matches(text), expected) << low << " " << high << ": " << text;
    }
  }
  EXPECT_GT(inside, 3000);
}

TEST(NumberTest, IntegersAndMultiples) {
  Random random(5);
  for (int round = 0; round < 100; ++round) {
    const int64_t low = static_cast<int64_t>(random.Below(4000)) - 2000;
    const int64_t high = low + random.Below(300);
    NumberRange range;
    range.integer = true;
    range.multiple_of = 1 + random.Below(12);
    range.min = {Decimal::Parse(std::to_string(low)), false};
    range.max = {Decimal::Parse(std::to_string(high)), false};
    const ByteDfa dfa = Build(range);
    for (int64_t x = low - 50; x < high + 50; ++x) {
      const bool expected = x >= low && x <= high && x % range.multiple_of == 0;
      ASSERT_EQ(dfa.Matches(std::to_string(x)), expected) << x;
      ASSERT_FALSE(dfa.Matches(std::to_string(x) + ".0"));
    }
  }
}

TEST(NumberTest, MultipleOfOneAllowsIntegersOnly) {
  for (const char* schema : {R"({"type":"number","multipleOf":1})", R"({"multipleOf":1})",
                             R"({"enum":[1.5,2],"multipleOf":1})"}) {
    const auto constraint = Compile(Schema(schema));
    ASSERT_NE(constraint, nullptr);
    EXPECT_TRUE(Accepts(*constraint, "2")) << schema;
    EXPECT_FALSE(Accepts(*constraint, "1.5")) << schema;
  }
}

TEST(NumberTest, OnlyJsonForms) {
  const ByteDfa dfa = Build({});
  for (const std::string_view good :
       {"0", "-0", "0.0", "10", "-1.50", "1e-07", "1.5e+16", "9e+307"}) {
    EXPECT_TRUE(dfa.Matches(good)) << good;
  }
  for (const std::string_view bad : {"", "-", "00", "01", "1.", ".5", "+1", "1e5", "1e+400",
                                     "1e+05", "NaN", "Infinity", "0x1", "1 ", "12e+16", "0e+16"}) {
    EXPECT_FALSE(dfa.Matches(bad)) << bad;
  }
}

TEST(NumberTest, DecimalOrder) {
  const char* kAscending[] = {"-1e+300", "-10.5", "-10.25", "-1",   "-0.001", "0",    "1e-9",
                              "0.0999",  "0.1",   "1",      "9.99", "10",     "1e+16"};
  for (size_t i = 0; i < std::size(kAscending); ++i) {
    for (size_t j = 0; j < std::size(kAscending); ++j) {
      EXPECT_EQ(Decimal::Parse(kAscending[i]) < Decimal::Parse(kAscending[j]), i < j);
    }
  }
  EXPECT_EQ(Decimal::Parse("-0.0"), Decimal::Parse("0"));
  EXPECT_EQ(Decimal::Parse("1200e-2").Plain(), "12");
  EXPECT_EQ(Decimal::Shortest(-4.643541065813793).Plain(), "-4.643541065813793");
  EXPECT_EQ(Decimal::Shortest(1e-7).Scientific(), "1e-07");
}

}  // namespace
}  // namespace moeserve::testing

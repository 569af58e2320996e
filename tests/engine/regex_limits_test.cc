// The work of pattern searches is limited, and the limits do not change what is found.

#include <gtest/gtest.h>

#include <ctime>
#include <string>
#include <vector>

#include "engine/text/tokenizer/regex.h"
#include "engine/text/tokenizer/regex_syntax.h"

namespace moeserve {
namespace {

using Strings = std::vector<std::string>;

Strings MatchesWithin(const std::string& pattern, const std::string& text) {
  const auto regex = Regex::Compile(*TranslateRegex(pattern));
  EXPECT_TRUE(regex.ok()) << regex.status();
  Strings matches;
  Regex::Finder finder(&*regex, text);
  for (Regex::Match match; finder.Next(&match);) {
    matches.push_back(text.substr(match.begin, match.end - match.begin));
  }
  EXPECT_TRUE(finder.status().ok()) << finder.status();
  return matches;
}

// The limit counts for a whole text: each of these searches is short, all together take hours.
TEST(Regex, TheWorkForATextIsLimited) {
  for (const char* pattern : {"(a|a){0,20}b|a", "(a|a){0,20}[bc]", "(a*)*b|a", "a*a*a*a*b|a"}) {
    const auto regex = Regex::Compile(*TranslateRegex(pattern));
    ASSERT_TRUE(regex.ok()) << regex.status();
    const std::string text(4000, 'a');
    Regex::Finder finder(&*regex, text);
    const std::clock_t start = std::clock();
    for (Regex::Match match; finder.Next(&match);) {
    }
    EXPECT_TRUE(absl::IsInvalidArgument(finder.status())) << pattern << finder.status();
    EXPECT_LT(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC, 2.0) << pattern;
  }
}

// Searches that need many steps find what a search without limits finds.
TEST(Regex, LongSearchesAreExact) {
  const std::string spaces(3000, ' ');
  EXPECT_EQ(MatchesWithin("\\s+$", spaces + "x" + spaces), (Strings{spaces}));
  EXPECT_EQ(MatchesWithin("\\s+$|\\s*y", spaces + "x" + spaces + "y"), (Strings{spaces + "y"}));
  EXPECT_EQ(MatchesWithin("(a|a){0,12}b|\u00e9",
                          std::string(200, 'a') + "\u00e9" + std::string(9, 'a') + "b"),
            (Strings{"\u00e9", std::string(9, 'a') + "b"}));
  const std::string accents = [] {
    std::string text;
    for (int i = 0; i < 2000; ++i) text += "\u00e9";
    return text;
  }();
  EXPECT_EQ(MatchesWithin("(?:\\p{L}|x)+y|z", accents + "z"), (Strings{"z"}));
}

}  // namespace
}  // namespace moeserve

// The configuration file: what it may hold, how it reaches the options, and what errors say.
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/config/config_file.h"
#include "server/config/option_sources.h"
#include "server/config/suggestion.h"

namespace moeserve::server {
namespace {

std::string Error(std::string_view text) {
  const auto file = ParseConfig(text, "c.yaml");
  return file.ok() ? "ok" : std::string(file.status().message());
}

TEST(ConfigFileTest, ReadsValuesAndListsWithTheirLines) {
  const auto file =
      ParseConfig("# a comment\na: 1\n\"b\": \"x y\"\nc:\n  - one\n  - 'two'\nd: [3]\n", "c.yaml");
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->entries.size(), 4u);
  const auto& [a, b, c, d] =
      std::tie(file->entries[0], file->entries[1], file->entries[2], file->entries[3]);
  EXPECT_EQ(a.key, "a");
  EXPECT_EQ(a.line, 2);
  EXPECT_FALSE(a.is_list);
  EXPECT_EQ(a.values.at(0).text, "1");
  EXPECT_FALSE(a.values.at(0).quoted);
  EXPECT_EQ(b.key, "b");
  EXPECT_TRUE(b.values.at(0).quoted);
  EXPECT_TRUE(c.is_list);
  ASSERT_EQ(c.values.size(), 2u);
  EXPECT_EQ(c.values[1].text, "two");
  EXPECT_EQ(c.values[1].line, 6);
  EXPECT_TRUE(d.is_list);
}

TEST(ConfigFileTest, EmptyFilesHaveNoEntries) {
  for (const char* text : {"", "\n", "# only a comment\n", "---\n", "{}\n", "~\n"}) {
    const auto file = ParseConfig(text, "c.yaml");
    ASSERT_TRUE(file.ok()) << text << file.status();
    EXPECT_TRUE(file->entries.empty()) << text;
  }
}

TEST(ConfigFileTest, ErrorsNameTheLineTheExpectedAndTheFound) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"a: 1\nb: 2\na: 3\n", "c.yaml:3: \"a\" is given twice, first in line 1"},
      {"a: 1\nb:\n  c: 2\n",
       "c.yaml:2: \"b\": expected a value or a list of values, found a mapping"},
      {"a: 1\nb:\n", "c.yaml:2: \"b\": expected a value or a list of values, found nothing"},
      {"a: null\n", "c.yaml:1: \"a\": expected a value or a list of values, found nothing"},
      {"a: [[1]]\n", "c.yaml:1: \"a\": expected a list of values, found a list in it"},
      {"a: [1, ~]\n", "c.yaml:1: \"a\": expected a list of values, found nothing in it"},
      {"a: [{b: 1}]\n", "c.yaml:1: \"a\": expected a list of values, found a mapping in it"},
      {"- a\n", "c.yaml:1: expected a mapping from option names to values, found a list"},
      {"word\n", "c.yaml:1: expected a mapping from option names to values, found one value"},
      {"? [a]\n: 1\n", "c.yaml:1: expected the name of an option, found a list"},
      {"a: &x 1\n", "c.yaml:1: anchors and aliases are not supported"},
      {"a: 1\nb: !!int 1\n",
       "c.yaml:2: expected a value without a tag, found the tag \"tag:yaml.org,2002:int\""},
      {"a: 1\n---\nb: 1\n", "c.yaml:2: expected one document, found a second one"},
  };
  for (const auto& [text, error] : cases) EXPECT_EQ(Error(text), error) << text;
  for (const char* text : {"a: 1\nb: \"x\n", "a: [1\n", "a: {\n", "a: 'x", "a: b: c\n", "\ta: 1\n",
                           "a: 1\n b: 2\n", "a\n: 1\n", "a: \"\\q\"\n", "a: \x01\n", "a: \xff\n"}) {
    EXPECT_TRUE(Error(text).starts_with("c.yaml:")) << text << Error(text);
  }
}

TEST(ConfigFileTest, HostileFilesAreBounded) {
  EXPECT_NE(Error(std::string(kMaxConfigBytes + 1, '#')), "ok");
  EXPECT_EQ(Error(std::string(kMaxConfigBytes, '#')), "ok");
  EXPECT_NE(Error(std::string("a: \0b", 6)), "ok");
  EXPECT_NE(Error(std::string(60000, '[')), "ok");
  EXPECT_NE(Error(std::string(60000, '{')), "ok");
  std::string nested;
  for (int i = 0; i < 30000; ++i) nested += "- ";
  EXPECT_NE(Error(nested), "ok");
  std::string many = "a: [";
  for (size_t i = 0; i < kMaxConfigValues; ++i) many += "1,";
  EXPECT_EQ(Error(many + "1]"), "c.yaml:1: expected at most 1000 values");
  // Values that double with every line.
  std::string laughs = "a0: &a0 [x]\n";
  for (int i = 1; i < 40; ++i) {
    const std::string before = std::to_string(i - 1);
    laughs += "a" + std::to_string(i) + ": [*a" + before + ", *a" + before + "]\n";
  }
  EXPECT_NE(Error(laughs), "ok");
  // Every start of a file, and every file with one byte changed, is read or refused.
  const std::string text = "model: \"x\\n\"\nlist: ['a', b]\n# c\nd: |\n  block\ne: >-\n  folded\n";
  for (size_t i = 0; i < text.size(); ++i) {
    Error(text.substr(0, i));
    for (const char c : {'\x80', '\xff', '%', '&', '*', '!', '|', '{', '[', '\t', '"', '?'}) {
      std::string changed = text;
      changed[i] = c;
      Error(changed);
    }
  }
}

TEST(SuggestionTest, FindsTheMostSimilarName) {
  const std::vector<std::string> names = {"model", "max-num-seqs", "max-model-len", "http"};
  EXPECT_EQ(Suggestion("modle", names), "; did you mean \"model\"?");
  EXPECT_EQ(Suggestion("max_num_seqs", names), "; did you mean \"max-num-seqs\"?");
  EXPECT_EQ(Suggestion("Http", names), "; did you mean \"http\"?");
  EXPECT_EQ(Suggestion("temperature", names), "");
  EXPECT_EQ(Suggestion(std::string(100000, 'x'), names), "");
  EXPECT_EQ(Suggestion("", names), "");
}

// A command with an option of every kind.
class OptionSourcesTest : public ::testing::Test {
 protected:
  OptionSourcesTest() {
    command_.add_option("--model", model_, "The model")->required();
    command_.add_option("--http", http_, "The address")
        ->envname("TEST_HTTP")
        ->capture_default_str();
    command_.add_option("--count", count_, "A number")
        ->check(CLI::Range(0, 8))
        ->capture_default_str();
    command_.add_option("--seconds", seconds_, "A number")->capture_default_str();
    command_.add_option("--kind", kind_, "A word")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->capture_default_str();
    command_.add_option("--name", names_, "Names");
    command_.add_option("--part", parts_, "Names")->delimiter(',');
    command_.add_flag("--strict", strict_, "A flag");
    command_.add_flag("!--no-cache", cache_, "A flag that switches off");
    command_.add_option("--token", token_, "A secret");
    command_.add_flag("--print", print_, "For the command line");
    sources_.emplace(command_, std::vector<std::string>{"print"},
                     std::vector<std::string>{"token"});
  }

  absl::Status Resolve(const std::string& yaml, std::vector<std::string> line = {},
                       bool partial = false) {
    std::reverse(line.begin(), line.end());
    command_.parse(line);
    std::optional<ConfigFile> file;
    if (!yaml.empty()) {
      auto parsed = ParseConfig(yaml, "c.yaml");
      if (!parsed.ok()) return parsed.status();
      file = *std::move(parsed);
    }
    return sources_->Resolve(
        file,
        [this](const char* name) {
          const auto found = variables_.find(name);
          return found == variables_.end() ? nullptr : found->second.c_str();
        },
        partial);
  }

  std::string Message(const std::string& yaml) {
    return std::string(Resolve(yaml, {"--model", "m"}).message());
  }

  std::map<std::string, std::string> variables_;
  CLI::App command_;
  std::string model_;
  std::string http_ = "default";
  int count_ = 3;
  double seconds_ = 1.5;
  std::string kind_ = "cpu";
  std::vector<std::string> names_;
  std::vector<std::string> parts_;
  bool strict_ = false;
  bool cache_ = true;
  std::string token_;
  bool print_ = false;
  std::optional<OptionSources> sources_;
};

TEST_F(OptionSourcesTest, FileSetsEveryKindOfOption) {
  ASSERT_TRUE(
      Resolve("model: m\ncount: 5\nseconds: 2.5\nkind: cuda\nname: [a, 'b c']\npart: [x, y]\n"
              "strict: true\nno-cache: true\n")
          .ok());
  EXPECT_EQ(model_, "m");
  EXPECT_EQ(count_, 5);
  EXPECT_EQ(seconds_, 2.5);
  EXPECT_EQ(kind_, "cuda");
  EXPECT_EQ(names_, (std::vector<std::string>{"a", "b c"}));
  EXPECT_EQ(parts_, (std::vector<std::string>{"x", "y"}));
  EXPECT_TRUE(strict_);
  EXPECT_FALSE(cache_);
}

TEST_F(OptionSourcesTest, FalseLeavesFlagsOff) {
  ASSERT_TRUE(Resolve("model: m\nstrict: false\nno-cache: false\nname: one\n").ok());
  EXPECT_FALSE(strict_);
  EXPECT_TRUE(cache_);
  EXPECT_EQ(names_, std::vector<std::string>{"one"});
}

TEST_F(OptionSourcesTest, CommandLineOverridesEnvironmentOverridesFile) {
  variables_["TEST_HTTP"] = "environment";
  ASSERT_TRUE(Resolve("model: m\nhttp: file\ncount: 1\n", {"--count", "2"}).ok());
  EXPECT_EQ(http_, "environment");
  EXPECT_EQ(count_, 2);
}

TEST_F(OptionSourcesTest, CommandLineOverridesEnvironment) {
  variables_["TEST_HTTP"] = "environment";
  ASSERT_TRUE(Resolve("model: m\nhttp: file\n", {"--http", "line"}).ok());
  EXPECT_EQ(http_, "line");
}

TEST_F(OptionSourcesTest, EmptyVariablesAreUnset) {
  variables_["TEST_HTTP"] = "";
  ASSERT_TRUE(Resolve("model: m\nhttp: file\n").ok());
  EXPECT_EQ(http_, "file");
}

TEST_F(OptionSourcesTest, RequiredOptionsCanComeFromTheFile) {
  const std::string error(Resolve("count: 1\n").message());
  EXPECT_TRUE(error.starts_with("--model is required")) << error;
}

TEST_F(OptionSourcesTest, PartialConfigurationsLackRequiredOptions) {
  EXPECT_TRUE(Resolve("count: 1\n", {}, /*partial=*/true).ok());
}

TEST_F(OptionSourcesTest, ErrorsNameLineKeyExpectedAndFound) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"a: 1\n", "c.yaml:1: expected the name of an option, found \"a\""},
      {"\n\nconut: 1\n",
       "c.yaml:3: expected the name of an option, found \"conut\"; did you mean \"count\"?"},
      {"count: 9\n", "c.yaml:1: \"count\": expected a whole number from 0 to 8, found \"9\""},
      {"count: many\n", "c.yaml:1: \"count\": expected a whole number from 0 to 8, found \"many\""},
      {"count: 1.5\n", "c.yaml:1: \"count\": expected a whole number from 0 to 8, found \"1.5\""},
      {"count: '1'\n",
       "c.yaml:1: \"count\": expected a whole number from 0 to 8, found the text \"1\""},
      {"count: [1]\n", "c.yaml:1: \"count\": expected a whole number from 0 to 8, found a list"},
      {"seconds: soon\n", "c.yaml:1: \"seconds\": expected a number, found \"soon\""},
      {"seconds: nan\n", "c.yaml:1: \"seconds\": expected a number, found \"nan\""},
      {"kind: cpuu\n",
       "c.yaml:1: \"kind\": expected one of cpu, cuda, found \"cpuu\"; did you mean \"cpu\"?"},
      {"strict: 1\n", "c.yaml:1: \"strict\": expected true or false, found \"1\""},
      {"strict: 'true'\n", "c.yaml:1: \"strict\": expected true or false, found the text \"true\""},
      {"http: [a, b]\n", "c.yaml:1: \"http\": expected text, found a list"},
      {"print: true\n", "c.yaml:1: \"print\" can be given on the command line only"},
      {"token: [s3cret]\n", "c.yaml:1: \"token\": expected text, found a list"},
  };
  for (const auto& [yaml, error] : cases) EXPECT_EQ(Message(yaml), error) << yaml;
}

TEST_F(OptionSourcesTest, SeveralErrorsAreReportedTogether) {
  EXPECT_EQ(Message("a: 1\ncount: x\n"),
            "2 problems\n  c.yaml:1: expected the name of an option, found \"a\"\n"
            "  c.yaml:2: \"count\": expected a whole number from 0 to 8, found \"x\"");
}

TEST_F(OptionSourcesTest, ErrorsOfVariablesNameTheVariable) {
  command_.add_option("--late", count_)->check(CLI::Range(0, 8))->envname("TEST_LATE");
  sources_.emplace(command_, std::vector<std::string>(), std::vector<std::string>());
  variables_["TEST_LATE"] = "x";
  EXPECT_EQ(Message(""),
            "environment variable TEST_LATE: expected a whole number from 0 to 8, found \"x\"");
}

TEST_F(OptionSourcesTest, YamlShowsSourcesAndNoSecrets) {
  variables_["TEST_HTTP"] = "[::1]:80";
  ASSERT_TRUE(Resolve("name: ['a: \"b', on, \"\\u00e9\\t\"]\nstrict: true\ntoken: s3cret\n",
                      {"--model", "dir/m", "--no-cache", "--part", "x,y"})
                  .ok());
  EXPECT_EQ(sources_->ToYaml(),
            "model: dir/m  # command line\n"
            "http: \"[::1]:80\"  # environment TEST_HTTP\n"
            "count: 3  # default\n"
            "seconds: 1.5  # default\n"
            "kind: cpu  # default\n"
            "name: [\"a: \\\"b\", \"on\", \"\xc3\xa9\\t\"]  # c.yaml:1\n"
            "part: [x, \"y\"]  # command line\n"
            "strict: true  # c.yaml:2\n"
            "no-cache: true  # command line\n"
            "# token: (not shown)  # c.yaml:3\n");
}

TEST_F(OptionSourcesTest, YamlCanBeReadBack) {
  const std::string first =
      "name: [\"a: \\\"b\\\\\", \"-1\", \"\\u0007\\u2028\"]\ncount: 7\nno-cache: true\n";
  ASSERT_TRUE(Resolve(first, {"--model", "m"}).ok());
  const std::string yaml = sources_->ToYaml();
  const std::vector<std::string> names = names_;
  names_.clear();
  count_ = 0;
  cache_ = true;
  command_.clear();
  sources_.emplace(command_, std::vector<std::string>{"print"}, std::vector<std::string>{"token"});
  ASSERT_TRUE(Resolve(yaml).ok()) << yaml << Resolve(yaml);
  EXPECT_EQ(names_, names);
  EXPECT_EQ(count_, 7);
  EXPECT_FALSE(cache_);
}

TEST_F(OptionSourcesTest, LaterErrorsNameTheSource) {
  variables_["TEST_HTTP"] = "x";
  ASSERT_TRUE(Resolve("kind: cuda\nmodel: m\n", {"--count", "1"}).ok());
  const auto explain = [&](const char* message) {
    return std::string(sources_->WithSource(absl::InvalidArgumentError(message)).message());
  };
  EXPECT_EQ(explain("--http: bad"), "--http: bad (set by environment TEST_HTTP)");
  EXPECT_EQ(explain("--kind: bad"), "--kind: bad (set by c.yaml:1)");
  EXPECT_EQ(explain("--count: bad"), "--count: bad");
  EXPECT_EQ(explain("--kind-of: bad"), "--kind-of: bad");
  EXPECT_TRUE(sources_->WithSource(absl::OkStatus()).ok());
}

}  // namespace
}  // namespace moeserve::server

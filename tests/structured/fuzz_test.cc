// Compiles mutated schemas and patterns. Compiling must end in time, and a compiled constraint must
// be usable.
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/structured/compile_constraint.h"
#include "tests/structured/corpus.h"
#include "tests/structured/hostile.h"

namespace moeserve::testing {
namespace {

constexpr std::string_view kPieces[] = {"{\"type\":\"object\"}",
                                        "{\"anyOf\":[",
                                        "{\"allOf\":[",
                                        "{\"oneOf\":[",
                                        "{\"$ref\":\"#\"}",
                                        "\"$defs\":{",
                                        "\"properties\":{",
                                        "\"required\":[",
                                        "\"items\":",
                                        "\"prefixItems\":[",
                                        "\"minItems\":",
                                        "\"maxItems\":",
                                        "\"minLength\":",
                                        "\"maxLength\":",
                                        "\"pattern\":\"",
                                        "\"enum\":[",
                                        "\"const\":",
                                        "\"minimum\":",
                                        "\"exclusiveMaximum\":",
                                        "\"multipleOf\":",
                                        "\"additionalProperties\":",
                                        "\"minProperties\":",
                                        "\"maxProperties\":",
                                        "\"uniqueItems\":",
                                        "\"not\":",
                                        "\"if\":",
                                        "\"then\":",
                                        "\"else\":",
                                        "\"contains\":",
                                        "\"minContains\":",
                                        "\"maxContains\":",
                                        "\"patternProperties\":{\"^a\":",
                                        "\"propertyNames\":",
                                        "\"dependentRequired\":{\"a\":[",
                                        "\"dependentSchemas\":{\"a\":",
                                        "\"$id\":\"a\"",
                                        "\"$anchor\":\"b\"",
                                        "\"$ref\":\"#b\"",
                                        "\"format\":\"uri\"",
                                        "\"format\":\"date-time\"",
                                        "\"type\":[\"null\",\"number\"]",
                                        "true",
                                        "false",
                                        "null",
                                        "9999",
                                        "-1",
                                        "1e300",
                                        "1.5",
                                        "0",
                                        "}",
                                        "]",
                                        ",",
                                        ":",
                                        "\\u0000",
                                        "\\ud83d",
                                        "é",
                                        "\"\"",
                                        "(?:",
                                        "){7}",
                                        "*",
                                        "[^a]",
                                        "|",
                                        "{2,90}",
                                        "\\\\d",
                                        "^",
                                        "$",
                                        "(?=",
                                        "\\\\1",
                                        "\xFF"};

std::string Mutated(std::string text, const std::vector<std::string>& seeds, Random* random) {
  for (int n = 1 + random->Below(4); n > 0; --n) {
    const auto place = [&] { return random->Below(static_cast<int>(text.size()) + 1); };
    const size_t at = place();
    switch (random->Below(6)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(random->Below(256));
        break;
      case 1:
        text.erase(at, random->Below(12));
        break;
      case 2:
      case 3:
        text.insert(at, kPieces[random->Below(std::size(kPieces))]);
        break;
      case 4:
        text.insert(at, text.substr(place(), random->Below(40)));
        break;
      default: {
        const std::string& other = seeds[random->Below(static_cast<int>(seeds.size()))];
        const size_t from = random->Below(static_cast<int>(other.size()) + 1);
        text.insert(at, other.substr(from, random->Below(80)));
      }
    }
  }
  return text;
}

double CpuSeconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// Compiles a constraint and draws a short completion. Returns whether the constraint compiled.
bool Use(const ConstraintSpec& spec, Random* random) {
  ConstraintLimits limits;
  limits.states = 10000;
  limits.compile_time = std::chrono::milliseconds(200);
  const double start = CpuSeconds();
  const auto compiled = CompileConstraint(spec, SmallVocabulary(), limits);
  EXPECT_LT(CpuSeconds() - start, 2.0) << spec.text;
  if (!compiled.ok()) {
    EXPECT_EQ(compiled.status().code(), absl::StatusCode::kInvalidArgument);
    return false;
  }
  const auto& vocabulary = *SmallVocabulary();
  const int64_t shortest = ShortestAnswer(**compiled);
  const int64_t limit = shortest < 30 ? shortest : 30;
  const auto state = (*compiled)->NewState();
  for (int64_t left = limit; left > 0; --left) {
    const auto allowed = TokensOf(MaskOf(state.get(), vocabulary, left));
    EXPECT_FALSE(allowed.empty()) << spec.text;
    if (allowed.empty()) return true;
    const TokenId id = allowed[random->Below(static_cast<int>(allowed.size()))];
    EXPECT_TRUE(state->Accept(id)) << spec.text;
    if (id == kEos) return true;
  }
  if (shortest <= limit && (spec.format == nullptr || !HasFreeText(*spec.format))) {
    EXPECT_TRUE(state->complete()) << spec.text;
  }
  return true;
}

TEST(FuzzTest, Schemas) {
  Random random(41);
  std::vector<std::string> seeds;
  for (const ConstraintSpec& spec : Corpus()) {
    if (spec.kind == ConstraintSpec::Kind::kJsonSchema) seeds.push_back(spec.text);
  }
  int compiled = 0;
  constexpr int kRounds = 20000;
  for (int round = 0; round < kRounds; ++round) {
    const std::string& seed = seeds[random.Below(static_cast<int>(seeds.size()))];
    compiled += Use(Schema(Mutated(seed, seeds, &random), random.Below(2) == 0), &random);
    if (HasFailure()) return;
  }
  EXPECT_GT(compiled, kRounds / 50);
}

TEST(FuzzTest, SchemasBuiltOfParts) {
  Random random(42);
  std::vector<std::string> parts;
  for (const ConstraintSpec& spec : Corpus()) {
    if (spec.kind == ConstraintSpec::Kind::kJsonSchema) parts.push_back(spec.text);
  }
  int compiled = 0;
  constexpr int kRounds = 1500;
  for (int round = 0; round < kRounds; ++round) {
    const auto part = [&] { return parts[random.Below(static_cast<int>(parts.size()))]; };
    const auto list = [&] {
      return "[" + List(1 + random.Below(3), [&](int) { return part(); }) + "]";
    };
    std::string schema;
    switch (random.Below(11)) {
      case 6:
        schema = "{\"not\":" + part() + ",\"type\":[\"string\",\"number\",\"object\"]}";
        break;
      case 7:
        schema = "{\"if\":" + part() + ",\"then\":" + part() + ",\"else\":" + part() + "}";
        break;
      case 8:
        schema = "{\"type\":\"object\",\"patternProperties\":{\"^a\":" + part() +
                 ",\"b$\":" + part() + "},\"additionalProperties\":" + part() +
                 ",\"minProperties\":" + std::to_string(random.Below(3)) + "}";
        break;
      case 9:
        schema = "{\"type\":\"array\",\"items\":" + part() + ",\"contains\":" + part() +
                 ",\"maxContains\":" + std::to_string(random.Below(4)) + "}";
        break;
      case 10:
        schema = "{\"type\":\"array\",\"uniqueItems\":true,\"items\":" + part() + "}";
        break;
      case 0:
        schema = "{\"anyOf\":" + list() + "}";
        break;
      case 1:
        schema = "{\"allOf\":" + list() + "}";
        break;
      case 2:
        schema = "{\"oneOf\":" + list() + "}";
        break;
      case 3:
        schema = "{\"type\":\"array\",\"items\":" + part() +
                 ",\"minItems\":" + std::to_string(random.Below(4)) + "}";
        break;
      case 4:
        schema = "{\"type\":\"object\",\"properties\":{\"p\":" + part() + ",\"q\":" + part() +
                 "},\"required\":[\"p\"],\"additionalProperties\":" + part() + "}";
        break;
      default:
        schema = "{\"anyOf\":" + list() + ",\"allOf\":" + list() + "}";
    }
    compiled += Use(Schema(schema), &random);
    if (HasFailure()) return;
    if (schema.size() < 3000 && schema.find("$ref") == std::string::npos) parts.push_back(schema);
  }
  EXPECT_GT(compiled, kRounds / 10);
}

TEST(FuzzTest, Grammars) {
  Random random(44);
  std::vector<std::string> seeds = {
      "root ::= a (\"x\" | a){2,3} # c\na ::= [^a-z]* | \"(\" a \")\" | 'b' .",
      "start: a -> b\n?a.1: \"x\"i a | /[a-z]+/ | B~1..3 [\"c\"..\"f\"]\nB: \"b\"\n%ignore B",
      "start: (x | INT)* \nx: \"(\" start \")\"\n%import common.INT\n%import common (WS)\n%ignore "
      "WS"};
  for (const ConstraintSpec& spec : Corpus()) {
    if (spec.kind == ConstraintSpec::Kind::kGrammar) seeds.push_back(spec.text);
  }
  int compiled = 0;
  constexpr int kRounds = 6000;
  for (int round = 0; round < kRounds; ++round) {
    const std::string& seed = seeds[random.Below(static_cast<int>(seeds.size()))];
    compiled += Use(ContextFree(Mutated(seed, seeds, &random)), &random);
    if (HasFailure()) return;
  }
  EXPECT_GT(compiled, kRounds / 40);
}

// Formats of random parts, some of them invalid.
TextFormat RandomFormat(const std::vector<ConstraintSpec>& leaves, int depth, Random* random) {
  using Kind = TextFormat::Kind;
  const auto text = [&] {
    static constexpr std::string_view kTexts[] = {"",  "<",  "<a>", "</a>", "\xC3",
                                                  "é", ", ", "{",   "a"};
    return std::string(kTexts[random->Below(std::size(kTexts))]);
  };
  TextFormat out;
  const int kind = random->Below(depth > 0 ? 9 : 6);
  if (kind < 2) {
    const ConstraintSpec& leaf = leaves[random->Below(static_cast<int>(leaves.size()))];
    using Leaf = ConstraintSpec::Kind;
    out.kind = leaf.kind == Leaf::kJsonSchema ? Kind::kJsonSchema
               : leaf.kind == Leaf::kRegex    ? Kind::kRegex
               : leaf.kind == Leaf::kChoice   ? Kind::kChoice
               : leaf.kind == Leaf::kGrammar  ? Kind::kGrammar
                                              : Kind::kJsonObject;
    out.text = leaf.text;
    out.choices = leaf.choices;
  } else if (kind < 4) {
    out.kind = Kind::kAnyText;
  } else if (kind < 6) {
    out.kind = Kind::kText;
    out.text = text();
  } else if (kind < 8) {
    out.kind = kind == 6 ? Kind::kSequence : Kind::kAnyOf;
    for (int n = random->Below(4); n > 0; --n) {
      out.parts.push_back(RandomFormat(leaves, depth - 1, random));
    }
  } else {
    out.kind = Kind::kTags;
    StructuralTags tags;
    for (int n = random->Below(4); n > 0; --n) {
      tags.tags.push_back({text(), RandomFormat(leaves, depth - 1, random), text()});
    }
    tags.free_text = random->Below(2);
    if (random->Below(3) == 0) tags.triggers.push_back(text());
    tags.at_least_one = random->Below(2);
    tags.stop_after_first = random->Below(2);
    tags.max_tags = random->Below(4) - 1 + random->Below(2);
    tags.prefix = text();
    tags.separator = text();
    tags.suffix = text();
    tags.json_array = random->Below(4) == 0;
    out.tags = std::make_shared<const StructuralTags>(std::move(tags));
  }
  return out;
}

TEST(FuzzTest, Formats) {
  Random random(45);
  const std::vector<ConstraintSpec> leaves = Corpus();
  int compiled = 0;
  constexpr int kRounds = 4000;
  for (int round = 0; round < kRounds; ++round) {
    ConstraintSpec spec;
    spec.kind = ConstraintSpec::Kind::kFormat;
    spec.format = std::make_shared<const TextFormat>(RandomFormat(leaves, 4, &random));
    compiled += Use(spec, &random);
    if (HasFailure()) return;
  }
  EXPECT_GT(compiled, kRounds / 20);
}

TEST(FuzzTest, Patterns) {
  Random random(43);
  std::vector<std::string> seeds = {"^[A-Z]{3}-\\d{4}$",    "(a|b|c)*x+",
                                    "[^\"\\\\]*",           "\\u00e9{2,5}?",
                                    "(?<n>a.){3}|\\w+\\s?", "[\\x41-\\u{1F600}]+(?:)|"};
  for (const ConstraintSpec& spec : Corpus()) {
    if (spec.kind == ConstraintSpec::Kind::kRegex) seeds.push_back(spec.text);
  }
  int compiled = 0;
  constexpr int kRounds = 4000;
  for (int round = 0; round < kRounds; ++round) {
    const std::string& seed = seeds[random.Below(static_cast<int>(seeds.size()))];
    compiled += Use(Pattern(Mutated(seed, seeds, &random)), &random);
    if (HasFailure()) return;
  }
  EXPECT_GT(compiled, kRounds / 10);
}

}  // namespace
}  // namespace moeserve::testing

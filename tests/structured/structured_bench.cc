// Measures structured output: masks, compilation, and the index of the vocabulary.
//
//   structured_bench [MODEL_DIR]
//
// Without a folder, uses a synthetic vocabulary of 128 thousand tokens like those in large
// vocabularies. Every line shows the CPU time of compiling one constraint, and of its masks along
// completions drawn by uniformly random allowed tokens.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "base/check.h"
#include "engine/text/structured/compile_constraint.h"
#include "model_loaders/tokenizer/tokenizer_json.h"
#include "tests/structured/hostile.h"

namespace moeserve::testing {
namespace {

double CpuMicroseconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

std::vector<std::string> LargeVocabulary(int size) {
  Random random(11);
  std::vector<std::string> tokens = {"<pad>", "<eos>"};
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, static_cast<char>(b));
  for (int i = 0; i < 1110; ++i)
    tokens.push_back(i < 1000 ? std::to_string(i) : "0" + std::to_string(i - 1000));
  for (const char c : std::string_view(" \n\t")) {
    for (int n = 2; n <= 80; ++n) {
      tokens.emplace_back(n, c);
      tokens.push_back("\n" + std::string(n, c));
    }
  }
  const std::string marks = "\"\"\"'{}[]():;,.-_/\\ \n";
  // One in sixty tokens contains a quotation mark.
  while (static_cast<int>(tokens.size()) < 8000) {
    std::string token;
    for (int n = 1 + random.Below(5); n > 0; --n)
      token += marks[random.Below(static_cast<int>(marks.size()))];
    if (random.Below(3) == 0) token += static_cast<char>('a' + random.Below(26));
    tokens.push_back(std::move(token));
  }
  while (static_cast<int>(tokens.size()) < size) {
    std::string token = random.Below(2) ? " " : "";
    const int kind = random.Below(10);
    if (kind < 8) {
      // Words share prefixes, as real words do.
      const char* kParts[] = {"con",  "in", "re", "st", "er", "ing", "tion", "ab", "le", "o",
                              "ment", "ly", "s",  "de", "ex", "th",  "e",    "a",  "n",  "ou"};
      for (int n = 1 + random.Below(4); n > 0; --n) token += kParts[random.Below(20)];
      if (random.Below(2)) token += static_cast<char>('a' + random.Below(26));
      if (random.Below(4) == 0)
        token[token[0] == ' '] = static_cast<char>(token[token[0] == ' '] - 32);
    } else {
      for (int n = 1 + random.Below(4); n > 0; --n) {
        token += static_cast<char>(0xE4 + random.Below(6));
        token += static_cast<char>(0x80 + random.Below(64));
        token += static_cast<char>(0x80 + random.Below(64));
      }
    }
    tokens.push_back(std::move(token));
  }
  return tokens;
}

ConstraintSpec Tools(int count, bool free_text) {
  StructuralTags tags;
  for (int i = 0; i < count; ++i) {
    StructuralTag tag;
    tag.begin = "<tool_call>\n{\"name\": \"tool_" + std::to_string(i) + "\", \"arguments\": ";
    tag.content.kind = TextFormat::Kind::kJsonSchema;
    tag.content.text = R"({"type":"object","properties":{"query":{"type":"string"},"limit":
        {"type":"integer"}},"required":["query"],"additionalProperties":false})";
    tag.end = "}\n</tool_call>";
    tags.tags.push_back(std::move(tag));
  }
  tags.free_text = free_text;
  if (free_text) tags.triggers = {"<tool_call>"};
  if (!free_text) tags.separator = "\n";
  tags.at_least_one = !free_text;
  return TagsConstraint(std::move(tags));
}

std::vector<NamedSpec> TypicalSpecs() {
  return {
      {"json_object", {}},
      {"function call", Schema(R"({"type":"object","properties":{"name":{"enum":["get_weather",
        "search","send_mail"]},"arguments":{"type":"object"}},"required":["name","arguments"],
        "additionalProperties":false})")},
      {"person", Schema(R"({"type":"object","properties":{"name":{"type":"string"},
        "age":{"type":"integer","minimum":0,"maximum":150},"email":{"type":"string",
        "format":"email"},"tags":{"type":"array","items":{"type":"string","maxLength":20},
        "maxItems":5},"height":{"type":"number"},"born":{"type":"string","format":"date"}},
        "required":["name","age","email","tags","height","born"],"additionalProperties":false})")},
      {"tree", Schema(R"({"$defs":{"n":{"type":"object","properties":{"label":{"type":"string"},
        "children":{"type":"array","items":{"$ref":"#/$defs/n"}}},"required":["label","children"],
        "additionalProperties":false}},"$ref":"#/$defs/n"})")},
      {"strings of bounded length", Schema(R"({"type":"array","items":{"type":"string",
        "minLength":10,"maxLength":60}})")},
      {"regex date", Pattern("\\d{4}-\\d{2}-\\d{2}")},
      {"regex words", Pattern("(?:[A-Za-z]+[ ,.])*")},
      {"choice", Choices({"positive", "negative", "neutral"})},
      {"keys of a pattern", Schema(R"({"type":"object","patternProperties":{"^x-":{"type":"string"},
        "^[a-z_]+$":{"type":"integer"}},"additionalProperties":false})")},
      {"free text and 100 tools", Tools(100, /*free_text=*/true)},
      {"calls of 100 tools", Tools(100, /*free_text=*/false)},
      {"grammar of arithmetic", ContextFree(R"g(root ::= sum
        sum ::= product (ws ("+" | "-") ws product)*
        product ::= value (ws ("*" | "/") ws value)*
        value ::= [0-9]+ ("." [0-9]+)? | [a-z]+ | "(" ws sum ws ")"
        ws ::= [ \n]*)g")},
      {"grammar of free text in tags", ContextFree(R"g(root ::= item+
        item ::= [^<>]+ | "<" name ">" item* "</" name ">"
        name ::= [a-z]+)g")},
  };
}

struct Times {
  std::vector<double> us;
  void Print(const char* what) {
    if (us.empty()) return;
    std::sort(us.begin(), us.end());
    std::printf("  %s: median %.1f  p99 %.1f  worst %.1f us (%zu)\n", what, us[us.size() / 2],
                us[us.size() * 99 / 100], us.back(), us.size());
  }
};

void Measure(const NamedSpec& named, const std::shared_ptr<const VocabularyIndex>& vocabulary) {
  double start = CpuMicroseconds();
  const auto compiled = CompileConstraint(named.spec, vocabulary);
  const double compile = CpuMicroseconds() - start;
  std::printf("%s: compiled in %.2f ms\n", named.name.c_str(), compile * 1e-3);
  if (!compiled.ok()) {
    std::printf("  refused: %s\n", std::string(compiled.status().message()).c_str());
    return;
  }
  Times masks;
  Times accepts;
  Random random(5);
  std::vector<uint32_t> mask(vocabulary->mask_words());
  start = CpuMicroseconds();
  for (int walk = 0; walk < 12 && CpuMicroseconds() - start < 3e6; ++walk) {
    const auto state = (*compiled)->NewState();
    const int64_t limit = walk % 3 == 0 ? 100 : walk % 3 == 1 ? 1000 : int64_t{1} << 40;
    for (int64_t i = 0; i < std::min<int64_t>(limit, 1500); ++i) {
      const double before = CpuMicroseconds();
      state->AllowedTokens(mask, limit - i);
      masks.us.push_back(CpuMicroseconds() - before);
      const std::vector<TokenId> allowed = TokensOf(mask);
      MOESERVE_CHECK(!allowed.empty(), "a mask is never empty");
      TokenId id = allowed[random.Below(static_cast<int>(allowed.size()))];
      // Tokens that begin with a JSON punctuation mark are drawn more often, so that strings end
      // and containers nest.
      for (int t = 0; t < 30 && random.Below(2); ++t) {
        const std::string_view bytes = vocabulary->Bytes(id);
        if (!bytes.empty() && std::string_view("\"{[,:").find(bytes[0]) != std::string_view::npos)
          break;
        id = allowed[random.Below(static_cast<int>(allowed.size()))];
      }
      if (vocabulary->IsEos(id)) break;
      const double between = CpuMicroseconds();
      MOESERVE_CHECK(state->Accept(id), "an allowed token is accepted");
      accepts.us.push_back(CpuMicroseconds() - between);
      if (state->complete() && !state->can_continue()) break;
    }
  }
  masks.Print("mask");
  accepts.Print("accept");
}

}  // namespace
}  // namespace moeserve::testing

int main(int argc, char** argv) {
  using namespace moeserve;
  using namespace moeserve::testing;
  std::unique_ptr<Tokenizer> tokenizer;
  TokenId eos = kEos;
  if (argc > 1) {
    auto loaded = LoadTokenizerJson(argv[1]);
    if (!loaded.ok()) {
      std::fprintf(stderr, "%s\n", std::string(loaded.status().message()).c_str());
      return 1;
    }
    tokenizer = *std::move(loaded);
    // Any special token can serve as the end of a sequence.
    for (eos = 0; !tokenizer->IsSpecial(eos);) ++eos;
  } else {
    tokenizer = std::make_unique<ListTokenizer>(LargeVocabulary(128000), 2);
  }
  const double start = CpuMicroseconds();
  const auto vocabulary = VocabularyIndex::Build(*tokenizer, {eos}, tokenizer->vocab_size());
  MOESERVE_CHECK(vocabulary.ok(), "the vocabulary can be indexed");
  std::printf("index of %d tokens, %zu nodes: %.1f ms\n", tokenizer->vocab_size(),
              (*vocabulary)->nodes().size(), (CpuMicroseconds() - start) * 1e-3);
  for (const NamedSpec& named : TypicalSpecs()) Measure(named, *vocabulary);
  for (const NamedSpec& named : HardSpecs()) Measure(named, *vocabulary);
  return 0;
}

#include "engine/text/structured/schemas/schema_keys.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "engine/text/structured/automata/pattern.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {
namespace {

// Largest number of patterns for the names of one object's properties.
constexpr size_t kMaxPatterns = 16;

}  // namespace

std::u32string CodePoints(const std::string& text) {
  std::u32string out;
  for (size_t pos = 0; pos < text.size();) out.push_back(NextCodePoint(text, &pos));
  return out;
}

Result<LabeledDfa> KeysByPatterns(const ByteDfa& any_string, const ByteDfa* names,
                                  const std::set<std::string>& patterns, const ByteSet& spellable,
                                  CompileBudget* budget) {
  if (patterns.size() > kMaxPatterns) {
    return absl::InvalidArgumentError("patternProperties: too many patterns apply to one object");
  }
  std::vector<ByteDfa> parts;
  for (const std::string& pattern : patterns) {
    MOESERVE_ASSIGN_OR_RETURN(const ByteDfa content, PatternDfa(pattern, MatchMode::kSearch,
                                                                Encoding::kJsonString, budget));
    MOESERVE_ASSIGN_OR_RETURN(parts.emplace_back(), Quoted(content, budget));
    MOESERVE_RETURN_IF_ERROR(parts.back().Finish(ByteSet().set(), budget));
  }
  MOESERVE_ASSIGN_OR_RETURN(LabeledDfa out,
                            Labeled(names != nullptr ? *names : any_string, parts, budget));
  MOESERVE_RETURN_IF_ERROR(out.dfa.Finish(spellable, budget));
  return out;
}

Result<std::optional<std::set<std::string>>> FewKeys(const ByteDfa& dfa, size_t most,
                                                     CompileBudget* budget) {
  std::set<std::string> out;
  // A text is longer than the automaton has states only if the automaton has a loop.
  struct Visit {
    int32_t state;
    int next = 0;  // the next byte to be tried
  };
  std::vector<Visit> visits = {{ByteDfa::kStart}};
  std::string text;
  // A key has at most twice as many spellings as characters, each of at most 12 bytes.
  const size_t most_bytes = 64 * most + 4096;
  size_t bytes = 0;
  while (!visits.empty()) {
    Visit& visit = visits.back();
    if (visit.next == 0 && dfa.accepting[visit.state] && !text.empty()) {
      // Undecodable texts do not occur: the automaton accepts JSON strings.
      const nlohmann::json key = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
      if (key.is_string()) out.insert(key.get<std::string>());
      if (out.size() > most) return std::optional<std::set<std::string>>();
    }
    int32_t to = kDead;
    while (visit.next < 256 && to == kDead)
      to = dfa.Next(visit.state, static_cast<uint8_t>(visit.next++));
    if (to == kDead) {
      visits.pop_back();
      if (!text.empty()) text.pop_back();
      continue;
    }
    text += static_cast<char>(visit.next - 1);
    if (static_cast<int64_t>(visits.size()) > dfa.num_states() || ++bytes > most_bytes) {
      return std::optional<std::set<std::string>>();
    }
    MOESERVE_RETURN_IF_ERROR(budget->Tick());
    visits.push_back({to});
  }
  return std::optional<std::set<std::string>>(std::move(out));
}

}  // namespace moeserve::structured

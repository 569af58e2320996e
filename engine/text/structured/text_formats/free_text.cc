#include "engine/text/structured/text_formats/free_text.h"

#include <algorithm>
#include <utility>

#include "engine/text/structured/automata/pattern.h"

namespace moeserve::structured {

Result<FreeText> FreeText::Build(std::vector<std::string> triggers, CompileBudget* budget) {
  FreeText out(budget);
  out.triggers_ = std::move(triggers);
  MOESERVE_ASSIGN_OR_RETURN(
      out.any_text_, PatternDfa("[\\s\\S]*", MatchMode::kWholeText, Encoding::kUtf8, budget));

  ByteDfa& dfa = out.prefixes_;
  std::array<int, 256> classes{};  // 0: a byte that is in no trigger
  dfa.num_classes = 1;
  for (const std::string& trigger : out.triggers_) {
    for (const char c : trigger) {
      int& byte_class = classes[static_cast<uint8_t>(c)];
      if (byte_class == 0) byte_class = dfa.num_classes++;
    }
  }
  // All 256 bytes may be in triggers, and then class 0 has no byte; it takes the last number.
  const int most = std::min(dfa.num_classes, 256);
  for (int b = 0; b < 256; ++b) dfa.class_of[b] = static_cast<uint8_t>(classes[b] % most);
  dfa.num_classes = most;

  dfa.AddState(false, true);
  out.ends_with_.emplace_back();
  for (size_t i = 0; i < out.triggers_.size(); ++i) {
    int32_t state = ByteDfa::kStart;
    for (const char c : out.triggers_[i]) {
      const int byte_class = dfa.class_of[static_cast<uint8_t>(c)];
      int32_t next = dfa.next[static_cast<size_t>(state) * dfa.num_classes + byte_class];
      if (next == kDead) {
        MOESERVE_RETURN_IF_ERROR(budget->AddStates(1, dfa.num_classes));
        next = dfa.AddState(false, true);
        dfa.SetNext(state, byte_class, next);
        out.ends_with_.emplace_back();
      }
      state = next;
    }
    out.ends_with_[state].push_back(static_cast<int>(i));
  }
  // Completes the transitions in order of the prefixes' lengths. `shorter` is the longest proper
  // suffix of a prefix that is a prefix, too.
  std::vector<int32_t> shorter(dfa.num_states(), ByteDfa::kStart);
  std::vector<int32_t> queue = {ByteDfa::kStart};
  for (size_t i = 0; i < queue.size(); ++i) {
    const int32_t state = queue[i];
    MOESERVE_RETURN_IF_ERROR(budget->Tick(dfa.num_classes));
    for (int c = 0; c < dfa.num_classes; ++c) {
      int32_t& next = dfa.next[static_cast<size_t>(state) * dfa.num_classes + c];
      const int32_t otherwise =
          state == ByteDfa::kStart
              ? ByteDfa::kStart
              : dfa.next[static_cast<size_t>(shorter[state]) * dfa.num_classes + c];
      if (next == kDead) {
        next = otherwise;
        continue;
      }
      shorter[next] = otherwise;
      const std::vector<int>& more = out.ends_with_[otherwise];
      out.ends_with_[next].insert(out.ends_with_[next].end(), more.begin(), more.end());
      queue.push_back(next);
    }
  }
  return out;
}

Result<ByteDfa> FreeText::Accepting(int trigger) const {
  ByteDfa dfa = prefixes_;
  MOESERVE_RETURN_IF_ERROR(budget_->AddStates(dfa.num_states(), dfa.num_classes));
  for (int32_t s = 0; s < dfa.num_states(); ++s) {
    const std::vector<int>& ends = ends_with_[s];
    dfa.accepting[s] = trigger == kNone
                           ? ends.empty()
                           : std::find(ends.begin(), ends.end(), trigger) != ends.end();
    if (ends.empty()) continue;
    for (int c = 0; c < dfa.num_classes; ++c) dfa.SetNext(s, c, kDead);
  }
  if (trigger == kNone) {
    for (int32_t& next : dfa.next) {
      if (next != kDead && !ends_with_[next].empty()) next = kDead;
    }
  }
  return Intersection(any_text_, dfa, budget_);
}

Trigger FollowTrigger(const std::string& text, const ByteDfa& dfa) {
  Trigger out;
  out.text = text;
  const int32_t length = static_cast<int32_t>(text.size());
  out.border.assign(text.size() + 1, 0);
  // Returns the length of the longest prefix of `text` with which a text ends that ended with
  // `matched` of its bytes, then `byte`.
  const auto follow = [&](int32_t matched, uint8_t byte) {
    if (matched == length) matched = out.border[matched];
    while (matched > 0 && static_cast<uint8_t>(text[matched]) != byte) {
      matched = out.border[matched];
    }
    return matched + (static_cast<uint8_t>(text[matched]) == byte ? 1 : 0);
  };
  for (int32_t n = 2; n <= length; ++n) {
    out.border[n] = follow(out.border[n - 1], static_cast<uint8_t>(text[n - 1]));
  }
  std::array<int, 256> byte_of{};
  for (int b = 0; b < 256; ++b) byte_of[dfa.class_of[b]] = b;
  out.matched.assign(dfa.num_states(), kDead);
  out.matched[ByteDfa::kStart] = 0;
  std::vector<int32_t> queue = {ByteDfa::kStart};
  for (size_t i = 0; i < queue.size(); ++i) {
    for (int c = 0; c < dfa.num_classes; ++c) {
      const int32_t next = dfa.next[static_cast<size_t>(queue[i]) * dfa.num_classes + c];
      if (next == kDead || out.matched[next] != kDead) continue;
      out.matched[next] = follow(out.matched[queue[i]], static_cast<uint8_t>(byte_of[c]));
      queue.push_back(next);
    }
  }
  return out;
}

}  // namespace moeserve::structured

#include "server/tools/answer_splitter.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error_text.h"
#include "server/tools/call_elements.h"
#include "server/tools/channel_splitter.h"
#include "server/tools/split_text.h"

namespace moeserve::server {
namespace {

constexpr std::string_view kSpace = " \t\r\n";

// Splits answers of models that mark reasoning and calls with tags.
class TagSplitter final : public AnswerSplitter {
 public:
  TagSplitter(const SplitRules& rules, std::function<std::string(int)> call_id)
      : rules_(rules),
        call_id_(std::move(call_id)),
        call_begin_(Concat(rules.syntax->opening, rules.syntax->before_name)),
        // The elements of a call include its end.
        after_arguments_(rules.syntax->before_key.empty() ? rules.syntax->after_arguments : ""),
        next_call_(Concat(after_arguments_, rules.syntax->separator, rules.syntax->before_name)),
        last_call_(Concat(after_arguments_, rules.syntax->closing)) {
    if (rules.begins_in_reasoning) {
      EnterReasoning();
    } else if (!rules.reasons) {
      state_ = State::kContent;
    }
  }

  AssistantDelta Push(std::string_view text) override {
    held_ += text;
    return Run(false);
  }

  AssistantDelta Finish() override {
    AssistantDelta out = Run(true);
    // White space at the end of an answer is content if the answer ends in content without calls.
    if (calls_ == 0 && state_ != State::kReasoning) out.content += std::exchange(space_, {});
    return out;
  }

  int calls() const override { return calls_; }

 private:
  enum class State { kStart, kReasoning, kContent, kName, kArguments, kAfterCall };

  AssistantDelta Run(bool last) {
    AssistantDelta out;
    while (Step(last, out)) {
    }
    return out;
  }

  // Processes a part of held_. Returns false if it needs more text.
  bool Step(bool last, AssistantDelta& out) {
    switch (state_) {
      case State::kStart:
        return Start(last);
      case State::kReasoning:
        return Reasoning(last, out);
      case State::kContent:
        return Content(last, out);
      case State::kName:
        return Name(last, out);
      case State::kArguments:
        return Arguments(out);
      case State::kAfterCall:
        return AfterCall(last);
    }
    return false;
  }

  void EnterReasoning() {
    state_ = State::kReasoning;
    strip_ = true;
  }

  // The answer reasons if its first text is the tag.
  bool Start(bool last) {
    const size_t begin = std::min(held_.find_first_not_of(kSpace), held_.size());
    const std::string_view rest = std::string_view(held_).substr(begin);
    if (!last && rest.size() < kThinkTags.begin.size() && kThinkTags.begin.starts_with(rest)) {
      return false;
    }
    if (rest.starts_with(kThinkTags.begin)) {
      held_.erase(0, begin + kThinkTags.begin.size());
      EnterReasoning();
    } else {
      state_ = State::kContent;
    }
    return true;
  }

  bool Reasoning(bool last, AssistantDelta& out) {
    const size_t end = held_.find(kThinkTags.end);
    const bool ends = end != std::string::npos;
    size_t known = end;
    if (!ends) known = last ? held_.size() : held_.size() - HeldBack(held_, kThinkTags.end);
    // White space around the reasoning is not part of it.
    Emit(std::string_view(held_).substr(0, known), out.reasoning);
    held_.erase(0, known);
    if (!ends) return false;
    held_.erase(0, kThinkTags.end.size());
    space_.clear();
    state_ = State::kContent;
    strip_ = true;
    return true;
  }

  bool Content(bool last, AssistantDelta& out) {
    if (!rules_.has_tools) {
      Emit(held_, out.content);
      held_.clear();
      return false;
    }
    size_t begin = held_.find(call_begin_);
    Named named = Named::kNo;
    while (begin != std::string::npos && (named = NamesTool(begin, last)) == Named::kNo) {
      begin = held_.find(call_begin_, begin + 1);
    }
    const bool calls = begin != std::string::npos && named == Named::kYes;
    size_t known = begin;
    if (begin == std::string::npos) {
      known = last ? held_.size() : held_.size() - HeldBack(held_, call_begin_);
    }
    Emit(std::string_view(held_).substr(0, known), out.content);
    held_.erase(0, known);
    if (!calls) return false;
    held_.erase(0, call_begin_.size());
    space_.clear();
    state_ = State::kName;
    return true;
  }

  enum class Named { kNo, kYes, kUnknown };

  // Returns whether the text from `begin` on, which begins like a call, is one. `last`: no text
  // follows.
  Named NamesTool(size_t begin, bool last) const {
    if (rules_.tools == nullptr) return Named::kYes;
    const CallSyntax& syntax = *rules_.syntax;
    const std::string_view rest = std::string_view(held_).substr(begin + call_begin_.size());
    const std::string_view end = syntax.has_index ? ":" : syntax.before_arguments;
    bool unknown = false;
    for (const OfferedTool& tool : *rules_.tools) {
      const std::string start = Concat(tool.name, end);
      if (rest.starts_with(start)) return Named::kYes;
      unknown |= start.starts_with(rest);
    }
    if (!unknown) return Named::kNo;
    if (!last) return Named::kUnknown;
    // An answer that is cut off in a name: only what can be nothing else belongs to a call.
    return syntax.plain_json ? Named::kNo : Named::kYes;
  }

  const OfferedTool* FindTool(std::string_view name) const {
    if (rules_.tools == nullptr) return nullptr;
    for (const OfferedTool& tool : *rules_.tools) {
      if (tool.name == name) return &tool;
    }
    return nullptr;
  }

  // Appends `text` to `to`, with white space held back until other text follows.
  void Emit(std::string_view text, std::string& to) {
    if (strip_) {
      text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
      if (text.empty()) return;
      strip_ = false;
    }
    const size_t end = text.find_last_not_of(kSpace);
    if (end == std::string_view::npos) {
      space_ += text;
      return;
    }
    to += std::exchange(space_, {});
    to += text.substr(0, end + 1);
    space_ = text.substr(end + 1);
  }

  bool Name(bool last, AssistantDelta& out) {
    const std::string_view end = rules_.syntax->before_arguments;
    const size_t at = held_.find(end);
    if (at == std::string::npos) {
      // The answer was cut off within the name.
      if (last) held_.clear();
      return false;
    }
    std::string name = held_.substr(0, at);
    std::string id = rules_.syntax->has_index ? IndexedId(name) : call_id_(calls_);
    if (!rules_.syntax->before_key.empty()) elements_.emplace(*rules_.syntax, FindTool(name));
    out.calls.push_back({calls_, std::move(id), std::move(name), {}});
    ++calls_;
    held_.erase(0, at + end.size());
    json_ = JsonScanner();
    state_ = State::kArguments;
    return true;
  }

  // Removes the number from `name` and returns the id that consists of both, under which the chat
  // template finds the call. Numbers rise within an answer, so that ids differ.
  std::string IndexedId(std::string& name) {
    int index = 0;
    if (const size_t colon = name.rfind(':'); colon != std::string::npos) {
      for (const char c : name.substr(colon + 1, 3)) {
        if (c >= '0' && c <= '9') index = 10 * index + (c - '0');
      }
      name.erase(colon);
    }
    next_index_ = std::max(next_index_, index) + 1;
    return Concat("functions.", name, ":", next_index_ - 1);
  }

  bool Arguments(AssistantDelta& out) {
    if (elements_) {
      AssistantDelta part;
      part.calls.push_back({calls_ - 1, {}, {}, elements_->Read(held_)});
      const bool complete = elements_->complete();
      if (!part.calls[0].arguments.empty()) out.Append(std::move(part));
      if (complete) state_ = State::kAfterCall;
      if (complete) elements_.reset();
      return complete;
    }
    const size_t size = json_.Scan(held_);
    if (size > 0) {
      AssistantDelta part;
      part.calls.push_back({calls_ - 1, {}, {}, held_.substr(0, size)});
      out.Append(std::move(part));
      held_.erase(0, size);
    }
    if (!json_.complete()) return false;
    state_ = State::kAfterCall;
    return true;
  }

  bool AfterCall(bool last) {
    if (held_.starts_with(next_call_)) {
      held_.erase(0, next_call_.size());
      state_ = State::kName;
      return true;
    }
    if (next_call_.starts_with(held_) || last_call_.starts_with(held_)) {
      if (!last) return false;
      held_.clear();  // the answer was cut off after a call
    }
    if (held_.starts_with(last_call_)) held_.erase(0, last_call_.size());
    state_ = State::kContent;
    strip_ = true;
    return true;
  }

  const SplitRules rules_;
  const std::function<std::string(int)> call_id_;
  const std::string call_begin_;
  const std::string_view after_arguments_;
  // What follows the arguments of a call if another call follows, and if none does.
  const std::string next_call_;
  const std::string last_call_;
  State state_ = State::kStart;
  std::string held_;    // text that is not processed
  std::string space_;   // white space that belongs to what comes next, or to nothing
  bool strip_ = false;  // whether white space is dropped until other text comes
  JsonScanner json_;    // in the arguments of the current call
  std::optional<CallElements> elements_;  // those of the current call, if it has any
  int next_index_ = 0;                    // smallest number of the next call (IndexedId())
  int calls_ = 0;
};

}  // namespace

void AssistantDelta::Append(AssistantDelta delta) {
  reasoning += delta.reasoning;
  content += delta.content;
  for (ToolCallDelta& call : delta.calls) {
    if (!calls.empty() && calls.back().index == call.index) {
      calls.back().arguments += call.arguments;
    } else {
      calls.push_back(std::move(call));
    }
  }
}

std::unique_ptr<AnswerSplitter> AnswerSplitter::Make(const SplitRules& rules,
                                                     std::function<std::string(int)> call_id) {
  if (rules.syntax->has_channels) {
    return std::make_unique<ChannelSplitter>(rules.has_tools, std::move(call_id));
  }
  return std::make_unique<TagSplitter>(rules, std::move(call_id));
}

}  // namespace moeserve::server

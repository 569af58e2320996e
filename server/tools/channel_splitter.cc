#include "server/tools/channel_splitter.h"

#include <algorithm>
#include <utility>

#include "server/tools/split_text.h"

namespace moeserve::server {
namespace {

constexpr std::string_view kMessageMark = "<|message|>";
constexpr std::string_view kChannel = "<|channel|>";
constexpr std::string_view kRecipient = " to=";
constexpr std::string_view kFunctions = "functions.";
// Any of these ends the text of a message.
constexpr std::string_view kEnds[] = {"<|end|>", "<|call|>", "<|return|>", "<|start|>"};

// Returns the word of `head` that follows `label`; empty if the label is missing.
std::string_view WordAfter(std::string_view head, std::string_view label) {
  const size_t at = head.find(label);
  if (at == std::string_view::npos) return {};
  const std::string_view rest = head.substr(at + label.size());
  return rest.substr(0, std::min(rest.find_first_of(" <\n"), rest.size()));
}

}  // namespace

ChannelSplitter::ChannelSplitter(bool has_tools, std::function<std::string(int)> call_id)
    : has_tools_(has_tools), call_id_(std::move(call_id)) {}

AssistantDelta ChannelSplitter::Push(std::string_view text) {
  held_ += text;
  return Run(false);
}

AssistantDelta ChannelSplitter::Finish() {
  AssistantDelta out = Run(true);
  // Text without any message was not written in this format.
  if (!any_) out.content += std::exchange(held_, {});
  held_.clear();
  return out;
}

AssistantDelta ChannelSplitter::Run(bool last) {
  AssistantDelta out;
  while (part_ == Part::kHead ? ReadHead(out) : ReadText(last, out)) {
  }
  return out;
}

bool ChannelSplitter::ReadHead(AssistantDelta& out) {
  const size_t end = held_.find(kMessageMark);
  if (end == std::string::npos) return false;
  any_ = true;
  const std::string_view head = std::string_view(held_).substr(0, end);
  const std::string_view recipient = WordAfter(head, kRecipient);
  if (has_tools_ && recipient.starts_with(kFunctions)) {
    out.calls.push_back(
        {calls_, call_id_(calls_), std::string(recipient.substr(kFunctions.size())), {}});
    ++calls_;
    part_ = Part::kCall;
  } else if (!recipient.empty() || WordAfter(head, kChannel) == "analysis") {
    part_ = Part::kReasoning;
  } else {
    part_ = Part::kContent;
  }
  held_.erase(0, end + kMessageMark.size());
  return true;
}

bool ChannelSplitter::ReadText(bool last, AssistantDelta& out) {
  size_t end = std::string::npos;
  size_t tag = 0;
  size_t held_back = 0;
  for (const std::string_view mark : kEnds) {
    if (const size_t at = held_.find(mark); at < end) {
      end = at;
      tag = mark.size();
    }
    held_back = std::max(held_back, HeldBack(held_, mark));
  }
  const bool ends = end != std::string::npos;
  const size_t known = ends ? end : last ? held_.size() : held_.size() - held_back;
  std::string text = held_.substr(0, known);
  held_.erase(0, known);
  if (!text.empty()) {
    AssistantDelta part;
    if (part_ == Part::kCall) {
      part.calls.push_back({calls_ - 1, {}, {}, std::move(text)});
    } else {
      (part_ == Part::kReasoning ? part.reasoning : part.content) = std::move(text);
    }
    out.Append(std::move(part));
  }
  if (!ends) return false;
  held_.erase(0, tag);
  part_ = Part::kHead;
  return true;
}

}  // namespace moeserve::server

// Answers of models that are split into reasoning, content and calls.

#include <string>

#include "base/error_text.h"
#include "server/tools/answer_splitter.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve::server {
namespace {

std::string CallId(int call) { return Concat("id", call); }

// Splits `text` in pieces whose sizes the bytes of `sizes` give; the last piece is the rest.
AssistantDelta Split(const SplitRules& rules, std::string_view text, std::string_view sizes) {
  const auto splitter = AnswerSplitter::Make(rules, CallId);
  AssistantDelta out;
  for (const char size : sizes) {
    const std::string_view piece = text.substr(0, static_cast<uint8_t>(size) % 16);
    out.Append(splitter->Push(piece));
    text.remove_prefix(piece.size());
  }
  out.Append(splitter->Push(text));
  out.Append(splitter->Finish());
  MOESERVE_CHECK(static_cast<size_t>(splitter->calls()) == out.calls.size(), "calls are counted");
  return out;
}

std::string Show(const AssistantDelta& delta) {
  std::string text = Concat(delta.reasoning, "|", delta.content);
  for (const ToolCallDelta& call : delta.calls) {
    text += Concat("|", call.index, call.id, call.name, call.arguments);
  }
  return text;
}

}  // namespace
}  // namespace moeserve::server

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;          // NOLINT(google-build-using-namespace)
  using namespace moeserve::server;  // NOLINT(google-build-using-namespace)
  testing::Input input(data, size);
  const auto syntaxes = CallSyntaxes();
  SplitRules rules;
  rules.syntax = &syntaxes[input.Byte() % syntaxes.size()];
  const uint8_t options = input.Byte();
  rules.has_tools = (options & 1) == 0;
  rules.reasons = (options & 2) != 0;
  rules.begins_in_reasoning = rules.reasons && (options & 4) != 0;
  const std::string_view sizes = input.Take(input.Byte() % 32);
  const AssistantDelta whole = Split(rules, input.rest(), {});
  MOESERVE_CHECK(Show(Split(rules, input.rest(), sizes)) == Show(whole),
                 "how the text arrives changes nothing");
  size_t bytes = whole.reasoning.size() + whole.content.size();
  for (const ToolCallDelta& call : whole.calls) bytes += call.name.size() + call.arguments.size();
  // Arguments that are written as elements get the escapes of JSON.
  const size_t growth = rules.syntax->before_key.empty() ? 1 : 6;
  MOESERVE_CHECK(bytes <= growth * input.rest().size(), "no text is invented");
  if (!whole.calls.empty() || !whole.reasoning.empty()) testing::CountAccepted();
  return 0;
}

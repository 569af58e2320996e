#include "server/tools/tool_constraint.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/message.h"

namespace moeserve::server {
namespace {

using Kind = TextFormat::Kind;

TextFormat OfKind(Kind kind, std::string text = {}) {
  TextFormat format;
  format.kind = kind;
  format.text = std::move(text);
  return format;
}

TextFormat OfParts(Kind kind, std::vector<TextFormat> parts) {
  TextFormat format;
  format.kind = kind;
  format.parts = std::move(parts);
  return format;
}

TextFormat OfTags(StructuralTags tags) {
  TextFormat format;
  format.kind = Kind::kTags;
  format.tags = std::make_shared<const StructuralTags>(std::move(tags));
  return format;
}

// Returns the format of at most `max_tags` regions with any text (0: any number).
TextFormat Regions(std::vector<StructuralTag> regions, int max_tags) {
  StructuralTags tags;
  tags.tags = std::move(regions);
  tags.free_text = false;
  tags.max_tags = max_tags;
  return OfTags(std::move(tags));
}

StructuralTag Region(std::string_view begin, std::string_view end) {
  return {std::string(begin), OfKind(Kind::kAnyText), std::string(end)};
}

TextFormat Arguments(const Tool& tool) {
  if (tool.parameters.empty()) return OfKind(Kind::kJsonObject);
  TextFormat format = OfKind(Kind::kJsonSchema, tool.parameters);
  format.strict = tool.strict;
  return format;
}

// Returns the format of the texts that `spec` describes. Beside tools a schema is strict, so that
// it is never replaced by a weaker one.
TextFormat FormatOf(const ConstraintSpec& spec, bool has_tools) {
  TextFormat format = OfKind(Kind::kJsonObject, spec.text);
  format.choices = spec.choices;
  format.strict = spec.strict || has_tools;
  switch (spec.kind) {
    case ConstraintSpec::Kind::kJsonObject:
      break;
    case ConstraintSpec::Kind::kJsonSchema:
      format.kind = Kind::kJsonSchema;
      break;
    case ConstraintSpec::Kind::kRegex:
      format.kind = Kind::kRegex;
      break;
    case ConstraintSpec::Kind::kChoice:
      format.kind = Kind::kChoice;
      break;
    case ConstraintSpec::Kind::kGrammar:
      format.kind = Kind::kGrammar;
      break;
    case ConstraintSpec::Kind::kFormat:
      return *spec.format;
  }
  return format;
}

StructuralTags Calls(const ToolSettings& settings, const CallSyntax& syntax, bool only_calls) {
  StructuralTags calls;
  for (const Tool& tool : settings.callable) {
    calls.tags.push_back({Concat(syntax.before_name, tool.name, syntax.before_arguments),
                          Arguments(tool), std::string(syntax.after_arguments)});
  }
  calls.prefix = syntax.opening;
  calls.separator = syntax.separator;
  calls.suffix = syntax.closing;
  if (!settings.parallel || syntax.single_call) calls.max_tags = 1;
  calls.free_text = !only_calls;
  calls.at_least_one = !calls.free_text;
  if (calls.free_text) calls.triggers.emplace_back(syntax.trigger);
  return calls;
}

// Messages of the channels for reasoning and for text, in any number, then the final message or a
// call, which ends the answer.
TextFormat ChannelFormat(const ToolSettings& settings, const SplitRules& rules,
                         const std::optional<ConstraintSpec>& text) {
  constexpr std::string_view kNext = "<|end|><|start|>assistant";
  std::vector<StructuralTag> first = {Region("<|channel|>analysis<|message|>", kNext)};
  std::vector<TextFormat> last;
  if (!rules.has_tools || settings.choice == ToolChoice::kAuto) {
    // Text of this channel is content, too.
    if (!text) first.push_back(Region("<|channel|>commentary<|message|>", kNext));
    StructuralTags final_message;
    final_message.tags.push_back(Region("<|channel|>final<|message|>", ""));
    if (text) {
      // Models may name the format of the message in its head.
      final_message.tags.push_back(Region("<|channel|>final <|constrain|>json<|message|>", ""));
      for (StructuralTag& tag : final_message.tags) tag.content = FormatOf(*text, rules.has_tools);
    }
    final_message.free_text = false;
    final_message.at_least_one = true;
    final_message.max_tags = 1;
    last.push_back(OfTags(std::move(final_message)));
  }
  if (rules.has_tools) last.push_back(OfTags(Calls(settings, *rules.syntax, true)));
  return OfParts(Kind::kSequence,
                 {Regions(std::move(first), 0), OfParts(Kind::kAnyOf, std::move(last))});
}

// Returns the format of what follows the reasoning.
TextFormat ContentFormat(const ToolSettings& settings, const SplitRules& rules,
                         const std::optional<ConstraintSpec>& text) {
  if (!rules.has_tools) return FormatOf(*text, false);
  const bool may_choose = settings.choice == ToolChoice::kAuto;
  TextFormat calls = OfTags(Calls(settings, *rules.syntax, !may_choose || text));
  if (!may_choose || !text) return calls;
  return OfParts(Kind::kAnyOf, {FormatOf(*text, true), std::move(calls)});
}

TextFormat TagFormat(const ToolSettings& settings, const SplitRules& rules,
                     const std::optional<ConstraintSpec>& text) {
  TextFormat content = ContentFormat(settings, rules, text);
  if (!rules.reasons) return content;
  // The model separates its reasoning from what follows by a few line ends.
  std::vector<TextFormat> reasoning = {OfKind(Kind::kAnyText),
                                       OfKind(Kind::kText, std::string(kThinkTags.end)),
                                       OfKind(Kind::kRegex, "[ \\n]{0,4}")};
  if (!rules.begins_in_reasoning) {
    reasoning.insert(reasoning.begin(), OfKind(Kind::kText, std::string(kThinkTags.begin)));
  }
  TextFormat first = OfParts(Kind::kSequence, std::move(reasoning));
  if (!rules.begins_in_reasoning) {
    first = OfParts(Kind::kAnyOf, {std::move(first), OfKind(Kind::kText)});
  }
  return OfParts(Kind::kSequence, {std::move(first), std::move(content)});
}

}  // namespace

ConstraintSpec AnswerConstraint(const ToolSettings& settings, const SplitRules& rules,
                                const std::optional<ConstraintSpec>& text) {
  ConstraintSpec spec;
  spec.kind = ConstraintSpec::Kind::kFormat;
  spec.format = std::make_shared<const TextFormat>(rules.syntax->has_channels
                                                       ? ChannelFormat(settings, rules, text)
                                                       : TagFormat(settings, rules, text));
  return spec;
}

}  // namespace moeserve::server

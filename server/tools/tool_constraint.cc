#include "server/tools/tool_constraint.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "server/base/json_fields.h"
#include "server/tools/tool_parameters.h"

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
  format.closed_objects = true;
  return format;
}

// Returns the format of the texts that `spec` describes. Beside tools a schema is strict, so that
// it is never replaced by a weaker one.
TextFormat FormatOf(const ConstraintSpec& spec, bool has_tools) {
  TextFormat format = OfKind(Kind::kJsonObject, spec.text);
  format.choices = spec.choices;
  format.strict = spec.strict || has_tools;
  format.closed_objects = spec.closed_objects;
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

// Returns the format of any string that is written as it is. A call is complete within the limit on
// tokens if possible, and so are the strings in it.
TextFormat AnyString() {
  TextFormat format = OfKind(Kind::kAnyText);
  format.must_end = true;
  return format;
}

// Returns the format of a string, or of a listed value, that is written as it is.
TextFormat RawText(const OrderedJson& schema) {
  OrderedJson values = OrderedJson::array();
  if (const auto value = schema.find("const"); value != schema.end()) {
    values.push_back(*value);
  } else if (const auto list = schema.find("enum"); list != schema.end() && list->is_array()) {
    values = *list;
  }
  TextFormat format = AnyString();
  for (const OrderedJson& value : values) {
    format.choices.push_back(value.is_string() ? value.get<std::string>() : DumpOrdered(value));
  }
  if (!format.choices.empty()) {
    format.kind = Kind::kChoice;
  } else {
    // The end of the element must not be a part of a text whose characters are counted.
    constexpr uint64_t kMostCounted = 256;
    const auto count = [&](const char* name, uint64_t missing) {
      const auto it = schema.find(name);
      const bool given = it != schema.end() && it->is_number_unsigned();
      return given ? it->get<uint64_t>() : missing;
    };
    const uint64_t most = count("maxLength", kMostCounted + 1);
    const uint64_t least = count("minLength", 0);
    if (most <= kMostCounted && least <= most) {
      format = OfKind(Kind::kRegex, Concat("[^<]{", least, ",", most, "}"));
    } else if (least > 0 && least <= kMostCounted) {
      format = OfKind(Kind::kRegex, Concat("[^<]{", least, ",}"));
    }
  }
  return format;
}

// `depth`: how deep alternatives may be nested.
TextFormat ElementValue(const OrderedJson& schema, const OrderedJson& root, bool strict,
                        int depth = 4) {
  const ParameterKind kind = KindOf(schema, root);
  for (const char* key : {"anyOf", "oneOf"}) {
    const bool mixed = kind.may_be_string() && !kind.only_string();
    const bool listed = mixed && schema.is_object() && schema.contains(key);
    if (!listed || !schema[key].is_array() || schema[key].empty() || depth == 0) continue;
    std::vector<TextFormat> parts;
    for (const OrderedJson& one : schema[key]) {
      parts.push_back(ElementValue(one, root, strict, depth - 1));
    }
    return OfParts(Kind::kAnyOf, std::move(parts));
  }
  if (kind.may_be_string()) {
    return schema.is_object() ? RawText(schema) : AnyString();
  }
  OrderedJson whole = schema;
  for (const char* name : {"$defs", "definitions"}) {
    if (root.contains(name) && !whole.contains(name)) whole[name] = root[name];
  }
  TextFormat format = OfKind(Kind::kJsonSchema, DumpOrdered(whole));
  format.strict = strict;
  format.closed_objects = true;
  return format;
}

// Returns the format of arguments of which each is an element, in the order of the schema.
TextFormat Elements(const Tool& tool, const CallSyntax& syntax) {
  const auto element = [&](TextFormat key, TextFormat value) {
    return OfParts(Kind::kSequence,
                   {OfKind(Kind::kText, std::string(syntax.before_key)), std::move(key),
                    OfKind(Kind::kText, std::string(syntax.before_value)), std::move(value),
                    OfKind(Kind::kText, std::string(syntax.after_value))});
  };
  const OrderedJson root = tool.parameters.empty() ? OrderedJson() : ParseOrdered(tool.parameters);
  const auto properties = root.is_object() ? root.find("properties") : root.end();
  if (properties == root.end() || !properties->is_object()) {
    // Elements of any name.
    StructuralTags any;
    any.tags.push_back({std::string(syntax.before_key),
                        OfParts(Kind::kSequence,
                                {OfKind(Kind::kRegex, "[A-Za-z0-9_.-]{1,64}"),
                                 OfKind(Kind::kText, std::string(syntax.before_value)), AnyString(),
                                 OfKind(Kind::kText, std::string(syntax.after_value))}),
                        ""});
    any.free_text = false;
    return OfTags(std::move(any));
  }
  const auto required = root.find("required");
  const auto is_required = [&](const std::string& name) {
    return required != root.end() && required->is_array() &&
           std::find(required->begin(), required->end(), OrderedJson(name)) != required->end();
  };
  TextFormat out = OfParts(Kind::kSequence, {OfKind(Kind::kText)});
  for (const auto& [name, schema] : properties->items()) {
    if (schema == false) continue;
    TextFormat one = element(OfKind(Kind::kText, name), ElementValue(schema, root, tool.strict));
    if (!is_required(name)) {
      one = OfParts(Kind::kAnyOf, {OfKind(Kind::kText), std::move(one)});
    }
    out.parts.push_back(std::move(one));
  }
  return out;
}

// Returns the region of a call of `tool`.
StructuralTag Call(const Tool& tool, const CallSyntax& syntax) {
  StructuralTag call{Concat(syntax.before_name, tool.name),
                     syntax.before_key.empty() ? Arguments(tool) : Elements(tool, syntax),
                     std::string(syntax.after_arguments)};
  if (syntax.has_index) {
    call.content =
        OfParts(Kind::kSequence, {OfKind(Kind::kRegex, ":[0-9]{1,3}"),
                                  OfKind(Kind::kText, std::string(syntax.before_arguments)),
                                  std::move(call.content)});
  } else {
    call.begin += syntax.before_arguments;
  }
  return call;
}

StructuralTags Calls(const ToolSettings& settings, const CallSyntax& syntax, bool only_calls) {
  StructuralTags calls;
  for (const Tool& tool : settings.callable) {
    calls.tags.push_back(Call(tool, syntax));
  }
  calls.prefix = syntax.opening;
  calls.separator = syntax.separator;
  calls.suffix = syntax.closing;
  if (!settings.parallel || syntax.single_call) calls.max_tags = 1;
  calls.free_text = !only_calls;
  calls.at_least_one = !calls.free_text;
  if (calls.free_text && syntax.plain_json) {
    for (const StructuralTag& tag : calls.tags) {
      calls.triggers.push_back(Concat(syntax.opening, tag.begin));
    }
  } else if (calls.free_text) {
    calls.triggers.emplace_back(syntax.trigger);
  }
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

// Texts that consist of parts: fixed texts, free text, values and tagged regions. Tool calls of
// models are such texts: free text, in which "<tool_call>" begins a JSON object that the text
// "</tool_call>" ends.
//
// **Special tokens.** Fixed texts (kText), the texts of tags (StructuralTag::begin and end,
// StructuralTags::prefix, separator and suffix) and the triggers may contain the spelling of
// special tokens of the tokenizer, such as "[TOOL_CALLS]". At such a place the special token is
// allowed, besides the ordinary tokens that spell the same bytes: a model that was trained to emit
// the token emits it, and a caller that reads the text sees the same text in both cases. Nowhere
// else is a special token allowed: neither in free text (except as the part of a trigger that it
// spells, after which the trigger must be completed) nor in the contents of tags.
// CompiledConstraint::text_tokens() lists these special tokens; their text is part of the response
// even if the request omits special tokens. End-of-sequence tokens only ever end the text. Added
// tokens that are not special (Qwen's "<tool_call>") are ordinary tokens, everywhere.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace moeserve {

struct StructuralTags;

// A description of texts. Plain data. All texts are UTF-8.
struct TextFormat {
  enum class Kind {
    kText,     // exactly `text`; may be empty
    kAnyText,  // any text that contains none of `excluded`; as the content of a tag or before kText
               // in a sequence, any text that does not contain what follows, up to what follows
    kJsonObject,  // any JSON object
    kJsonSchema,  // an instance of the JSON schema `text`
    kRegex,       // a text that the pattern `text` matches completely
    kGrammar,     // a text of the context-free grammar `text`
    kChoice,      // one of the texts `choices`
    kSequence,    // all of `parts`, in order
    kAnyOf,       // one of `parts`
    kTags,        // what `tags` describes
  };
  Kind kind = Kind::kAnyText;
  std::string text;
  std::vector<std::string> choices;
  std::vector<std::string> excluded;  // kAnyText
  // kAnyText: whether the text has to end in time, as all else. If false, a limit on the tokens
  // may cut the whole text off in it.
  bool must_end = false;
  bool strict = false;          // kJsonSchema: as ConstraintSpec::strict
  bool closed_objects = false;  // kJsonSchema: as ConstraintSpec::closed_objects
  std::vector<TextFormat> parts;
  std::shared_ptr<const StructuralTags> tags;
};

// A region of the text: `begin`, then what `content` describes, then `end`.
struct StructuralTag {
  std::string begin;
  TextFormat content;
  std::string end;
};

// Groups of tags, with free text between the groups or without. A group is
//   prefix tag (separator tag)* suffix
// if one of `prefix`, `separator` and `suffix` is set, or if free text is not allowed. Otherwise a
// group is a single tag.
struct StructuralTags {
  std::vector<StructuralTag> tags;  // not empty

  // Whether free text may stand before, between and after groups. If false, the text is one group,
  // or empty unless `at_least_one`.
  bool free_text = true;
  // For free text: texts that no free text contains. Where the text spells a trigger, it continues
  // as one of the groups that begin with the trigger. So every group must begin with one: each
  // trigger must be a prefix of `prefix` + `begin` of some tag, and each tag must have a trigger.
  // Empty: the triggers are the beginnings (`prefix` + `begin`) of all groups. If a text contains a
  // trigger at several places, the one that ends first counts.
  std::vector<std::string> triggers;
  // Further texts that no free text contains.
  std::vector<std::string> excluded;

  bool at_least_one = false;      // at least one group
  bool stop_after_first = false;  // the text ends after the first group
  int max_tags = 0;               // largest number of tags in the whole text; 0: no limit

  std::string prefix;
  std::string separator;
  std::string suffix;

  // If true, the contents of the tags of a group are the items of one JSON array, with the white
  // space that JSON texts may have: a group is `prefix`, the array (of at least one item),
  // `suffix`. Then `separator` and all `begin` and `end` must be empty, and contents must be
  // kJsonObject or kJsonSchema.
  bool json_array = false;
};

}  // namespace moeserve

// Small constraints that together use every kind of JSON value.
#pragma once

#include <vector>

#include "tests/structured/support.h"

namespace moeserve::testing {

// Texts with tagged regions.
inline std::vector<ConstraintSpec> FormatCorpus() {
  using Kind = TextFormat::Kind;
  const auto content = [](Kind kind, std::string text) {
    TextFormat out;
    out.kind = kind;
    out.text = std::move(text);
    return out;
  };
  StructuralTags calls;
  calls.tags = {{"{\"name\": \"a\"", content(Kind::kJsonObject, ""), "}"},
                {"{\"name\": \"abc\"", content(Kind::kRegex, "[a-z ]*"), "\"}"},
                {"{\"nam", content(Kind::kAnyText, ""), "\"]}"}};
  calls.triggers = {"{\"n"};
  StructuralTags limited = calls;
  limited.max_tags = 2;
  limited.at_least_one = true;
  StructuralTags array;
  array.tags = {{"", content(Kind::kJsonSchema, R"({"type": "integer"})"), ""},
                {"", content(Kind::kJsonSchema, R"({"enum": ["x"]})"), ""}};
  array.json_array = true;
  array.prefix = "é";
  StructuralTags list;
  list.tags = {{"a", content(Kind::kRegex, "b{0,3}"), ""}, {"ab", content(Kind::kText, "c"), "d"}};
  list.free_text = false;
  list.prefix = "[";
  list.separator = ", ";
  list.suffix = "]";
  TextFormat sequence = content(Kind::kSequence, "");
  sequence.parts = {content(Kind::kAnyText, ""), content(Kind::kRegex, "\\d+"),
                    content(Kind::kText, "."), content(Kind::kJsonSchema, R"({"type": "number"})"),
                    content(Kind::kAnyText, "")};
  ConstraintSpec parts;
  parts.kind = ConstraintSpec::Kind::kFormat;
  parts.format = std::make_shared<const TextFormat>(std::move(sequence));
  return {TagsConstraint(calls), TagsConstraint(limited), TagsConstraint(array),
          TagsConstraint(list), parts};
}

inline std::vector<ConstraintSpec> Corpus() {
  std::vector<ConstraintSpec> out;
  for (const char* schema : {
           R"(true)",
           R"({"type": "object"})",
           R"({"type": "string", "minLength": 2, "maxLength": 5})",
           R"({"type": "string", "minLength": 3})",
           R"({"type": "number", "minimum": -1.5, "exclusiveMaximum": 20})",
           R"({"type": "integer", "multipleOf": 7, "minimum": -20})",
           R"({"type": ["null", "boolean", "string"], "maxLength": 1})",
           R"({"enum": ["a", "ab", "abc", 1, 1.5, null, [1, {"x": "y"}], "é\n"]})",
           R"({"const": {"name": "v", "x": [true, -2]}})",
           R"({"type": "string", "pattern": "^[a-c]{2,4}\\d?$"})",
           R"({"type": "string", "pattern": "é|\"", "maxLength": 4})",
           R"({"type": "string", "format": "date"})",
           R"({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4})",
           R"({"type": "array", "prefixItems": [{"const": "a"}, {"type": "null"}],
               "items": {"type": "boolean"}, "minItems": 1})",
           R"({"type": "object", "properties": {"a": {"type": "integer"}, "ab": {"type": "null"},
               "é": {"const": "x"}}, "required": ["ab"], "additionalProperties": false})",
           R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"const": 1},
               "c\"": true}, "minProperties": 3, "maxProperties": 4})",
           R"({"type": "object", "additionalProperties": {"enum": ["x", "y"]}, "minProperties": 2,
               "maxProperties": 3, "required": ["k"]})",
           R"({"type": "object", "properties": {"é": {"type": "null"}, "éb": {"minLength": 9,
               "type": "string"}, "ü": {"const": "a long text"}, "ééé": {"type": "boolean"}},
               "minProperties": 3, "additionalProperties": false})",
           R"({"type": "object", "properties": {"a": false, "b": {"type": "string"}}})",
           R"({"anyOf": [{"type": "object", "properties": {"kind": {"const": "k1"}},
               "required": ["kind", "x"]}, {"type": "object", "required": ["y"],
               "properties": {"kind": {"const": "k2"}}}, {"type": "string"}]})",
           R"({"$defs": {"n": {"type": "object", "properties": {"v": {"type": "integer"},
               "l": {"$ref": "#/$defs/n"}, "r": {"anyOf": [{"$ref": "#/$defs/n"},
               {"type": "null"}]}}, "required": ["v", "r"], "additionalProperties": false}},
               "$ref": "#/$defs/n"})",
           R"({"$defs": {"a": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/a"},
               {"type": "array", "items": {"type": "null"}}]}}}, "$ref": "#/$defs/a"})",
           R"({"anyOf": [{"type": "number", "minimum": 3}, {"type": "number", "maximum": 12.25},
               {"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^ab*$"}]})",
           R"({"allOf": [{"type": "object", "properties": {"a": {"minimum": 1}}},
               {"properties": {"a": {"type": "integer", "maximum": 3}}, "required": ["a"]}]})",
           R"({"oneOf": [{"type": "integer"}, {"type": "object", "maxProperties": 1}]})",
           R"({"type": "object", "properties": {"a1": {"type": "null"}, "z": {"const": 1}},
               "patternProperties": {"^a\\d": {"type": ["integer", "null"]}, "é": {"const": "x"}},
               "additionalProperties": false, "required": ["z"]})",
           R"({"type": "object", "patternProperties": {"^b": {"type": "integer"}},
               "additionalProperties": {"type": "null"}, "propertyNames": {"pattern": "^[a-c]+$"},
               "minProperties": 2})",
           R"({"type": "object", "propertyNames": {"anyOf": [{"enum": ["ab", "abc", "\""]},
               {"pattern": "^b*a$"}]}, "additionalProperties": {"type": "boolean"}})",
           R"({"type": "object", "propertyNames": {"pattern": "^[ab]{1,2}$"}, "minProperties": 5,
               "additionalProperties": {"const": 1}})",
           R"({"type": "array", "items": {"type": ["integer", "string"], "maxLength": 2},
               "contains": {"type": "integer", "minimum": 10}, "minContains": 2, "maxItems": 4})",
           R"({"type": "array", "contains": {"const": "ab"}, "maxContains": 1, "minItems": 2})",
           R"({"type": "array", "items": {"enum": ["a", "ab", 1, null, 12]}, "uniqueItems": true,
               "minItems": 3})",
           R"({"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": true,
               "minItems": 2})",
           R"({"type": "array", "items": {"type": "string", "pattern": "^[ab]{1,2}$"},
               "uniqueItems": true, "minItems": 6})",
           R"({"type": "array", "items": {"type": "string"}, "uniqueItems": true, "maxItems": 2})",
           R"({"not": {"type": ["object", "array", "number"]}, "minLength": 2,
               "maxLength": 4})",
           R"({"type": "integer", "not": {"anyOf": [{"multipleOf": 3}, {"enum": [1, 2, 10]}]}})",
           R"({"type": "string", "not": {"anyOf": [{"pattern": "^a|b$"}, {"const": "é"}]}})",
           R"({"type": "number", "multipleOf": 0.25, "minimum": -1})",
           R"({"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"],
               "if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["x"]},
               "else": {"properties": {"y": {"type": "null"}}, "maxProperties": 2}})",
           R"({"type": "object", "dependentRequired": {"a": ["b"]}, "dependentSchemas":
               {"b": {"properties": {"c": {"const": 1}}, "required": ["c"]}}})",
           R"({"oneOf": [{"type": "number", "minimum": 2}, {"type": "integer"},
               {"type": "array", "prefixItems": [{"const": 1}]}, {"type": "array", "maxItems": 1}]})",
       }) {
    out.push_back(Schema(schema));
  }
  for (const char* pattern : {"", "a*", "(?:ab|abc|[\\s\\S]{3})*", "\\d{4}-\\d{2}", "[^a-z]{1,3}é?",
                              "(a|aa)*b", "(?:\\{\"a\": [0-9]+\\})?"}) {
    out.push_back(Pattern(pattern));
  }
  out.push_back(Choices({"yes", "yes, it is", "no", "né", ""}));
  out.push_back({});
  for (const char* grammar : {
           "root ::= sum\nsum ::= term (\"+\" term)*\nterm ::= [0-9]+ | \"(\" sum \")\" | \"a\" "
           "term?",
           "root ::= root \" \" word | word\nword ::= [^ \\n\"]+ | \"\\\"\" [^\"]* \"\\\"\"",
           "root ::= \"{\" pairs \"}\" | root2\nroot2 ::= \"[\" root? \"]\"\npairs ::= \"\" | "
           "\"\\\"a\\\": \" root (\", \" pairs)?",
           "root ::= a | b\na ::= \"a\" a \"b\" | \"ab\"\nb ::= \"a\" b \"bb\" | \"abb\"",
           "start: (NAME | value)+\nvalue: \"[\" value* \"]\" | INT\nNAME: /[a-z]+/\n"
           "%import common (INT, WS)\n%ignore WS",
       }) {
    out.push_back(ContextFree(grammar));
  }
  for (ConstraintSpec& spec : FormatCorpus()) out.push_back(std::move(spec));
  return out;
}

}  // namespace moeserve::testing

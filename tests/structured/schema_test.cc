// What schemas accept and refuse, as far as the JSON Schema Test Suite does not say.
#include <string>
#include <vector>

#include "engine/text/structured/compile_constraint.h"
#include "tests/structured/support.h"

namespace moeserve::testing {
namespace {

struct SchemaExample {
  std::string schema;
  std::vector<std::string> valid;
  std::vector<std::string> invalid;
};

void CheckSchema(const SchemaExample& example) {
  SCOPED_TRACE(example.schema);
  const auto compiled = Compile(Schema(example.schema));
  ASSERT_NE(compiled, nullptr);
  for (const std::string& text : example.valid) EXPECT_TRUE(Accepts(*compiled, text)) << text;
  for (const std::string& text : example.invalid) EXPECT_FALSE(Accepts(*compiled, text)) << text;
}

TEST(SchemaTest, PropertiesKeepTheOrderOfTheSchema) {
  CheckSchema(
      {R"({"type": "object", "properties": {"z": {}, "m": {}, "a": {}}, "required": ["m"],
          "additionalProperties": false})",
       {R"({"z": 1, "m": 2, "a": 3})", R"({"m": 2, "a": 3})", R"({"m": 2})", R"({"z": 1, "m": 2})"},
       {R"({"m": 2, "z": 1})", R"({"a": 3, "m": 2})", R"({"z": 1, "a": 3})", R"({"a": 3})"}});
  // Other properties follow, in any order, and do not take the place of required ones.
  CheckSchema(
      {R"({"type": "object", "properties": {"z": {}, "a": {}}, "required": ["a", "zz", "aa"]})",
       {R"({"z": 1, "a": 2, "zz": 3, "aa": 4})", R"({"a": 2, "aa": 3, "other": 4, "zz": 5})"},
       {R"({"other": 1, "a": 2, "aa": 3, "zz": 4})", R"({"aa": 1, "a": 2, "zz": 4})",
        R"({"a": 2, "aa": 3, "zz": 4, "z": 1})"}});
  CheckSchema(
      {R"({"type": "object", "properties": {"z": {}}, "patternProperties": {"^x": {"type": "null"}},
          "additionalProperties": false})",
       {R"({"z": 1, "xb": null, "xa": null})", R"({"xa": null, "xb": null})"},
       {R"({"xa": null, "z": 1})"}});
}

TEST(SchemaTest, PropertiesOfPartsComeAsTheyAreMentionedFirst) {
  const std::string base = R"("$defs": {"b": {"properties": {"y": {}, "x": {}}}})";
  CheckSchema({"{" + base + R"(, "type": "object", "allOf": [{"$ref": "#/$defs/b"},
          {"properties": {"w": {}, "y": {"type": "integer"}}}], "properties": {"a": {}}})",
               {R"({"y": 1, "x": 2, "w": 3, "a": 4})"},
               {R"({"a": 4, "y": 1})", R"({"w": 3, "y": 1})", R"({"y": "1"})"}});
  CheckSchema({"{" + base + R"(, "type": "object", "properties": {"a": {}}, "$ref": "#/$defs/b"})",
               {R"({"a": 4, "y": 1, "x": 2})"},
               {R"({"y": 1, "a": 4})", R"({"x": 1, "y": 4})"}});
  CheckSchema({R"({"type": "object", "properties": {"k": {}, "c": {}}, "anyOf": [
          {"properties": {"k": {"const": 1}, "q": {}, "b": {}}},
          {"properties": {"k": {"const": 2}, "p": {}}}]})",
               {R"({"k": 1, "c": 0, "q": 1, "b": 2})", R"({"k": 2, "c": 0, "p": 2})"},
               {R"({"c": 0, "k": 1})", R"({"k": 1, "b": 1, "q": 2})"}});
  // A property whose value two schemas describe.
  CheckSchema({R"({"type": "object", "allOf": [
          {"properties": {"o": {"type": "object", "properties": {"z": {}, "b": {}}}}},
          {"properties": {"o": {"properties": {"y": {}, "a": {}}}}}]})",
               {R"({"o": {"z": 1, "b": 2, "y": 3, "a": 4}})"},
               {R"({"o": {"y": 1, "z": 2}})", R"({"o": {"b": 1, "z": 2}})"}});
  CheckSchema({R"({"const": {"z": 1, "a": {"y": 2, "x": 3}}})",
               {R"({"z": 1, "a": {"y": 2, "x": 3}})"},
               {R"({"a": {"y": 2, "x": 3}, "z": 1})"}});
}

// A property must not be left out if too few are behind it.
TEST(SchemaTest, OrderedPropertiesFillObjects) {
  const std::string schema = R"({"type": "object", "properties": {"c": {"type": "null"},
      "b": {"type": "null"}, "a": {"type": "null"}, "d": {"type": "null"}}, "required": ["a"],
      "minProperties": 3, "additionalProperties": false})";
  CheckSchema({schema,
               {R"({"c": null, "b": null, "a": null})", R"({"b": null, "a": null, "d": null})",
                R"({"c": null, "b": null, "a": null, "d": null})"},
               {R"({"a": null, "d": null})", R"({"c": null, "a": null})"}});
  const auto compiled = Compile(Schema(schema));
  const auto state = compiled->NewState();
  for (const char c : std::string_view("{\""))
    ASSERT_TRUE(state->Accept(2 + static_cast<uint8_t>(c)));
  const auto mask = MaskOf(state.get(), *SmallVocabulary());
  EXPECT_TRUE(IsSet(mask, 2 + 'c') && IsSet(mask, 2 + 'b'));
  EXPECT_FALSE(IsSet(mask, 2 + 'a') || IsSet(mask, 2 + 'd'));
}

TEST(SchemaTest, ClosedObjectsHaveNoOtherProperties) {
  const auto closed = [](std::string text) {
    ConstraintSpec spec = Schema(std::move(text));
    spec.closed_objects = true;
    return Compile(spec);
  };
  const auto named = closed(R"({"type": "object", "properties": {"a": {}}, "required": ["b"]})");
  EXPECT_TRUE(Accepts(*named, R"({"a": {"any": 1}, "b": 2})"));
  EXPECT_FALSE(Accepts(*named, R"({"a": 1, "b": 2, "c": 3})"));
  for (
      const char* open :
      {R"({"type": "object"})", R"({"type": "object", "properties": {}})",
       R"({"type": "object", "properties": {"a": {}}, "additionalProperties": true})",
       R"({"type": "object", "properties": {"a": {}}, "minProperties": 2})",
       R"({"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}})"}) {
    EXPECT_TRUE(Accepts(*closed(open), R"({"c": null, "d": null})")) << open;
  }
  // All parts together name what is allowed.
  const auto parts = closed(R"({"type": "object", "allOf": [{"properties": {"a": {}}},
                                {"properties": {"b": {}}}]})");
  EXPECT_TRUE(Accepts(*parts, R"({"a": 1, "b": 2})"));
  EXPECT_FALSE(Accepts(*parts, R"({"c": 1})"));
}

TEST(SchemaTest, References) {
  CheckSchema({R"({"$id": "http://example.org/a/root", "$defs": {
      "x": {"$id": "b/x", "type": "integer", "$defs": {"y": {"$anchor": "here", "const": 1}}},
      "z": {"$anchor": "there", "type": "null"}},
      "prefixItems": [{"$ref": "b/x"}, {"$ref": "http://example.org/a/b/x#here"},
                      {"$ref": "#there"}, {"$ref": "/a/b/x#/$defs/y"}, {"$ref": "root#there"}],
      "type": "array", "items": false, "minItems": 5})",
               {"[7, 1, null, 1, null]"},
               {"[\"a\", 1, null, 1, null]", "[7, 2, null, 1, null]", "[7, 1, 0, 1, null]"}});
  // Up to draft 7, keywords beside a reference have no effect.
  for (const bool old : {false, true}) {
    const std::string draft = old ? "http://json-schema.org/draft-07/schema#"
                                  : "https://json-schema.org/draft/2020-12/schema";
    const auto compiled = Compile(Schema("{\"$schema\": \"" + draft + R"(", "$defs": {"s":
        {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/s", "maxLength": 1}},
        "type": "object"})"));
    EXPECT_TRUE(Accepts(*compiled, R"({"a": "x"})"));
    EXPECT_EQ(Accepts(*compiled, R"({"a": "xy"})"), old);
  }
  CheckSchema({R"({"$defs": {"list": {"oneOf": [{"type": "null"}, {"type": "object", "required":
      ["next"], "properties": {"next": {"$ref": "#/$defs/list"}}}]}}, "$ref": "#/$defs/list"})",
               {"null", R"({"next": null})", R"({"next": {"next": null}})"},
               {"1", "{}", R"({"next": {}})"}});
}

TEST(SchemaTest, IdentifiersOfDraft4) {
  const auto compiled = Compile(
      Schema(R"({"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://example.org/a",
                 "definitions": {"x": {"id": "b", "type": "integer"}},
                 "type": "object", "properties": {"id": {"$ref": "http://example.org/b"}},
                 "required": ["id"], "additionalProperties": false})",
             /*strict=*/false));
  ASSERT_NE(compiled, nullptr);
  EXPECT_TRUE(Accepts(*compiled, R"({"id": 1})"));
  EXPECT_FALSE(Accepts(*compiled, R"({"id": "a"})"));
}

TEST(SchemaTest, UnknownFormatsRestrictNothingUnlessStrict) {
  const std::string schema = R"({"type": "integer", "format": "int64"})";
  EXPECT_TRUE(Accepts(*Compile(Schema(schema, /*strict=*/false)), "12"));
  EXPECT_FALSE(CompileConstraint(Schema(schema), SmallVocabulary()).ok());
  EXPECT_FALSE(
      CompileConstraint(Schema(R"({"format": "uri-template"})", false), SmallVocabulary()).ok());
}

TEST(SchemaTest, Keys) {
  const SchemaExample patterns = {
      R"({"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"],
          "patternProperties": {"^s_": {"type": "string"}, "_n$": {"maxLength": 2}},
          "additionalProperties": false})",
      {R"({"id": 1})", R"({"id": 1, "s_": "abc"})", R"({"id": 1, "s_n": "ab"})",
       R"({"id": 1, "a_n": [1], "b_n": 2, "s_a": ""})", R"({"id": 1, "\u00e9_n": 1})"},
      {"{}", R"({"id": 1, "s_": 1})", R"({"id": 1, "s_n": "abc"})", R"({"id": 1, "x": 1})",
       R"({"id": 1, "s_a": "", "s_a": ""})", R"({"id": 1, "s_a": "", "s\u005fa": ""})"}};
  CheckSchema(patterns);
  // Few keys match, and each can be used once.
  CheckSchema({R"({"type": "object", "patternProperties": {"^[ab]$": {"const": 1}},
             "additionalProperties": false, "minProperties": 2})",
               {R"({"a": 1, "b": 1})", R"({"b": 1, "a": 1})"},
               {R"({"a": 1})", R"({"a": 1, "c": 1})"}});
  CheckSchema({R"({"type": "object", "propertyNames": {"pattern": "^[^a]*a$", "maxLength": 40}})",
               {"{}", R"({"a": 1, "ba": 2})"},
               {R"({"ab": 1})", R"({"a": 1, "a": 1})"}});
  CheckSchema(
      {R"({"type": "object", "propertyNames": {"not": {"enum": ["x", "y"]}}, "maxProperties": 1})",
       {"{}", R"({"xx": 1})"},
       {R"({"x": 1})", R"({"z": 1, "zz": 1})"}});
}

TEST(SchemaTest, Items) {
  CheckSchema(
      {R"({"type": "array", "contains": {"type": "integer"}, "minContains": 2, "maxContains": 3})",
       {"[1, 2]", "[1, \"a\", 2, null, 3]"},
       {"[]", "[1]", "[1, \"a\"]", "[1, 2, 3, 4]"}});
  CheckSchema({R"({"type": "array", "prefixItems": [{"type": "integer"}, true], "items": false,
             "contains": {"const": 5}})",
               {"[5]", "[5, 1]", "[1, 5]", "[5, 5]"},
               {"[]", "[1]", "[1, 2]", "[5, 5, 5]"}});
  CheckSchema(
      {R"({"type": "array", "items": {"anyOf": [{"enum": ["a", "b", 1]}, {"type": "boolean"}]},
             "uniqueItems": true, "minItems": 2, "maxItems": 5})",
       {R"(["a", "b"])", R"([true, 1, false, "a", "b"])"},
       {R"(["a"])", R"(["a", "a"])", R"([1, true, 1])"}});
  CheckSchema(
      {R"({"type": "array", "items": {"type": "string"}, "uniqueItems": true, "maxItems": 3})",
       {"[]", R"(["a"])", R"(["", "a", "b\n"])"},
       {R"(["a", "a"])", R"(["a", 1])", R"(["a","b","c","d"])", R"({"a":1})", R"(["a":1])",
        R"(["\u00e9", "é"])"}});
  CheckSchema({R"({"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"},
             "uniqueItems": true, "minItems": 2})",
               {R"(["a", "ab"])", R"(["b","a","c"])"},
               {"[]", R"(["a"])", R"(["a", "a"])", R"(["a", "B"])"}});
}

TEST(SchemaTest, ContainedItemsMayBeTheOnlyOnes) {
  CheckSchema({R"({"type": "array", "items": {"type": "string"}, "contains": {"type": "string"},
             "minItems": 2, "maxContains": 4})",
               {R"(["a", "b"])", R"(["a", "b", "c", "d"])"},
               {R"(["a"])", R"(["a", "b", "c", "d", "e"])", "[1, 2]"}});
  CheckSchema({R"({"type": "array", "contains": {"const": 1}, "minItems": 3, "maxContains": 2})",
               {"[1, 1, 2]", "[1, 2, 3]"},
               {"[1, 1, 1]", "[2, 3, 4]", "[1, 1]"}});
  const auto impossible =
      CompileConstraint(Schema(R"({"type": "array", "contains": false})"), SmallVocabulary());
  EXPECT_NE(impossible.status().message().find("#/contains: no value matches"), std::string::npos)
      << impossible.status();
}

TEST(SchemaTest, PatternsWithLineEndsAreNotMixedUp) {
  CheckSchema(
      {R"({"type": "object", "properties": {"a": {"type": "string", "pattern": "bar\np3:foo"},
             "b": {"type": "string", "allOf": [{"pattern": "bar"}, {"pattern": "foo"}]}}})",
       {R"({"b": "foobar"})", R"({"a": "bar\np3:foo"})"},
       {R"({"a": "foobar"})", R"({"b": "foo"})"}});
  CheckSchema({R"({"type": "object", "properties": {"a": {"type": "string", "pattern": "bar\npfoo"},
             "b": {"type": "string", "allOf": [{"pattern": "bar"}, {"pattern": "foo"}]}}})",
               {R"({"b": "foobar"})", R"({"a": "bar\npfoo"})"},
               {R"({"a": "foobar"})"}});
}

TEST(SchemaTest, NumbersAreComparedExactly) {
  EXPECT_FALSE(CompileConstraint(Schema(R"({"const": -1, "enum": [18446744073709551615]})"),
                                 SmallVocabulary())
                   .ok());
  CheckSchema({R"({"const": 1.0, "enum": [1]})", {"1"}, {"2", "-1"}});
  CheckSchema({R"({"const": {"a": [1.0]}, "enum": [{"a": [1]}, {"a": [2]}]})",
               {R"({"a": [1]})"},
               {R"({"a": [2]})"}});
  // Draft 4 and OpenAPI 3.0.
  CheckSchema({R"({"type": "integer", "minimum": 0, "exclusiveMinimum": true, "maximum": 3,
             "exclusiveMaximum": false})",
               {"1", "3"},
               {"0", "4"}});
}

TEST(SchemaTest, ListedNumbersAndMultiples) {
  CheckSchema({R"({"type": "integer", "enum": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 5000],
             "not": {"multipleOf": 5000}})",
               {"1", "10"},
               {"5000", "11"}});
  std::string quarters = "0";
  for (int i = 1; i < 40; ++i) quarters += ", " + std::to_string(i) + ".0625";
  CheckSchema({"{\"enum\": [" + quarters + ", 0.1, 1e20, 3], \"multipleOf\": 0.0625}",
               {"0", "1.0625", "39.0625", "1e+20", "3"},
               {"0.1", "0.0625"}});
}

TEST(SchemaTest, ManyListedStringsThatDiffer) {
  std::string words;
  for (int i = 0; i < 65; ++i) words += (i > 0 ? ", \"w" : "\"w") + std::to_string(i) + '"';
  CheckSchema(
      {"{\"type\": \"array\", \"uniqueItems\": true, \"items\": {\"enum\": [" + words + "]}}",
       {"[]", R"(["w0"])", R"(["w64", "w0"])"},
       {R"(["w0", "w0"])", R"(["w65"])", R"([1])"}});
}

TEST(SchemaTest, FormatsKeepTheirLimits) {
  const auto host = Compile(Schema(R"({"type": "string", "format": "hostname"})"));
  const std::string label(62, 'a');
  EXPECT_TRUE(Accepts(*host, '"' + label + '.' + label + '.' + label + '.' + label + '"'));
  EXPECT_FALSE(Accepts(*host, '"' + std::string(63, 'a') + '"'));
  const auto mail = Compile(Schema(R"({"type": "string", "format": "email"})"));
  EXPECT_TRUE(Accepts(*mail, '"' + std::string(32, 'a') + '.' + std::string(31, 'b') + "@c\""));
  EXPECT_FALSE(Accepts(*mail, '"' + std::string(32, 'a') + '.' + std::string(32, 'b') + "@c\""));
  CheckSchema({R"({"type": "string", "format": "regex"})",
               {R"x("\\ba+\\B")x", R"x("(a|\\b)*c?")x"},
               {R"x("\\b*")x", R"x("(\\B+)")x"}});
}

TEST(SchemaTest, OppositesAndConditions) {
  CheckSchema({R"({"not": {"type": "array", "items": {"type": "integer"}, "minItems": 1}})",
               {"[]", "[1, \"a\"]", "1", "{}"},
               {"[1]", "[1, 2]"}});
  CheckSchema({R"({"type": "array", "not": {"contains": {"const": 1}}})",
               {"[]", "[2, \"1\"]"},
               {"[1]", "[2, 1]"}});
  CheckSchema({R"({"type": "number", "not": {"multipleOf": 0.5}})",
               {"1.25", "-0.1", "3.0001"},
               {"1", "1.5", "-2.50"}});
  CheckSchema({R"({"type": ["boolean", "null", "string"], "not": {"enum": [true, "a", null]}})",
               {"false", "\"b\"", "\"aa\""},
               {"true", "null", "\"a\""}});
  CheckSchema(
      {R"({"type": "object", "dependentRequired": {"a": ["b", "c"]}, "dependentSchemas": {"b":
             {"properties": {"c": {"type": "null"}}}}})",
       {"{}", R"({"b": 1})", R"({"c": 1})", R"({"c": null, "b": 1, "a": 2})"},
       {R"({"a": 1})", R"({"a": 1, "b": 1})", R"({"b": 1, "c": 1})"}});
  CheckSchema({R"({"type": "object", "required": ["t"], "properties": {"t": {"enum": ["a", "b"]}},
             "if": {"properties": {"t": {"const": "a"}}, "required": ["t"]},
             "then": {"required": ["x"]}, "else": {"not": {"required": ["x"]}}})",
               {R"({"t": "a", "x": 1})", R"({"t": "a", "x": 1})", R"({"t": "b"})"},
               {R"({"t": "a"})", R"({"t": "b", "x": 1})", R"({"x": 1, "t": "b"})"}});
  CheckSchema(
      {R"({"oneOf": [{"type": "string", "minLength": 3}, {"type": "string", "pattern": "^a"}]})",
       {"\"bcd\"", "\"a\"", "\"ab\""},
       {"\"abc\"", "\"b\"", "1"}});
}

}  // namespace
}  // namespace moeserve::testing

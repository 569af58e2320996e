// Schemas and patterns that are designed to cost time or memory.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "engine/text/structured/constraint.h"
#include "tests/structured/support.h"

namespace moeserve::testing {

struct NamedSpec {
  std::string name;
  ConstraintSpec spec;
};

inline std::string Repeated(std::string_view text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

// Returns the texts make(0) to make(count - 1), separated by commas.
template <typename Make>
std::string List(int count, const Make& make) {
  std::string out;
  for (int i = 0; i < count; ++i) {
    if (i > 0) out += ',';
    out += make(i);
  }
  return out;
}

// Returns valid constraints that are hard: with many ways to parse the same text, large objects, or
// large automata.
// Returns valid constraints whose texts can be read in hundreds of ways after every token.
inline std::vector<NamedSpec> ManyReadings() {
  const auto number = [](int i) { return std::to_string(i); };
  std::vector<NamedSpec> out;
  for (const int regions : {100, 300}) {
    TextFormat any;
    any.kind = TextFormat::Kind::kAnyText;
    any.excluded = {"</x>"};
    TextFormat sequence;
    sequence.kind = TextFormat::Kind::kSequence;
    sequence.parts.assign(regions, any);
    ConstraintSpec spec;
    spec.kind = ConstraintSpec::Kind::kFormat;
    spec.format = std::make_shared<const TextFormat>(sequence);
    out.push_back({"tag of " + number(regions) + " free regions", std::move(spec)});
  }
  // A rule that is not regular keeps its instances apart.
  out.push_back({"EBNF of free regions",
                 ContextFree("root ::= " + Repeated("r ", 300) + "\nr ::= [^#]* | \"(\" r \")\"")});
  out.push_back({"Lark of free regions",
                 ContextFree("start: " + Repeated("r ", 300) + "\nr: /[^#]*/ | \"(\" r \")\"")});
  out.push_back({"regex of open choices", Pattern("(?:[\\s\\S]{0,9}a?){0,40}")});
  out.push_back({"schema of strings that differ late",
                 Schema("{\"anyOf\":[" +
                        List(400,
                             [&](int i) {
                               return "{\"type\":\"array\",\"items\":{\"type\":\"string\","
                                      "\"minLength\":" +
                                      number(i % 20) + "},\"minItems\":" + number(i) + "}";
                             }) +
                        "]}")});
  return out;
}

inline std::vector<NamedSpec> HardSpecs() {
  const auto number = [](int i) { return std::to_string(i); };
  std::vector<NamedSpec> out;
  const auto schema = [&](std::string name, std::string text) {
    out.push_back({std::move(name), Schema(std::move(text))});
  };
  // Each alternative requires another property later, so none can be ruled out early.
  schema("objects that differ late", "{\"anyOf\":[" + List(300, [&](int i) {
                                       return "{\"type\":\"object\",\"required\":[\"z" + number(i) +
                                              "\"]}";
                                     }) + "]}");
  schema("objects that differ late, everywhere",
         "{\"$defs\":{\"v\":{\"anyOf\":[" + List(100, [&](int i) {
           return "{\"type\":\"object\",\"required\":[\"z" + number(i) +
                  "\"],\"additionalProperties\":{\"$ref\":\"#/$defs/v\"}}";
         }) + ",{\"type\":\"null\"}]}},\"$ref\":\"#/$defs/v\"}");
  schema("arrays of different items, nested",
         "{\"$defs\":{\"v\":{\"anyOf\":[" + List(12, [&](int i) {
           return "{\"type\":\"array\",\"items\":{\"$ref\":\"#/$defs/v\"},\"minItems\":" +
                  number(i) + "}";
         }) + ",{\"type\":\"string\"},{\"type\":\"integer\"}]}},\"$ref\":\"#/$defs/v\"}");
  schema("strings of different lengths",
         "{\"anyOf\":[" + List(400, [&](int i) {
           return "{\"type\":\"string\",\"minLength\":" + number(2 * i) +
                  ",\"maxLength\":" + number(2 * i + 1) + "}";
         }) + "]}");
  schema("many optional properties, most of them needed",
         "{\"type\":\"object\",\"properties\":{" + List(4000, [&](int i) {
           return "\"" + number(i) + "\":true";
         }) + "},\"minProperties\":900}");
  schema("many optional properties and no others",
         "{\"type\":\"object\",\"properties\":{" + List(4000, [&](int i) {
           return "\"" + number(i) + "\":{}";
         }) + "},\"minProperties\":2000,\"additionalProperties\":false}");
  schema("many required properties",
         "{\"required\":[" + List(5000, [&](int i) { return "\"p" + number(i) + "\""; }) +
             "],\"type\":\"object\",\"additionalProperties\":{\"type\":\"integer\"}}");
  schema(
      "any other property, a thousand times",
      "{\"type\":\"object\",\"minProperties\":900,\"additionalProperties\":{\"type\":\"null\"}}");
  schema("numbers of many ranges", "{\"anyOf\":[" + List(300, [&](int i) {
                                     return "{\"type\":\"number\",\"minimum\":" + number(i) +
                                            ".5,\"maximum\":" + number(1000 - i) + ".25}";
                                   }) + "]}");
  schema("long strings of a pattern",
         R"({"type":"string","pattern":"^([ab]{3}|[bc]{5})*$","minLength":50,"maxLength":150})");
  schema("patterns together", "{\"allOf\":[" + List(3, [&](int i) {
                                return "{\"type\":\"string\",\"pattern\":\"" +
                                       std::string(1, static_cast<char>('a' + i)) + ".*" +
                                       std::string(1, static_cast<char>('a' + i)) + "\"}";
                              }) + "]}");
  schema("a long enum", "{\"enum\":[" + List(1000, [&](int i) {
                          return "\"" + Repeated("x", i % 40) + number(i) + "\"";
                        }) + "]}");
  out.push_back({"regex of 12 open choices", Pattern("[\\s\\S]*a[\\s\\S]{12}")});
  out.push_back({"regex of long repetitions", Pattern("(?:(?:a|aa){1,9}b?){1,9}")});
  out.push_back({"regex of any text of bounded length", Pattern("[\\s\\S]{0,2000}")});
  out.push_back({"any object", {}});
  const auto grammar = [&](std::string name, std::string text) {
    out.push_back({std::move(name), ContextFree(std::move(text))});
  };
  grammar("grammar with two ways for every part",
          "root ::= a\na ::= \"(\" a \")\" | \"(\" b \")\" | \"x\"\nb ::= \"(\" a \")\" | \"(\" b "
          "\")\"");
  grammar("grammar of palindromes", "root ::= \"a\" root \"a\" | \"b\" root \"b\" | [a-b]?");
  grammar(
      "grammar with many ways to begin", "root ::= r0 \"x\" | s0\n" + [&] {
        std::string rules;
        for (int i = 0; i < 60; ++i) {
          const std::string next = number(i + 1);
          for (const char* name : {"r", "s"}) {
            rules += name + number(i) + " ::= r" + next + " \"y\"? | s" + next + " \"z\"?\n";
          }
        }
        return rules + "r60 ::= \"a\" root \"b\" | \"c\"\ns60 ::= \"a\" root \"d\" | \"c\"\n";
      }());
  grammar("grammar of ambiguous lists",
          "root ::= root2\nroot2 ::= \"x\" root2 root2 | \"x\" root2 | \"x\"");
  return out;
}

}  // namespace moeserve::testing

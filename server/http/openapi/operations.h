// What the routes of the HTTP interface do, for the description at /openapi.json.
#pragma once

#include <span>
#include <string_view>

namespace moeserve::server::http {

// One operation of OpenAPI. A route whose pattern ends in '*' can have several, and each names the
// path for it. All texts are literals; names of schemas are those of Schemas().
struct Operation {
  std::string_view method;
  std::string_view pattern;         // of the route
  std::string_view path = pattern;  // with parameters such as "{model}"
  std::string_view tag;
  std::string_view summary;
  std::string_view parameters = {};  // names of Parameters(), separated by spaces
  std::string_view request = {};     // schema of the JSON body; empty: no body
  std::string_view answer = {};      // schema of the JSON answer; empty: not JSON
  std::string_view other_type = {};  // media type of another form of the answer
  std::string_view error = "Error";  // schema of errors
  // Whether the body may be absent.
  bool optional_body = false;
};

std::span<const Operation> Operations();

struct Tag {
  std::string_view name;
  std::string_view meaning;
};
std::span<const Tag> Tags();

}  // namespace moeserve::server::http

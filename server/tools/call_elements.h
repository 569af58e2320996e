// Reads the arguments of a call whose parameters are elements (CallSyntax::before_key).
#pragma once

#include <map>
#include <string>

#include "server/tools/call_syntax.h"
#include "server/tools/tool_parameters.h"

namespace moeserve::server {

// Converts the elements of one call to a JSON object, while they arrive. One thread at a time.
class CallElements {
 public:
  // `syntax` must outlive the object. `tool` is the called one; null: an unknown one.
  CallElements(const CallSyntax& syntax, const OfferedTool* tool);

  // Removes from `held`, the text that follows, what is understood, and returns the next part of
  // the JSON text.
  std::string Read(std::string& held);
  // Whether the call is complete; its CallSyntax::after_arguments was removed.
  bool complete() const { return complete_; }

 private:
  bool MayBegin(std::string_view text) const;
  size_t Find(const std::string& held, std::string_view mark, size_t begin);
  bool ReadKey(std::string& held, std::string& out);
  bool ReadValue(std::string& held, std::string& out);

  const CallSyntax& syntax_;
  std::map<std::string, ParameterKind> kinds_;
  bool begun_ = false;     // whether the object has begun
  bool any_ = false;       // whether the object has a member
  bool in_value_ = false;  // of the kind `kind_`
  ParameterKind kind_;
  size_t searched_ = 0;  // where the next search in the text that is held begins
  bool quoted_ = false;  // whether a part of the string has been returned
  bool complete_ = false;
};

}  // namespace moeserve::server

#include "server/tools/call_elements.h"

#include <algorithm>

#include "server/tools/split_text.h"

namespace moeserve::server {

CallElements::CallElements(const CallSyntax& syntax, const OfferedTool* tool) : syntax_(syntax) {
  if (tool != nullptr) kinds_ = tool->parameters;
}

std::string CallElements::Read(std::string& held) {
  std::string out;
  if (!begun_) out += '{';
  begun_ = true;
  while (!complete_ && (in_value_ ? ReadValue(held, out) : ReadKey(held, out))) {
  }
  return out;
}

// Whether `text` begins like a key or the end of the call.
bool CallElements::MayBegin(std::string_view text) const {
  return text.front() == syntax_.before_key.front() ||
         text.front() == syntax_.after_arguments.front();
}

// Returns the place of `mark` in `held` from `begin` on. Text is searched only once.
size_t CallElements::Find(const std::string& held, std::string_view mark, size_t begin) {
  begin = std::max(begin, searched_);
  const size_t at = held.find(mark, begin);
  const bool found = at != std::string::npos;
  searched_ = found || held.size() < mark.size() ? 0 : held.size() - mark.size() + 1;
  return at;
}

// Returns false if more text is needed.
bool CallElements::ReadKey(std::string& held, std::string& out) {
  if (held.starts_with(syntax_.after_arguments)) {
    held.erase(0, syntax_.after_arguments.size());
    out += '}';
    complete_ = true;
    return true;
  }
  if (!held.starts_with(syntax_.before_key)) {
    if (syntax_.after_arguments.starts_with(held) || syntax_.before_key.starts_with(held)) {
      return false;
    }
    // White space is not significant; other text does not belong here.
    size_t skipped = 1;
    while (skipped < held.size() && !MayBegin(std::string_view(held).substr(skipped))) ++skipped;
    held.erase(0, skipped);
    return true;
  }
  const size_t end = Find(held, syntax_.before_value, syntax_.before_key.size());
  if (end == std::string::npos) return false;
  const std::string key = held.substr(syntax_.before_key.size(), end - syntax_.before_key.size());
  held.erase(0, end + syntax_.before_value.size());
  if (any_) out += ", ";
  any_ = true;
  out += '"' + EscapedPart(key) + "\": ";
  const auto kind = kinds_.find(key);
  kind_ = kind == kinds_.end() ? ParameterKind() : kind->second;
  in_value_ = true;
  quoted_ = false;
  return true;
}

bool CallElements::ReadValue(std::string& held, std::string& out) {
  const size_t end = Find(held, syntax_.after_value, 0);
  const bool ends = end != std::string::npos;
  // Only strings can be returned before their end.
  if (!ends && !kind_.only_string()) return false;
  const size_t size = ends ? end : held.size() - HeldBack(held, syntax_.after_value);
  const std::string_view text = std::string_view(held).substr(0, size);
  if (kind_.only_string()) {
    if (!quoted_) out += '"';
    quoted_ = true;
    out += EscapedPart(text);
    if (ends) out += '"';
  } else {
    out += ParameterJson(kind_, text);
  }
  held.erase(0, ends ? size + syntax_.after_value.size() : size);
  searched_ = 0;
  in_value_ = !ends;
  return ends;
}

}  // namespace moeserve::server

// Parses a template into its syntax tree.
#pragma once

#include <string_view>

#include "engine/text/chat/ast.h"

namespace moeserve::chat {

// Throws TemplateError with the line number.
Body ParseTemplate(std::string_view source);

}  // namespace moeserve::chat

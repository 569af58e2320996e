// Tokens -> tree.
#pragma once

#include <string_view>

#include "engine/text/chat/ast.h"

namespace moeserve::chat {

// Throws TemplateError with the line.
Body ParseTemplate(std::string_view source);

}  // namespace moeserve::chat

// What Ollama's routes tell about the served models.
#pragma once

#include <string>
#include <string_view>

#include "server/base/json.h"
#include "server/models/served_model.h"

namespace moeserve::server {

// The version of Ollama whose list, chat and generate routes these are. Clients compare it with the
// oldest version that they can use.
inline constexpr std::string_view kOllamaVersion = "0.12.6";

// Returns the entry of a model in /api/tags. `name` is its name or an alias.
OrderedJson OllamaTagJson(const std::string& name, const ServedModel& model);
// Returns its entry in /api/ps.
OrderedJson OllamaRunningJson(const std::string& name, const ServedModel& model);
// Returns the body of /api/show. `show_template`: whether it has the chat template.
OrderedJson OllamaShowJson(const ServedModel& model, bool show_template);

}  // namespace moeserve::server

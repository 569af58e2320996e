// Whether a model has the task of a request.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "engine/spec/spec.h"

namespace moeserve::server {

// Returns InvalidArgument with API error code "unsupported_task", naming the model's tasks and the
// request field, unless the model has this task, one of TaskNames() (engine/validate_request.h).
absl::Status CheckTask(const ModelSpec& spec, std::string_view task,
                       std::string_view field = "model");
// The same for generating text.
inline absl::Status CheckGenerates(const ModelSpec& spec) { return CheckTask(spec, "generate"); }

}  // namespace moeserve::server

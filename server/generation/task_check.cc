#include "server/generation/task_check.h"

#include <algorithm>
#include <vector>

#include "base/error_text.h"
#include "engine/validate_request.h"
#include "server/base/api_error.h"

namespace moeserve::server {

absl::Status CheckTask(const ModelSpec& spec, std::string_view task, std::string_view field) {
  const std::vector<std::string_view> names = TaskNames(spec);
  if (std::ranges::find(names, task) != names.end()) return absl::OkStatus();
  const bool of_vectors = task == "embed" || task == "token_embed" || task == "score";
  const bool pools = of_vectors && spec.head.kind == HeadKind::kMaskedLm;
  return MakeError(
      absl::StatusCode::kInvalidArgument, "unsupported_task",
      Concat("this model does not have the task ", task, "; its tasks are ", TasksOf(spec),
             pools ? "; with the option --pooling it makes vectors" : ""),
      field);
}

}  // namespace moeserve::server

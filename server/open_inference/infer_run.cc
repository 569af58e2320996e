#include "server/open_inference/infer_run.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/error_text.h"
#include "engine/validate_request.h"
#include "server/base/api_error.h"
#include "server/open_inference/generate_run.h"
#include "server/open_inference/texts_run.h"

namespace moeserve::server {

absl::Status CheckVersion(const ServedModel& model, const std::string& version) {
  if (version.empty() || version == std::to_string(model.version())) return absl::OkStatus();
  return MakeError(absl::StatusCode::kNotFound, "model_not_found",
                   Concat("version ", Printable(version, 32),
                          " of the model is not served; version ", model.version(), " is"),
                   "model_version");
}

absl::Status CheckOutputs(const InferRequest& request, std::span<const TensorDescription> known) {
  for (size_t i = 0; i < request.outputs.size(); ++i) {
    const std::string& name = request.outputs[i].name;
    if (std::ranges::find(known, name, &TensorDescription::name) == known.end()) {
      std::string names;
      for (size_t k = 0; k < known.size(); ++k) {
        const char* const join = k == 0 ? "" : k + 1 == known.size() ? " or " : ", ";
        names.append(join).append(known[k].name);
      }
      return InvalidValue("outputs",
                          Concat("'outputs': expected ", names, ", found ", Printable(name, 64)));
    }
    for (size_t j = 0; j < i; ++j) {
      if (request.outputs[j].name == name) {
        return InvalidValue("outputs", Concat("'outputs': ", name, " is named more than once"));
      }
    }
  }
  return absl::OkStatus();
}

std::vector<RequestedOutput> ChosenOutputs(const InferRequest& request,
                                           std::span<const TensorDescription> known) {
  if (!request.outputs.empty()) return request.outputs;
  std::vector<RequestedOutput> outputs;
  for (const TensorDescription& output : known) {
    outputs.push_back({std::string(output.name), request.binary_outputs});
  }
  return outputs;
}

Result<std::unique_ptr<InferRun>> InferRun::Prepare(ServerContext& server,
                                                    const InferRequest& request, Pieces pieces,
                                                    std::shared_ptr<const ApiKey> key,
                                                    std::shared_ptr<RequestRecord> record) {
  MOESERVE_ASSIGN_OR_RETURN(const auto model, server.ModelFor(request.model, key.get()));
  MOESERVE_RETURN_IF_ERROR(CheckVersion(*model, request.version));
  const auto prepare = InferKindOf(model->engine().spec()) == InferKind::kText
                           ? &GenerateRun::Prepare
                           : &TextsRun::Prepare;
  return prepare(server, model, request, pieces, std::move(key), std::move(record));
}

}  // namespace moeserve::server

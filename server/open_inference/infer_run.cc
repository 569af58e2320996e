#include "server/open_inference/infer_run.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "base/error_text.h"
#include "base/steady_clock.h"
#include "base/strict_json.h"
#include "server/base/api_error.h"
#include "server/completions/completion_request.h"
#include "server/open_inference/description.h"

namespace moeserve::server {
namespace {

bool IsOutput(std::string_view name) {
  return std::any_of(std::begin(kInferOutputs), std::end(kInferOutputs),
                     [&](const TensorDescription& output) { return output.name == name; });
}

absl::Status CheckOutputs(const InferRequest& request) {
  for (size_t i = 0; i < request.outputs.size(); ++i) {
    const std::string& name = request.outputs[i].name;
    if (!IsOutput(name)) {
      return InvalidValue("outputs", Concat("'outputs': expected text_output, finish_reason, "
                                            "num_input_tokens or num_output_tokens, found ",
                                            Printable(name, 64)));
    }
    for (size_t j = 0; j < i; ++j) {
      if (request.outputs[j].name == name) {
        return InvalidValue("outputs", Concat("'outputs': ", name, " is named more than once"));
      }
    }
  }
  return absl::OkStatus();
}

// Records and alternatives have no tensor; without this check they would be computed for nothing.
absl::Status CheckRepresentable(const CompletionParams& params) {
  if (params.logprobs || params.prompt_logprobs || params.return_token_ids ||
      params.routing.any_record()) {
    return InvalidValue("parameters",
                        "'parameters': log-probabilities, token ids and routes have no output "
                        "tensor; use POST /v1/completions");
  }
  if (params.stream && params.prompts.size() * static_cast<size_t>(params.n) != 1) {
    return InvalidValue("text_input", "'text_input': a streamed request has one prompt and n = 1");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckVersion(const ServedModel& model, const std::string& version) {
  if (version.empty() || version == std::to_string(model.version())) return absl::OkStatus();
  return MakeError(absl::StatusCode::kNotFound, "model_not_found",
                   Concat("version ", Printable(version, 32),
                          " of the model is not served; version ", model.version(), " is"),
                   "model_version");
}

Result<std::unique_ptr<InferRun>> InferRun::Prepare(ServerContext& server,
                                                    const InferRequest& request, Pieces pieces,
                                                    std::shared_ptr<const ApiKey> key,
                                                    std::shared_ptr<RequestRecord> record) {
  MOESERVE_ASSIGN_OR_RETURN(const auto model, server.ModelFor(request.model, key.get()));
  MOESERVE_RETURN_IF_ERROR(CheckVersion(*model, request.version));
  MOESERVE_RETURN_IF_ERROR(CheckOutputs(request));
  InferSettings settings;
  MOESERVE_ASSIGN_OR_RETURN(Json body, CompletionBody(request, pieces, settings));
  if (!request.model.empty()) body["model"] = request.model;
  const RequestRules rules = server.Rules(*model, key.get());
  Result<CompletionParams> params = ParseCompletion(body, rules);
  ClearJson(body);
  if (!params.ok()) return params.status();
  MOESERVE_RETURN_IF_ERROR(CheckRepresentable(*params));
  params->prompt_field = "text_input";
  server.metrics().ignored_fields += params->ignored_fields;
  const Engine& engine = model->engine();
  MOESERVE_ASSIGN_OR_RETURN(auto prompts, PreparePrompts(*params, PromptRulesOf(engine)));
  std::unique_ptr<InferRun> run(
      new InferRun(server.Submissions(model, std::move(key), std::move(record)), *std::move(params),
                   settings, request, *model));
  MOESERVE_RETURN_IF_ERROR(run->submission_.SetPrompts(std::move(prompts)));
  run->choices_.resize(run->submission_.num_choices());
  return run;
}

InferRun::InferRun(SubmissionContext context, CompletionParams params, InferSettings settings,
                   const InferRequest& request, const ServedModel& model)
    : submission_(std::move(context), std::move(params), "infer-"),
      settings_(settings),
      start_(SteadyNow()),
      version_(std::to_string(model.version())),
      request_id_(request.id),
      outputs_(request.outputs),
      charge_(submission_.memory()) {
  if (!outputs_.empty()) return;
  for (const TensorDescription& output : kInferOutputs) {
    outputs_.push_back({std::string(output.name), request.binary_outputs});
  }
}

absl::Status InferRun::Compile() {
  return submission_.NeedsCompiling() ? submission_.CompileConstraint() : absl::OkStatus();
}

absl::Status InferRun::Launch(absl::Time deadline, std::function<void()> wake) {
  if (settings_.timeout) deadline = std::min(deadline, start_ + *settings_.timeout);
  MOESERVE_ASSIGN_OR_RETURN(generation_, submission_.Start(deadline, std::move(wake)));
  return absl::OkStatus();
}

absl::Status InferRun::Add(const ChoiceEvent& event) {
  MOESERVE_RETURN_IF_ERROR(event.error);
  // What the prompt takes was charged when the request was admitted.
  MOESERVE_RETURN_IF_ERROR(charge_.Add(2 * event.delta.text.size(), ChargeFor::kRunningRequest));
  Choice& choice = choices_[event.choice];
  if (!choice.started) {
    choice.started = true;
    if (submission_.params().echo) choice.text = submission_.PromptOf(event.choice).echo_text;
  }
  choice.text += event.delta.text;
  choice.output_tokens = event.delta.usage.completion_tokens;
  if (event.delta.finished && !event.delta.absent) choice.finish_reason = event.delta.finish_reason;
  return absl::OkStatus();
}

Result<std::optional<InferAnswer>> InferRun::Take() {
  const std::vector<ChoiceEvent> events = generation_->Take();
  for (const ChoiceEvent& event : events) {
    if (const absl::Status status = Add(event); !status.ok()) {
      generation_->Cancel();
      return status;
    }
  }
  if (!generation_->finished() && (!settings_.stream || choices_.front().text.empty())) {
    return std::nullopt;
  }
  return Answer();
}

void InferRun::Cancel() {
  if (generation_ != nullptr) generation_->Cancel();
}

InferAnswer InferRun::Answer() {
  InferAnswer answer;
  answer.model = submission_.params().model;
  answer.version = version_;
  answer.id = request_id_;
  answer.streamed = settings_.stream;
  answer.last = generation_->finished();
  for (const RequestedOutput& output : outputs_) {
    InferTensor tensor;
    tensor.name = output.name;
    for (const TensorDescription& known : kInferOutputs) {
      if (known.name == output.name) tensor.datatype = known.datatype;
    }
    tensor.shape = {static_cast<int64_t>(choices_.size())};
    for (size_t i = 0; i < choices_.size(); ++i) {
      Choice& choice = choices_[i];
      if (output.name == "text_output") {
        tensor.data.emplace_back(std::exchange(choice.text, {}));
      } else if (output.name == "finish_reason") {
        tensor.data.emplace_back(!choice.finish_reason                          ? ""
                                 : *choice.finish_reason == FinishReason::kStop ? "stop"
                                                                                : "length");
      } else if (output.name == "num_input_tokens") {
        tensor.data.emplace_back(submission_.PromptOf(static_cast<int>(i)).tokens());
      } else {
        tensor.data.emplace_back(static_cast<uint64_t>(choice.output_tokens));
      }
    }
    answer.outputs.push_back(std::move(tensor));
    answer.binary.push_back(output.binary);
  }
  if (settings_.stream) charge_.Release();
  return answer;
}

}  // namespace moeserve::server

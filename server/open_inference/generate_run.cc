#include "server/open_inference/generate_run.h"

#include <algorithm>
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

Result<std::unique_ptr<InferRun>> GenerateRun::Prepare(ServerContext& server,
                                                       const std::shared_ptr<ServedModel>& model,
                                                       const InferRequest& request, Pieces pieces,
                                                       std::shared_ptr<const ApiKey> key,
                                                       std::shared_ptr<RequestRecord> record) {
  MOESERVE_RETURN_IF_ERROR(CheckOutputs(request, kInferOutputs));
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
  std::unique_ptr<GenerateRun> run(
      new GenerateRun(server.Submissions(model, std::move(key), std::move(record)),
                      *std::move(params), settings, request, *model));
  MOESERVE_RETURN_IF_ERROR(run->submission_.SetPrompts(std::move(prompts)));
  run->choices_.resize(run->submission_.num_choices());
  return std::unique_ptr<InferRun>(std::move(run));
}

GenerateRun::GenerateRun(SubmissionContext context, CompletionParams params, InferSettings settings,
                         const InferRequest& request, const ServedModel& model)
    : submission_(std::move(context), std::move(params), "infer-"),
      settings_(settings),
      start_(SteadyNow()),
      version_(std::to_string(model.version())),
      request_id_(request.id),
      outputs_(ChosenOutputs(request, kInferOutputs)),
      charge_(submission_.memory()) {}

absl::Status GenerateRun::Compile() {
  return submission_.NeedsCompiling() ? submission_.CompileConstraint() : absl::OkStatus();
}

absl::Status GenerateRun::Launch(absl::Time deadline, std::function<void()> wake) {
  if (settings_.timeout) deadline = std::min(deadline, start_ + *settings_.timeout);
  MOESERVE_ASSIGN_OR_RETURN(generation_, submission_.Start(deadline, std::move(wake)));
  return absl::OkStatus();
}

absl::Status GenerateRun::Add(const ChoiceEvent& event) {
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

Result<std::optional<InferAnswer>> GenerateRun::Take() {
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

void GenerateRun::Cancel() {
  if (generation_ != nullptr) generation_->Cancel();
}

InferAnswer GenerateRun::Answer() {
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

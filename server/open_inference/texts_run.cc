#include "server/open_inference/texts_run.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_replace.h"
#include "base/error_text.h"
#include "base/steady_clock.h"
#include "base/strict_json.h"
#include "server/base/api_error.h"
#include "server/encode/encode_fields.h"
#include "server/encode/encode_results.h"

namespace moeserve::server {
namespace {

// Returns the error with the name of the tensor instead of that of the field.
absl::Status WithTensorName(const absl::Status& error) {
  absl::Status out(error.code(),
                   absl::StrReplaceAll(error.message(), {{"'input'", "'text_input'"}}));
  error.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { out.SetPayload(url, payload); });
  return out;
}

}  // namespace

Result<std::unique_ptr<InferRun>> TextsRun::Prepare(ServerContext& server,
                                                    const std::shared_ptr<ServedModel>& model,
                                                    const InferRequest& request, Pieces pieces,
                                                    std::shared_ptr<const ApiKey> key,
                                                    std::shared_ptr<RequestRecord> record) {
  const ModelSpec& spec = model->engine().spec();
  const InferKind kind = InferKindOf(spec);
  MOESERVE_RETURN_IF_ERROR(CheckOutputs(request, TensorsOf(kind).outputs));
  MOESERVE_RETURN_IF_ERROR(CheckTask(
      spec, kind == InferKind::kLabels ? EncodeTask::kClassify : EncodeTask::kEmbed, "model"));
  InferSettings settings;
  MOESERVE_ASSIGN_OR_RETURN(Json body, TextsBody(request, pieces, settings));
  if (!request.model.empty()) body["model"] = request.model;
  const FieldRoute route =
      kind == InferKind::kLabels ? FieldRoute::kClassify : FieldRoute::kEmbeddings;
  Result<EncodeJob> job =
      ParseEncode(body, route, server.Rules(*model, key.get()), model->encode_model(), true);
  ClearJson(body);
  if (!job.ok()) return WithTensorName(job.status());
  job->input_field = "text_input";
  server.metrics().ignored_fields += static_cast<uint64_t>(job->ignored_fields);
  const RequestLimits& limits = server.settings().limits;
  MOESERVE_ASSIGN_OR_RETURN(auto texts,
                            PrepareTexts(*job, model->encode_model(), limits.max_prompt_bytes));
  MOESERVE_ASSIGN_OR_RETURN(
      auto run, EncodeRun::Prepare(server.Submissions(model, std::move(key), std::move(record)),
                                   model->encode_model(), *std::move(job), std::move(texts)));
  return std::unique_ptr<InferRun>(new TextsRun(std::move(run), settings.timeout, request, *model));
}

TextsRun::TextsRun(std::unique_ptr<EncodeRun> run, std::optional<absl::Duration> timeout,
                   const InferRequest& request, const ServedModel& model)
    : run_(std::move(run)),
      timeout_(timeout),
      start_(SteadyNow()),
      version_(std::to_string(model.version())),
      request_id_(request.id),
      kind_(InferKindOf(model.engine().spec())),
      outputs_(ChosenOutputs(request, TensorsOf(kind_).outputs)) {}

absl::Status TextsRun::Launch(absl::Time deadline, std::function<void()> wake) {
  if (timeout_) deadline = std::min(deadline, start_ + *timeout_);
  return run_->Start(deadline, std::move(wake));
}

Result<std::optional<InferAnswer>> TextsRun::Take() {
  const Result<bool> done = run_->Advance();
  if (!done.ok()) {
    run_->Cancel();
    return done.status();
  }
  if (!*done) return std::nullopt;
  for (EncodedText& text : run_->results()) {
    FinishValues(run_->job(), *run_->model().spec, text.result);
  }
  InferAnswer answer;
  answer.model = run_->job().model;
  answer.version = version_;
  answer.id = request_id_;
  for (const RequestedOutput& output : outputs_) {
    answer.outputs.push_back(Output(output.name));
    answer.binary.push_back(output.binary);
  }
  return answer;
}

InferTensor TextsRun::Output(const std::string& name) const {
  const auto known = TensorsOf(kind_).outputs;
  const auto found = std::ranges::find(known, name, &TensorDescription::name);
  const std::vector<EncodedText>& results = run_->results();
  InferTensor tensor;
  tensor.name = name;
  tensor.datatype = found->datatype;
  tensor.shape = {std::ssize(results)};
  for (size_t i = 0; i < results.size(); ++i) {
    const EncodeResult& result = results[i].result;
    if (IsMatrix(*found)) {
      tensor.data.insert(tensor.data.end(), result.values.begin(), result.values.end());
    } else if (name == "label") {
      tensor.data.emplace_back(BestLabel(*run_->model().spec, result));
    } else {
      tensor.data.emplace_back(static_cast<uint64_t>(run_->texts()[i].ids.size()));
    }
  }
  if (IsMatrix(*found)) {
    const size_t rows = std::max<size_t>(results.size(), 1);
    tensor.shape.push_back(static_cast<int64_t>(tensor.data.size() / rows));
  }
  return tensor;
}

}  // namespace moeserve::server

#include "server/generation/submission.h"

#include <chrono>
#include <limits>
#include <utility>

#include "base/error_text.h"
#include "server/base/request_id.h"
#include "server/generation/task_check.h"
#include "server/metrics/request_metrics.h"

namespace moeserve::server {
namespace {

// Returns the part of the response's id after the prefix.
std::string ResponseId(const GenerationParams& params, const RequestRecord* record) {
  if (!params.request_id.empty()) return params.request_id;
  return record != nullptr ? record->start().request_id : NewRequestId();
}

// Returns `id`, which a client has chosen, so that it differs from the same id of another key.
std::string OwnId(const ApiKey* key, const std::string& id) {
  return key == nullptr ? id : Concat("key ", key->usage()->serial, ' ', id);
}

}  // namespace

Submission::Submission(SubmissionContext context, GenerationParams params,
                       std::string_view id_prefix)
    : context_(std::move(context)),
      params_(std::move(params)),
      id_(Concat(id_prefix, ResponseId(params_, context_.record.get()))),
      engine_id_(params_.request_id.empty() ? NewRequestId() : OwnId(context_.key.get(), id_)) {
  // Every request passes here, so no request of one key can find the cached prefixes of another.
  if (context_.key != nullptr) params_.cache_salt = context_.key->CacheSalt(params_.cache_salt);
  if (context_.record != nullptr) {
    context_.record->Update([&](RequestFacts& facts) {
      facts.operation = id_prefix.starts_with("cmpl") ? "text_completion" : "chat";
      facts.model = params_.model;
      facts.response_id = id_;
    });
  }
}

absl::Status Submission::SetPrompts(std::vector<PreparedPrompt> prompts) {
  MOESERVE_RETURN_IF_ERROR(CheckGenerates(context_.engine->spec()));
  prompts_ = std::move(prompts);
  // No answer is longer than the context.
  const auto context = static_cast<size_t>(context_.engine->max_model_len());
  if (params_.prediction.size() > context) params_.prediction.resize(context);
  const ModelSpec& spec = context_.engine->spec();
  MOESERVE_RETURN_IF_ERROR(CheckRecordSize(params_, prompts_, spec, context_.limits.max_routes));
  // Now, because a request can wait for a long time until its constraint is compiled.
  charge_ = MemoryCharge(context_.memory);
  return charge_.Add(AdmissionBytes(params_, prompts_, spec));
}

bool Submission::NeedsCompiling() {
  if (!params_.constraint || params_.sampling.constraint != nullptr) return false;
  params_.sampling.constraint = context_.constraint_compiler->Find(*params_.constraint);
  return params_.sampling.constraint == nullptr;
}

absl::Status Submission::CompileConstraint() {
  if (!params_.constraint) return absl::OkStatus();
  MOESERVE_ASSIGN_OR_RETURN(params_.sampling.constraint,
                            context_.constraint_compiler->Compile(*params_.constraint));
  return absl::OkStatus();
}

Result<std::unique_ptr<Generation>> Submission::Start(absl::Time deadline,
                                                      std::function<void()> wake) const {
  GenerationOptions options;
  options.memory = context_.memory;
  options.samples = params_.n;
  // The part about the prompt comes with a choice's first token.
  options.keeps_partial = !params_.prompt_logprobs && !(params_.echo && params_.logprobs);
  // Only a stream can leave output unread: the server collects the output of a unary request as it
  // arrives.
  options.max_unread_bytes =
      params_.stream ? context_.limits.max_unread_bytes : std::numeric_limits<size_t>::max();
  options.wake = std::move(wake);
  options.metrics = context_.metrics;
  options.live = context_.live;
  options.macs = context_.macs;
  int64_t prompt_tokens = 0;
  int64_t max_generated = 0;
  const int sequences = params_.sampling.beam ? params_.sampling.beam->num_beams : params_.n;
  for (const PreparedPrompt& prompt : prompts_) {
    prompt_tokens += static_cast<int64_t>(prompt.tokens());
    max_generated += int64_t{prompt.max_tokens} * sequences;
  }
  if (context_.key != nullptr) {
    MOESERVE_ASSIGN_OR_RETURN(options.admission,
                              Admission::Admit(context_.key, prompt_tokens, max_generated,
                                               static_cast<int>(num_choices())));
  }
  if (context_.record != nullptr) {
    context_.record->Update([&](RequestFacts& facts) {
      facts.submitted = std::chrono::steady_clock::now();
      facts.prompt_tokens = prompt_tokens;
      facts.choices = static_cast<int>(num_choices());
      facts.max_tokens = prompts_.front().max_tokens;
    });
  }
  options.record = context_.record;
  auto generation = Generation::Start(context_.engine,
                                      MakeEngineRequests(params_, prompts_, engine_id_, deadline),
                                      std::move(options));
  if (generation.ok() && context_.metrics != nullptr) context_.metrics->CountRequest("generate");
  return generation;
}

}  // namespace moeserve::server

#include "server/rpc/service.h"

#include <string>
#include <vector>

#include "base/error_text.h"
#include "engine/validate_request.h"
#include "server/base/api_error.h"
#include "server/base/version.h"
#include "server/generation/generation_params.h"
#include "server/generation/token_memory.h"
#include "server/rpc/calls/encode_call.h"
#include "server/rpc/calls/generate_call.h"
#include "server/rpc/calls/score_call.h"
#include "server/rpc/messages/messages.h"

namespace moeserve::server::rpc {
namespace {

absl::Status NoTokenizer() { return InvalidValue("model", "this model has no tokenizer"); }

absl::Status Tokenize(ServerContext& server, const ApiKey* key, const v1::TokenizeRequest& request,
                      v1::TokenizeResponse& response, MemoryCharge& charge) {
  MOESERVE_ASSIGN_OR_RETURN(const auto model, server.ModelFor(request.model(), key));
  const Tokenizer* tokenizer = model->engine().tokenizer();
  if (tokenizer == nullptr) return NoTokenizer();
  if (request.text().size() > server.settings().limits.max_prompt_bytes) {
    return InvalidValue("text", "'text' is too long");
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<TokenId> ids,
                            tokenizer->Encode(request.text(), !request.has_add_special_tokens() ||
                                                                  request.add_special_tokens()));
  MOESERVE_RETURN_IF_ERROR(
      charge.Add(TokenListBytes(*tokenizer, ids, request.return_token_strs())));
  response.mutable_token_ids()->Add(ids.begin(), ids.end());
  response.set_max_model_len(static_cast<uint32_t>(model->engine().max_model_len()));
  if (request.return_token_strs()) {
    for (const TokenId id : ids) response.add_token_strs(std::string(tokenizer->TokenString(id)));
  }
  return absl::OkStatus();
}

absl::Status Detokenize(ServerContext& server, const ApiKey* key,
                        const v1::DetokenizeRequest& request, v1::DetokenizeResponse& response,
                        MemoryCharge& charge) {
  MOESERVE_ASSIGN_OR_RETURN(const auto model, server.ModelFor(request.model(), key));
  const Tokenizer* tokenizer = model->engine().tokenizer();
  if (tokenizer == nullptr) return NoTokenizer();
  const int vocab_size = model->engine().spec().vocab_size;
  for (const int32_t id : request.token_ids()) {
    if (id < 0 || id >= vocab_size) {
      return InvalidValue("token_ids", Concat("'token_ids': expected token ids from 0 to ",
                                              vocab_size - 1, ", found ", id));
    }
  }
  const std::vector<TokenId> ids(request.token_ids().begin(), request.token_ids().end());
  MOESERVE_RETURN_IF_ERROR(charge.Add(DecodedBytes(*tokenizer, ids)));
  MOESERVE_ASSIGN_OR_RETURN(*response.mutable_text(), tokenizer->Decode(ids, false));
  return absl::OkStatus();
}

absl::Status GetExpertStats(ServerContext& server, const ApiKey* key,
                            const v1::GetExpertStatsRequest& request,
                            v1::GetExpertStatsResponse& response) {
  if (server.settings().moe_metrics.mode == MoeMetricsMode::kOff) {
    return MakeError(absl::StatusCode::kNotFound, "not_found",
                     "expert statistics are switched off (--moe-metrics=off)");
  }
  MOESERVE_ASSIGN_OR_RETURN(const auto model, server.LoadedModelFor(request.model(), key));
  if (!(request.activation_threshold() >= 0.0)) {
    return InvalidValue("activation_threshold", "'activation_threshold' must not be negative");
  }
  StackExperts experts(model->engine());
  if (!request.stack().empty()) {
    MOESERVE_ASSIGN_OR_RETURN(experts, StackExperts::Named(model->engine(), request.stack()));
  }
  response.set_model(model->name());
  Fill(experts.Snapshot(), request.activation_threshold(), response);
  return absl::OkStatus();
}

absl::Status GetModelInfo(ServerContext& server, const ApiKey* key,
                          const v1::GetModelInfoRequest& request,
                          v1::GetModelInfoResponse& response) {
  MOESERVE_ASSIGN_OR_RETURN(const auto model, server.LoadedModelFor(request.model(), key));
  const ModelSpec& spec = model->engine().spec();
  for (const std::string& name : server.ModelsOf(key)) {
    const auto named = server.models().Find(name);
    if (named.ok() && (*named)->name() == model->name()) response.add_names(name);
  }
  response.set_max_model_len(static_cast<uint32_t>(model->engine().max_model_len()));
  response.set_vocab_size(static_cast<uint32_t>(spec.vocab_size));
  response.set_hidden_size(static_cast<uint32_t>(spec.hidden_size));
  response.set_num_layers(static_cast<uint32_t>(spec.num_layers()));
  response.set_routed_blocks(static_cast<uint32_t>(std::ranges::count_if(
      spec.blocks, [](const BlockSpec& b) { return b.routing() != nullptr; })));
  response.mutable_eos_token_ids()->Add(spec.eos_token_ids.begin(), spec.eos_token_ids.end());
  if (spec.bos_token_id) response.set_bos_token_id(*spec.bos_token_id);
  response.set_has_tokenizer(model->engine().tokenizer() != nullptr);
  response.set_server_version(std::string(kVersion));
  for (const std::string_view task : TaskNames(spec)) response.add_tasks(std::string(task));
  for (const std::string& label : spec.head.labels) response.add_labels(label);
  return absl::OkStatus();
}

}  // namespace

void AddInference(Router& router, ServerContext& server, Dispatcher& dispatcher) {
  router.Add(kGenerate, [&](grpc::GenericCallbackServerContext* context) {
    return GenerateCall::Start<GenerateCall>(context, server, dispatcher);
  });
  router.Add(kScore, [&](grpc::GenericCallbackServerContext* context) {
    return ScoreCall::Start<ScoreCall>(context, server, dispatcher);
  });
  router.Add(kEncode, [&](grpc::GenericCallbackServerContext* context) {
    return EncodeCall::Start<EncodeCall>(context, server, dispatcher);
  });
  router.AddCharged(kTokenize, Tokenize);
  router.AddCharged(kDetokenize, Detokenize);
  router.AddImmediate(kGetExpertStats, GetExpertStats);
  router.AddImmediate(kGetModelInfo, GetModelInfo);
}

}  // namespace moeserve::server::rpc

// Converts between protobuf messages and the types of the engine. All functions are pure.
#pragma once

#include <memory>
#include <vector>

#include "base/status.h"
#include "engine/request.h"
#include "engine/statistics/expert_stats.h"
#include "moeserve/v1/moeserve.pb.h"
#include "server/generation/generation_request.h"

namespace moeserve::server::rpc {

// Reads a Generate request. An error names the field.
Result<CompletionParams> ParseGenerate(const v1::GenerateRequest& request,
                                       const RequestRules& rules);
// Reads a Score request, which computes a prompt and generates nothing. An error names the field.
Result<CompletionParams> ParseScore(const v1::ScoreRequest& request, const RequestRules& rules);

// Reads a routing override; null if the message is empty. An error names the field.
Result<std::shared_ptr<const RoutingControl>> ParseControl(const v1::RoutingControl& in,
                                                           const RoutingRules& rules);

// Converts a log-probability. `tokenizer` may be null. Internal if a value is NaN.
absl::Status Fill(const TokenLogprob& from, const Tokenizer* tokenizer, v1::TokenLogprob& to);
// Converts the first token of a prompt, which has no log-probability.
void FillUnscored(TokenId token, const Tokenizer* tokenizer, v1::TokenLogprob& to);

// Converts `delta`, a piece of a choice's output. `prompt` is that of the choice.
absl::Status Fill(const OutputDelta& delta, const PreparedPrompt& prompt,
                  const Tokenizer* tokenizer, v1::GenerateResponse& to);

void FillUsage(const Usage& usage, v1::Usage& to);
void Fill(const RoutingRecord& record, const RouteLayout& layout, v1::RoutingRecord& to);
void Fill(const RoutingChange& change, v1::RoutingControl& to);

void Fill(const ExpertStats& stats, double threshold, v1::GetExpertStatsResponse& to);

}  // namespace moeserve::server::rpc

// Starts requests that generate tokens, for all endpoints that do.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/answers/answer_writer.h"
#include "server/context.h"
#include "server/generation/generation_request.h"
#include "server/http/error_response.h"
#include "server/http/types.h"

namespace moeserve::server::http {

// What distinguishes the endpoints.
struct AnswerFormat {
  std::string_view id_prefix = {};  // the start of the response's id, such as "cmpl-"
  // Makes the writer of the response. Called before Submit() returns. The tokenizer may be null.
  std::function<std::unique_ptr<AnswerWriter>(AnswerIdentity, const Tokenizer*, int choices)>
      make_writer = {};
  // Returns the body of the response that reports an error.
  ErrorBody* error_body = &ErrorJson;
};

// Submits a request to the engine of `model`. If its constraint must be compiled first, does so on
// the work pool.
Result<Handled> Submit(ServerContext& context, const Request& request,
                       const std::shared_ptr<ServedModel>& model, const GenerationParams& params,
                       std::vector<PreparedPrompt> prompts, const AnswerFormat& format);

// Runs `job` on the work pool. Counts the refusal if too many tasks wait.
Handled PrepareLater(ServerContext& context, const Request& request, std::function<Handled()> job);

// Returns what was started. If that is an error, counts the refusal and returns the response that
// reports it.
Handled StartedOrRefused(Result<Handled> started, const AnswerFormat& format, const ApiKey* key,
                         ServerContext& context);

}  // namespace moeserve::server::http

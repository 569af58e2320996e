// Load target: an OpenAI-compatible server. All work is done on the caller's thread, inside Wait()
// and the functions that block.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/bench/load_test/idle_streams.h"
#include "server/bench/load_test/load_target.h"

namespace moeserve::server {

struct BaseUrl {
  std::string host;  // without brackets
  int port = 80;
  std::string authority;  // as written, for the Host header
  std::string path;       // "/v1"; without a slash at the end, may be empty
};

// "http://127.0.0.1:8080/v1". InvalidArgument: another scheme, or anything malformed.
Result<BaseUrl> ParseBaseUrl(std::string_view text);

struct HttpTargetOptions {
  BaseUrl url;
  std::string served_model;  // empty: the first model of /models
  std::string api_key;       // empty: none is sent
  double timeout_seconds = 600.0;
  double connect_seconds = 10.0;
  // Asks for token ids too (an extension of some servers), so that every token is a piece.
  bool token_ids = false;
};

// Returns the body of a streaming completion request, which generates exactly `output_tokens` if
// the server supports ignore_eos.
std::string CompletionBody(const LoadRequest& request, const HttpTargetOptions& options);

class HttpTarget final : public LoadTarget {
 public:
  // Connects and, without a model name, requests the list of models. Blocks for at most the connect
  // timeout and about ten seconds. Unavailable: no answer; other errors: an unusable answer.
  static Result<std::unique_ptr<HttpTarget>> Create(HttpTargetOptions options);
  ~HttpTarget() override;

  double Now() override;
  void Start(const LoadRequest& request, double scheduled) override;
  std::vector<RequestResult> Wait(double until) override;
  void CancelAll() override;
  int64_t StrayAnswers() const override;
  Result<ServerCounters> Counters() override;  // blocks for at most ten seconds

  // Opens streams, each on its own connection with a small receive buffer, and returns when all
  // have begun or failed. Wait() and HoldIdleStreams() hold them; ReleaseIdleStreams reads them to
  // their ends, for at most `seconds`.
  void OpenIdleStreams(const IdleStreamOptions& options, const Workload& workload);
  void HoldIdleStreams(double seconds);
  IdleStreamReport ReleaseIdleStreams(double seconds);

 private:
  class Impl;
  explicit HttpTarget(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moeserve::server

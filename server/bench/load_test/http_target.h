// A load target that is an OpenAI-compatible HTTP server. All work is done on the caller's thread,
// inside Wait() and the functions that block.
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
  std::string host;  // an IPv6 address without brackets
  int port = 80;
  std::string authority;  // host and port as written, for the Host header
  std::string path;       // such as "/v1", without a slash at the end; may be empty
};

// Parses a URL such as "http://127.0.0.1:8080/v1". InvalidArgument for another scheme or malformed
// text.
Result<BaseUrl> ParseBaseUrl(std::string_view text);

struct HttpTargetOptions {
  BaseUrl url;
  std::string served_model;  // empty selects the first model of /models
  std::string api_key;       // empty sends no key
  double timeout_seconds = 600.0;
  double connect_seconds = 10.0;
  // Whether to request token ids, too (an extension of some servers). Every token is then one
  // output piece.
  bool token_ids = false;
};

// Returns the JSON body of a streaming completion request. The server generates exactly
// `output_tokens` tokens if it supports ignore_eos.
std::string CompletionBody(const LoadRequest& request, const HttpTargetOptions& options);

class HttpTarget final : public LoadTarget {
 public:
  // Connects to the server. If `options` has no model name, requests the list of models. Blocks for
  // at most the connect timeout and about ten seconds. Unavailable if there is no response; another
  // error if the response is unusable.
  static Result<std::unique_ptr<HttpTarget>> Create(HttpTargetOptions options);
  ~HttpTarget() override;

  double Now() override;
  void Start(const LoadRequest& request, double scheduled) override;
  std::vector<RequestResult> Wait(double until) override;
  void CancelAll() override;
  int64_t StrayAnswers() const override;
  Result<ServerCounters> Counters() override;  // blocks for at most ten seconds

  // OpenIdleStreams opens streams, each on its own connection with a small receive buffer, and
  // returns when all streams have begun or failed. The streams stay open during Wait() and
  // HoldIdleStreams(). ReleaseIdleStreams reads them to their ends, for at most `seconds`.
  void OpenIdleStreams(const IdleStreamOptions& options, const Workload& workload);
  void HoldIdleStreams(double seconds);
  IdleStreamReport ReleaseIdleStreams(double seconds);

 private:
  class Impl;
  explicit HttpTarget(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moeserve::server

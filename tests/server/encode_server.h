// An HTTP server with one of the small models in tests/golden/encoders, and a tokenizer of letters.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "kernels/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "nlohmann/json.hpp"
#include "server/context.h"
#include "server/http/routes/api.h"
#include "server/http/server.h"
#include "server/logging/logging.h"
#include "tests/server/raw_client.h"

namespace moeserve::server::testing {

// A letter is token 10 + its place in the alphabet. Every other character is skipped, but "<mask>"
// is token 4. A text is [2] letters [3], and a pair [2] letters [3] letters [3] with types 0 and 1.
class LetterTokenizer final : public Tokenizer {
 public:
  static constexpr TokenId kCls = 2, kSep = 3, kMask = 4, kLetterA = 10;

  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text, bool add_special_tokens,
                                              bool parse_special = true) const override;
  absl::StatusOr<std::vector<TokenId>> EncodeTrusted(std::string_view text,
                                                     std::span<const TextSpan> trusted,
                                                     bool add_special_tokens) const override;
  absl::StatusOr<EncodedTexts> EncodeTexts(std::string_view text,
                                           std::optional<std::string_view> pair,
                                           bool add_special_tokens,
                                           const TokenLimit& limit) const override;
  absl::StatusOr<std::string> Decode(std::span<const TokenId> ids,
                                     bool skip_special_tokens) const override;
  std::string TokenBytes(TokenId id) const override { return std::string(TokenString(id)); }
  std::string_view TokenString(TokenId id) const override;
  std::optional<TokenId> TokenToId(std::string_view token) const override;
  bool IsSpecial(TokenId id) const override { return id < kLetterA; }
  int vocab_size() const override { return 96; }
};

struct EncodeServerOptions {
  bool tokenizer = true;
  TextSettings settings = {};
  EngineOptions engine = {};
  ServerSettings server = {};
  std::optional<PoolingKind> pooling = std::nullopt;  // replaces the model's
  std::vector<std::string> labels = {};               // replace the model's
};

class EncodeServer : public ::testing::Test {
 protected:
  using Json = nlohmann::json;

  // Serves tests/golden/encoders/`model`.
  void Start(const std::string& model, EncodeServerOptions options = {});
  const ModelSpec& spec() const { return engine_->spec(); }
  int port() const { return server_->port(); }

  RawResponse Send(const std::string& path, const Json& body);
  // Sends a request that must succeed.
  Json Answer(const std::string& path, const Json& body);
  // Sends a request that must be refused with 400; returns the error's code and field.
  std::pair<std::string, std::string> Refusal(const std::string& path, const Json& body);
  std::string Metrics();

  std::unique_ptr<Backend> backend_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<ServerContext> context_;
  std::unique_ptr<http::Router> router_;
  std::unique_ptr<http::HttpServer> server_;
};

}  // namespace moeserve::server::testing

#include "tests/server/encode_server.h"

#include "base/error_text.h"
#include "tests/support/golden.h"

namespace moeserve::server::testing {
namespace {

constexpr std::string_view kMaskText = "<mask>";

// Appends the tokens of a text with their places.
void AppendLetters(std::string_view text, uint8_t which, EncodedTexts& out) {
  for (size_t i = 0; i < text.size(); ++i) {
    const bool mask = text.substr(i, kMaskText.size()) == kMaskText;
    const size_t size = mask ? kMaskText.size() : 1;
    if (!mask && (text[i] < 'a' || text[i] > 'z')) continue;
    out.ids.push_back(mask ? LetterTokenizer::kMask : LetterTokenizer::kLetterA + (text[i] - 'a'));
    out.types.push_back(which);
    out.special.push_back(0);
    out.texts.push_back(which);
    out.spans.push_back({i, i + size});
    i += size - 1;
  }
}

void AppendSpecial(TokenId id, uint8_t type, EncodedTexts& out) {
  out.ids.push_back(id);
  out.types.push_back(type);
  out.special.push_back(1);
  out.texts.push_back(0);
  out.spans.push_back({});
}

}  // namespace

absl::StatusOr<std::vector<TokenId>> LetterTokenizer::Encode(std::string_view text,
                                                             bool add_special_tokens, bool) const {
  auto encoded = EncodeTexts(text, std::nullopt, add_special_tokens, {});
  if (!encoded.ok()) return encoded.status();
  return std::move(encoded->ids);
}

absl::StatusOr<std::vector<TokenId>> LetterTokenizer::EncodeTrusted(std::string_view text,
                                                                    std::span<const TextSpan>,
                                                                    bool add_special_tokens) const {
  return Encode(text, add_special_tokens);
}

absl::StatusOr<EncodedTexts> LetterTokenizer::EncodeTexts(std::string_view text,
                                                          std::optional<std::string_view> pair,
                                                          bool add_special_tokens,
                                                          const TokenLimit& limit) const {
  // Letters at the end of the last text, or at the beginning of the first one, are cut off.
  std::string first(text);
  std::string second(pair.value_or(""));
  while (true) {
    EncodedTexts out;
    if (add_special_tokens) AppendSpecial(kCls, 0, out);
    AppendLetters(first, 0, out);
    if (add_special_tokens) AppendSpecial(kSep, 0, out);
    if (pair) AppendLetters(second, 1, out);
    if (pair && add_special_tokens) AppendSpecial(kSep, 1, out);
    if (out.ids.size() <= limit.most) return out;
    if (limit.cuts_begin) {
      first.erase(0, 1);
    } else {
      (second.empty() ? first : second).pop_back();
    }
  }
}

absl::StatusOr<std::string> LetterTokenizer::Decode(std::span<const TokenId> ids,
                                                    bool skip_special_tokens) const {
  std::string text;
  for (const TokenId id : ids) {
    if (!IsSpecial(id) || !skip_special_tokens) text += TokenString(id);
  }
  return text;
}

std::string_view LetterTokenizer::TokenString(TokenId id) const {
  static constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz";
  if (id == kCls) return "<cls>";
  if (id == kSep) return "<sep>";
  if (id == kMask) return kMaskText;
  if (id < kLetterA || id >= kLetterA + 26) return "?";
  return kLetters.substr(static_cast<size_t>(id - kLetterA), 1);
}

std::optional<TokenId> LetterTokenizer::TokenToId(std::string_view token) const {
  for (TokenId id = 0; id < kLetterA + 26; ++id) {
    if (TokenString(id) == token && token != "?") return id;
  }
  return std::nullopt;
}

void EncodeServer::Start(const std::string& model, EncodeServerOptions options) {
  SetUpLogging(LogFormat::kText, LogLevel::kOff);
  auto checkpoint =
      LoadCheckpoint(moeserve::testing::SourcePath(Concat("tests/golden/encoders/", model)),
                     {.require_tokenizer = false});
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ModelSpec spec = checkpoint->spec;
  if (options.pooling) {
    if (!spec.pooling) spec.pooling.emplace();
    spec.pooling->kind = *options.pooling;
  }
  if (!options.labels.empty()) spec.head.labels = options.labels;
  auto backend = CreateBackend({.device = "cpu", .threads = 1});
  ASSERT_TRUE(backend.ok()) << backend.status();
  backend_ = *std::move(backend);
  auto loaded = Model::Create(spec, {.compute = DType::kF32}, *checkpoint->weights, *backend_);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  std::shared_ptr<const Tokenizer> tokenizer;
  if (options.tokenizer) tokenizer = std::make_shared<LetterTokenizer>();
  options.engine.max_num_seqs = 8;
  options.engine.routing_records = true;
  options.engine.routing_control.enabled = true;
  auto engine = Engine::Create(options.engine, *std::move(loaded), tokenizer, {});
  ASSERT_TRUE(engine.ok()) << engine.status();
  engine_ = *std::move(engine);
  ServerSettings& settings = options.server;
  if (settings.served_names.empty()) settings.served_names = {"small"};
  settings.routing_records = true;
  const HttpLimits limits = settings.http;
  context_ = std::make_unique<ServerContext>(std::move(settings));
  router_ = http::MakeRouter(*context_);
  http::HttpServerOptions http;
  http.port = 0;
  http.limits = limits;
  auto server = http::HttpServer::Start(http, *router_, context_->metrics(), context_->memory());
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  context_->SetServing(engine_, {}, nullptr, {}, options.settings);
}

RawResponse EncodeServer::Send(const std::string& path, const Json& body) {
  RawClient client(port());
  client.Send(Post(path, body.dump()));
  return client.ReadResponse();
}

EncodeServer::Json EncodeServer::Answer(const std::string& path, const Json& body) {
  const RawResponse response = Send(path, body);
  EXPECT_EQ(response.status, 200) << path << ": " << response.body.substr(0, 500);
  Json answer = Json::parse(response.body, nullptr, false);
  EXPECT_TRUE(answer.is_object()) << response.body.substr(0, 500);
  return answer;
}

std::pair<std::string, std::string> EncodeServer::Refusal(const std::string& path,
                                                          const Json& body) {
  const RawResponse response = Send(path, body);
  EXPECT_EQ(response.status, 400) << path << ' ' << body.dump() << ": "
                                  << response.body.substr(0, 300);
  const Json error = Json::parse(response.body).value("error", Json::object());
  const auto text = [&](const char* name) {
    return error.contains(name) && error[name].is_string() ? error[name].get<std::string>() : "";
  };
  return {text("code"), text("param")};
}

std::string EncodeServer::Metrics() {
  RawClient client(port());
  client.Send(Get("/metrics"));
  return client.ReadResponse().body;
}

}  // namespace moeserve::server::testing

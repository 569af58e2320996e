#include "server/commands/chat/remote_chat.h"

#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <optional>
#include <utility>

#include "base/error_text.h"
#include "server/base/json.h"
#include "server/bench/load_test/http_target.h"
#include "server/bench/load_test/sse.h"
#include "server/keys/key_file.h"

namespace moeserve::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using boost::system::error_code;

constexpr std::chrono::milliseconds kCancelCheckInterval{50};
// Nothing arrives for so long: the server is gone. An answer may take long to begin.
constexpr std::chrono::seconds kSilence{600};
constexpr std::chrono::seconds kConnecting{10};
constexpr size_t kMaxAnswerBytes = size_t{64} << 20;
constexpr size_t kMaxErrorBytes = size_t{1} << 20;
constexpr size_t kMaxHeaderBytes = size_t{64} << 10;

// Parses JSON of the server; discarded if it is none. Answers are shallow.
Json ParseJson(std::string_view text) {
  constexpr int kMaxDepth = 32;
  bool deep = false;
  Json json = Json::parse(
      text,
      [&](int depth, Json::parse_event_t, Json&) {
        deep = deep || depth > kMaxDepth;
        return !deep;
      },
      /*allow_exceptions=*/false);
  return deep ? Json(Json::value_t::discarded) : json;
}

// Returns the text at a path of members and indices; null if there is none.
const std::string* TextAt(const Json& json, const char* pointer) {
  const Json::json_pointer at(pointer);
  if (json.is_discarded() || !json.contains(at)) return nullptr;
  return json.at(at).get_ptr<const std::string*>();
}

// One request on a connection of its own.
class Exchange {
 public:
  Exchange(const BaseUrl& url, const std::string& api_key, std::function<bool()> cancelled)
      : url_(url), api_key_(api_key), cancelled_(std::move(cancelled)), stream_(io_) {}

  // Sends a request and passes the body of the answer to `on_body`, piece by piece, if the answer
  // has status 200. Returns the server's error otherwise.
  absl::Status Run(http::verb verb, const std::string& path, const std::string& body,
                   const std::function<absl::Status(std::string_view)>& on_body) {
    MOESERVE_RETURN_IF_ERROR(Connect());
    http::request<http::string_body> request(verb, url_.path + path, 11);
    request.set(http::field::host, url_.authority);
    request.set(http::field::user_agent, "moeserve");
    request.set(http::field::connection, "close");
    if (!api_key_.empty()) request.set(http::field::authorization, "Bearer " + api_key_);
    if (!body.empty()) request.set(http::field::content_type, "application/json");
    request.body() = body;
    request.prepare_payload();
    stream_.expires_after(kSilence);
    MOESERVE_RETURN_IF_ERROR(Await([&](auto done) {
      http::async_write(stream_, request, [done](error_code error, size_t) { done(error); });
    }));
    return Read(on_body);
  }

 private:
  absl::Status Connect() {
    asio::ip::tcp::resolver resolver(io_);
    error_code error;
    const auto found = resolver.resolve(url_.host, std::to_string(url_.port), error);
    if (error) return Failed(error);
    stream_.expires_after(kConnecting);
    return Await([&](auto done) {
      stream_.async_connect(found,
                            [done](error_code e, const asio::ip::tcp::endpoint&) { done(e); });
    });
  }

  absl::Status Read(const std::function<absl::Status(std::string_view)>& on_body) {
    http::response_parser<http::string_body> parser;
    parser.eager(true);
    parser.body_limit(kMaxAnswerBytes);
    parser.header_limit(kMaxHeaderBytes);
    beast::flat_buffer buffer;
    std::string refusal;
    while (!parser.is_done()) {
      stream_.expires_after(kSilence);
      MOESERVE_RETURN_IF_ERROR(Await([&](auto done) {
        http::async_read_some(stream_, buffer, parser,
                              [done](error_code error, size_t) { done(error); });
      }));
      // The parser appends what arrives next.
      const std::string piece = std::exchange(parser.get().body(), std::string());
      if (parser.is_header_done() && parser.get().result_int() == 200) {
        MOESERVE_RETURN_IF_ERROR(on_body(piece));
      } else if (refusal.size() < kMaxErrorBytes) {
        refusal += piece;
      }
    }
    if (parser.get().result_int() == 200) return absl::OkStatus();
    const Json json = ParseJson(refusal);
    const std::string* message = TextAt(json, "/error/message");
    if (message == nullptr) message = TextAt(json, "/message");
    return absl::UnavailableError(
        Concat("the server answered ", parser.get().result_int(),
               message != nullptr ? Concat(": ", Printable(*message, 1000)) : std::string()));
  }

  // Starts an operation and waits for its end, or until the user cancels it.
  template <typename Start>
  absl::Status Await(Start start) {
    std::optional<error_code> result;
    start([&result](error_code error) { result = error; });
    bool ended = false;
    while (!result) {
      io_.restart();
      io_.run_for(kCancelCheckInterval);
      if (!result && !ended && cancelled_()) {
        ended = true;
        stream_.cancel();
      }
    }
    if (ended) return absl::CancelledError("interrupted");
    return *result ? Failed(*result) : absl::OkStatus();
  }

  absl::Status Failed(const error_code& error) const {
    return absl::UnavailableError(Concat(url_.authority, ": ", error.message()));
  }

  const BaseUrl& url_;
  const std::string& api_key_;
  const std::function<bool()> cancelled_;
  asio::io_context io_;
  beast::tcp_stream stream_;
};

class RemoteChat final : public ChatModel {
 public:
  RemoteChat(RemoteChatOptions options, BaseUrl url, std::string api_key)
      : options_(std::move(options)), url_(std::move(url)), api_key_(std::move(api_key)) {}

  // Sets the name of the model, if it has none.
  absl::Status FindModel() {
    if (!options_.model.empty()) return absl::OkStatus();
    std::string body;
    MOESERVE_RETURN_IF_ERROR(Exchange(url_, api_key_, [] {
                               return false;
                             }).Run(http::verb::get, "/models", "", [&](std::string_view piece) {
      body += piece;
      return absl::OkStatus();
    }));
    const Json json = ParseJson(body);
    const std::string* name = TextAt(json, "/data/0/id");
    if (name == nullptr) return absl::UnavailableError("the server lists no model");
    options_.model = *name;
    return absl::OkStatus();
  }

  absl::Status Answer(const ChatTurn& turn, const std::function<void(std::string_view)>& on_text,
                      const std::function<bool()>& cancelled) override {
    const bool chat = !turn.messages.empty();
    SseReader events;
    absl::Status event_status;
    bool ended = false;
    MOESERVE_RETURN_IF_ERROR(
        Exchange(url_, api_key_, cancelled)
            .Run(http::verb::post, chat ? "/chat/completions" : "/completions", Body(turn),
                 [&](std::string_view piece) {
                   const bool good = events.Feed(piece, [&](std::string_view data) {
                     if (data == "[DONE]") {
                       ended = true;
                     } else if (event_status.ok()) {
                       event_status = TakeEvent(data, chat, on_text);
                     }
                   });
                   return good ? event_status : absl::DataLossError("the stream is malformed");
                 }));
    return ended ? absl::OkStatus() : absl::DataLossError("the stream of the answer was cut");
  }

  Result<std::string> Experts() override {
    return absl::UnimplementedError(
        "a server counts the experts of all requests together: see its page, or /v1/experts/stats");
  }

 private:
  std::string Body(const ChatTurn& turn) const {
    OrderedJson body;
    body["model"] = options_.model;
    if (turn.messages.empty()) {
      body["prompt"] = turn.text;
    } else {
      for (const ChatMessage& message : turn.messages) {
        body["messages"].push_back({{"role", message.role}, {"content", message.content}});
      }
    }
    body["max_tokens"] = options_.max_tokens;
    for (const auto& [name, value] : turn.settings) {
      // Whole numbers without a fraction, because servers require that of some fields.
      const auto whole = static_cast<int64_t>(value);
      if (static_cast<double>(whole) == value) {
        body[name] = whole;
      } else {
        body[name] = value;
      }
    }
    body["stream"] = true;
    return body.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
  }

  static absl::Status TakeEvent(std::string_view data, bool chat,
                                const std::function<void(std::string_view)>& on_text) {
    const Json event = ParseJson(data);
    if (event.is_discarded()) return absl::DataLossError("an event of the stream is no JSON");
    if (const std::string* error = TextAt(event, "/error/message")) {
      return absl::UnavailableError(Printable(*error, 1000));
    }
    const std::string* const text =
        TextAt(event, chat ? "/choices/0/delta/content" : "/choices/0/text");
    if (text != nullptr && !text->empty()) on_text(*text);
    return absl::OkStatus();
  }

  RemoteChatOptions options_;
  const BaseUrl url_;
  const std::string api_key_;
};

}  // namespace

Result<std::unique_ptr<ChatModel>> ConnectRemoteChat(const RemoteChatOptions& options) {
  auto url = ParseBaseUrl(options.url);
  if (!url.ok()) return Prefixed("--url: ", url.status());
  std::string api_key;
  if (!options.api_key_file.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(api_key, ReadFirstKey(options.api_key_file));
  }
  auto chat = std::make_unique<RemoteChat>(options, *std::move(url), std::move(api_key));
  if (absl::Status found = chat->FindModel(); !found.ok()) return Prefixed("--url: ", found);
  return chat;
}

}  // namespace moeserve::server

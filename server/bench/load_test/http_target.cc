#include "server/bench/load_test/http_target.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <cerrno>
#include <chrono>
#include <exception>
#include <unordered_set>
#include <utility>

#include "base/error_text.h"
#include "server/base/await.h"
#include "server/base/json.h"
#include "server/bench/load_test/http_call.h"

namespace moeserve::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
using asio::ip::tcp;
using boost::system::error_code;
using load::Answer;
using load::AnswerParser;
using load::Call;
using load::Connection;
using load::kNever;
using Clock = std::chrono::steady_clock;

constexpr double kQuerySeconds = 10.0;
constexpr auto kSweepInterval = std::chrono::milliseconds(50);
constexpr size_t kReadBytes = 16 << 10;
constexpr int kIdleReceiveBuffer = 4 << 10;

struct IdleStream {
  explicit IdleStream(asio::io_context& io) : timer(io) {}
  std::shared_ptr<Call> call;
  asio::steady_timer timer;
  bool decided = false;  // whether opening has succeeded or failed
  bool opened = false;
  bool ended = false;  // whether the coroutine has ended
  bool completed = false;
  std::string error;  // why the stream was not opened or not completed
};

std::string ErrorOf(const error_code& error) {
  if (error == asio::error::eof) return "connection closed";
  if (error == asio::error::connection_reset || error == asio::error::broken_pipe) {
    return "connection reset";
  }
  return error.message();
}

// Raises the soft limit of file descriptors, which is too low for thousands of connections.
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

class HttpTarget::Impl {
 public:
  explicit Impl(HttpTargetOptions options)
      : options_(std::move(options)), sweep_timer_(io_), wake_timer_(io_) {
    RaiseDescriptorLimit();
    Spawn(Sweep(), nullptr);
  }

  ~Impl() {
    stopping_ = true;
    sweep_timer_.cancel();
    for (const auto& stream : idle_streams_) stream->timer.cancel();
    CancelAll();
    // The coroutines end now, because CancelAll() closed their sockets.
    io_.run_for(std::chrono::seconds(5));
  }

  absl::Status Open() {
    error_code error;
    tcp::resolver resolver(io_);
    const auto found =
        resolver.resolve(options_.url.host, std::to_string(options_.url.port), error);
    if (error) {
      return absl::UnavailableError(
          Concat("cannot resolve ", Quoted(options_.url.host), ": ", error.message()));
    }
    std::string reason = "no address";
    for (const auto& entry : found) {
      endpoint_ = entry.endpoint();
      auto call = std::make_shared<Call>();
      call->request = Concat(Head("GET", Concat(options_.url.path, "/models")), "\r\n");
      RunToEnd(call);
      // Any response shows that a server is running, even a response without a list of models.
      if (call->answer.status != 0) return NameModel(*call);
      reason = call->timed_out ? "timeout" : call->failure;
    }
    return absl::UnavailableError(Concat("no answer from http://", options_.url.authority,
                                         options_.url.path, "/models: ", reason));
  }

  double Now() const { return std::chrono::duration<double>(Clock::now() - epoch_).count(); }

  void Start(const LoadRequest& request, double scheduled) {
    auto call = std::make_shared<Call>();
    call->request = Post(CompletionBody(request, options_));
    call->result.index = request.index;
    call->result.start = scheduled;
    call->result.prompt_tokens = static_cast<int64_t>(request.prompt.size());
    active_.insert(call.get());
    Spawn(Complete(call), call);
  }

  std::vector<RequestResult> Wait(double until) {
    RunUntil(until, [this] { return !results_.empty(); });
    // Handle other events that are ready, too, but only a limited number: the caller has requests
    // to start.
    for (int i = 0; i < 64 && io_.poll_one() > 0; ++i) {
    }
    return std::exchange(results_, {});
  }

  void CancelAll() {
    for (Call* call : active_) {
      if (call->held && !stopping_) continue;
      call->cut_off = true;
      call->Break();
    }
  }

  int64_t StrayAnswers() {
    std::erase_if(idle_, [this](const auto& connection) { return !Quiet(*connection); });
    return strays_;
  }

  Result<ServerCounters> Counters() {
    auto call = std::make_shared<Call>();
    call->request = Concat(Head("GET", "/metrics"), "\r\n");
    RunToEnd(call);
    if (!call->failure.empty() || call->answer.status != 200) {
      return absl::UnavailableError("the server has no /metrics");
    }
    return ParseServerCounters(call->answer.body);
  }

  void OpenIdleStreams(const IdleStreamOptions& options, const Workload& workload) {
    idle_options_ = options;
    releasing_ = false;
    const double deadline = Now() + options.open_seconds;
    for (int i = 0; i < options.count; ++i) {
      LoadRequest request = workload.Make(std::numeric_limits<int32_t>::min() - int64_t{i});
      request.output_tokens = options.output_tokens;
      auto stream = std::make_shared<IdleStream>(io_);
      stream->call = std::make_shared<Call>();
      stream->call->request = Post(CompletionBody(request, options_));
      stream->call->deadline = deadline;
      stream->call->held = true;
      idle_streams_.push_back(stream);
      Spawn(Hold(stream), nullptr);
    }
    RunUntil(deadline + 1.0, [this] {
      return std::all_of(idle_streams_.begin(), idle_streams_.end(),
                         [](const auto& stream) { return stream->decided; });
    });
  }

  void Hold(double seconds) {
    RunUntil(Now() + seconds, [] { return false; });
  }

  IdleStreamReport ReleaseIdleStreams(double seconds) {
    IdleStreamReport report;
    report.wanted = static_cast<int>(idle_streams_.size());
    releasing_ = true;
    const double deadline = Now() + seconds;
    for (const auto& stream : idle_streams_) {
      if (!stream->opened) {
        ++report.not_opened[stream->error.empty() ? "timeout" : stream->error];
        continue;
      }
      ++report.opened;
      if (stream->ended) {
        ++(stream->completed ? report.ended_early : report.lost);
      } else if (Established(*stream->call)) {
        ++report.alive;
      } else {
        ++report.lost;
      }
      stream->call->deadline = deadline;
      stream->timer.cancel();
    }
    RunUntil(deadline + 1.0, [this] {
      return std::all_of(idle_streams_.begin(), idle_streams_.end(),
                         [](const auto& stream) { return stream->ended; });
    });
    for (const auto& stream : idle_streams_) {
      if (!stream->opened) continue;
      if (stream->completed) {
        ++report.completed;
      } else {
        ++report.incomplete[stream->error.empty() ? "timeout" : stream->error];
      }
    }
    idle_streams_.clear();
    return report;
  }

 private:
  std::string Head(std::string_view method, const std::string& path) const {
    std::string head = Concat(method, ' ', path, " HTTP/1.1\r\nHost: ", options_.url.authority,
                              "\r\nUser-Agent: moeserve-bench\r\n");
    if (!options_.api_key.empty())
      head += Concat("Authorization: Bearer ", options_.api_key, "\r\n");
    return head;
  }

  std::string Post(const std::string& body) const {
    return Concat(Head("POST", options_.url.path + "/completions"),
                  "Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: ",
                  body.size(), "\r\n\r\n", body);
  }

  // NotFound if the server lists models, and none has the given name. A server that shows no list
  // may know the name.
  absl::Status CheckNamedModel(const Answer& answer) const {
    if (answer.status != 200) return absl::OkStatus();
    const auto json = Json::parse(answer.body, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("data") || !json["data"].is_array()) {
      return absl::OkStatus();
    }
    constexpr size_t kMostNames = 16;
    std::string names;
    size_t count = 0;
    for (const auto& model : json["data"]) {
      if (!model.is_object() || !model.contains("id") || !model["id"].is_string()) continue;
      const std::string& id = model["id"].get_ref<const std::string&>();
      if (id == options_.served_model) return absl::OkStatus();
      if (++count <= kMostNames) names += Concat(count > 1 ? ", " : "", Printable(id, 64));
    }
    if (count == 0) return absl::OkStatus();
    return absl::NotFoundError(Concat("--served-model: http://", options_.url.authority, " lists ",
                                      names, count > kMostNames ? ", ..." : "", "; found ",
                                      Quoted(options_.served_model, 64)));
  }

  absl::Status NameModel(const Call& call) {
    const Answer& answer = call.answer;
    if (!options_.served_model.empty()) return CheckNamedModel(answer);
    const std::string where =
        Concat("http://", options_.url.authority, options_.url.path, "/models");
    if (answer.status != 200) {
      std::string advice = "; name the model and the key";
      if (answer.status == 404 && !options_.url.path.ends_with("/v1")) {
        advice = Concat("; is the base URL http://", options_.url.authority, options_.url.path,
                        "/v1 meant? If not, name the model");
      }
      return absl::UnavailableError(
          Concat(where, " answered ", answer.status, ' ', ErrorCode(answer.body), advice));
    }
    const auto json = Json::parse(answer.body, nullptr, /*allow_exceptions=*/false);
    const auto pointer = Json::json_pointer("/data/0/id");
    if (json.is_object() && json.contains(pointer) && json[pointer].is_string()) {
      options_.served_model = json[pointer].get<std::string>();
      return absl::OkStatus();
    }
    return absl::UnavailableError(
        Concat(where, " names no model; is the base URL right? It usually ends in /v1"));
  }

  // Runs a coroutine. If the coroutine throws, for example bad_alloc, the exception becomes the
  // failure of `call`, which may be null.
  void Spawn(asio::awaitable<void> coroutine, std::shared_ptr<Call> call) {
    asio::co_spawn(io_, std::move(coroutine), [this, call](std::exception_ptr error) {
      if (!error || !call) return;
      active_.erase(call.get());
      call->result.error = "failure in the client";
      call->result.end = Now();
      results_.push_back(std::move(call->result));
    });
  }

  template <typename Condition>
  void RunUntil(double until, const Condition& reached) {
    const double seconds = std::min(until, Now() + 3600.0);
    // A timer ends the wait, because run_one_until would round the time to milliseconds.
    const auto expired = std::make_shared<bool>(seconds <= Now());
    wake_timer_.expires_at(epoch_ + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(seconds)));
    wake_timer_.async_wait([expired](error_code error) { *expired = !error; });
    while (!reached() && !*expired) io_.run_one();
    wake_timer_.cancel();
  }

  // Performs one short request; blocks until it has ended.
  void RunToEnd(const std::shared_ptr<Call>& call) {
    bool ended = false;
    asio::co_spawn(io_, Perform(call, kQuerySeconds),
                   [&ended](std::exception_ptr) { ended = true; });
    RunUntil(Now() + options_.connect_seconds + kQuerySeconds + 1.0, [&ended] { return ended; });
    if (ended) return;
    // Wait until the coroutine has ended in any case, because it refers to local variables of this
    // function.
    call->Break();
    RunUntil(Now() + 3600.0, [&ended] { return ended; });
  }

  // Ends calls whose deadline has passed. Checking all calls regularly is cheaper than one timer
  // per read.
  asio::awaitable<void> Sweep() {
    while (!stopping_) {
      sweep_timer_.expires_after(kSweepInterval);
      co_await sweep_timer_.async_wait(kAwait);
      const double now = Now();
      for (Call* call : active_) {
        if (now < call->deadline || call->timed_out) continue;
        call->timed_out = true;
        call->Break();
      }
    }
  }

  // Returns whether an idle connection has received neither bytes nor the end of the connection.
  bool Quiet(Connection& connection) {
    char byte;
    const ssize_t count =
        recv(connection.socket.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (count > 0) ++strays_;
    return count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  }

  std::unique_ptr<Connection> TakeIdle() {
    while (!idle_.empty()) {
      auto connection = std::move(idle_.back());
      idle_.pop_back();
      if (Quiet(*connection)) return connection;
    }
    return nullptr;
  }

  // Connects if the call has no connection. Returns false if the call has failed.
  asio::awaitable<bool> Connect(Call& call, int receive_buffer) {
    if (call.connection) co_return true;
    if (stopping_ || call.cut_off || call.timed_out) {
      call.failure = "not sent";
      co_return false;
    }
    call.connection = std::make_unique<Connection>(io_);
    tcp::socket& socket = call.connection->socket;
    error_code error;
    socket.open(endpoint_.protocol(), error);
    if (!error && receive_buffer > 0) {
      socket.set_option(asio::socket_base::receive_buffer_size(receive_buffer), error);
    }
    if (!error) {
      const auto [connect_error] = co_await socket.async_connect(endpoint_, kAwait);
      error = connect_error;
    }
    if (error) {
      call.failure = Concat("connect: ", error.message());
      co_return false;
    }
    socket.set_option(tcp::no_delay(true), error);
    co_return true;
  }

  asio::awaitable<void> Send(Call& call) {
    const auto [error, count] =
        co_await asio::async_write(call.connection->socket, asio::buffer(call.request), kAwait);
    // The server may have responded with an error before it read the whole request: prefer its
    // response to this write error.
    if (error) call.failure = ErrorOf(error);
  }

  // Reads at most `limit` bytes and parses them. Returns false when the response has ended or
  // failed.
  asio::awaitable<bool> ReadSome(Call& call, AnswerParser& parser, size_t limit) {
    beast::flat_buffer& buffer = call.connection->buffer;
    const auto [error, count] =
        co_await call.connection->socket.async_read_some(buffer.prepare(limit), kAwait);
    buffer.commit(count);
    if (error == asio::error::eof) {
      call.failure.clear();
      parser.ParseEnd();
      co_return false;
    }
    if (error) {
      if (call.failure.empty()) call.failure = ErrorOf(error);
      co_return false;
    }
    call.failure.clear();
    parser.Parse(Now());
    co_return !parser.done() && call.failure.empty();
  }

  // Runs one request to the end of its response. Keeps a reusable connection for the next call.
  asio::awaitable<void> Perform(std::shared_ptr<Call> call, double seconds) {
    const double begin = Now();
    active_.insert(call.get());
    call->connection = TakeIdle();
    call->deadline = begin + (call->connection ? seconds : options_.connect_seconds);
    const bool connected = co_await Connect(*call, 0);
    call->deadline = begin + seconds;
    if (connected) {
      co_await Send(*call);
      AnswerParser parser(*call);
      bool more = true;
      while (more) {
        more = co_await ReadSome(*call, parser, kReadBytes);
      }
      if (call->failure.empty() && parser.keep_alive() && !call->surplus && !stopping_ &&
          call->connection->socket.is_open()) {
        idle_.push_back(std::move(call->connection));
      }
    }
    active_.erase(call.get());
  }

  asio::awaitable<void> Complete(std::shared_ptr<Call> call) {
    co_await Perform(call, options_.timeout_seconds);
    call->result.end = Now();
    Judge(*call);
    results_.push_back(std::move(call->result));
  }

  asio::awaitable<void> Hold(std::shared_ptr<IdleStream> stream) {
    Call& call = *stream->call;
    active_.insert(&call);
    AnswerParser parser(call);
    bool more = co_await Connect(call, kIdleReceiveBuffer);
    if (more) {
      co_await Send(call);
    }
    while (more && !(call.answer.status == 200 && call.answer.event_stream)) {
      more = co_await ReadSome(call, parser, 512);
    }
    stream->opened = call.answer.status == 200 && call.answer.event_stream;
    stream->decided = true;
    if (stream->opened) call.deadline = kNever;
    while (more && !releasing_ && !stopping_) {
      const int limit = idle_options_.read_bytes_per_second;
      stream->timer.expires_after(std::chrono::seconds(limit > 0 ? 1 : 3600));
      co_await stream->timer.async_wait(kAwait);
      if (limit > 0 && !releasing_ && !stopping_) {
        more = co_await ReadSome(call, parser, static_cast<size_t>(limit));
      }
    }
    while (more) {
      more = co_await ReadSome(call, parser, kReadBytes);
    }
    Judge(call);
    stream->error = call.result.error;
    stream->completed = stream->opened && stream->error.empty();
    stream->ended = true;
    active_.erase(&call);
    call.Break();
  }

  static bool Established(Call& call) {
    if (!call.connection || !call.connection->socket.is_open()) return false;
    tcp_info info{};
    socklen_t size = sizeof(info);
    const int fd = call.connection->socket.native_handle();
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
           info.tcpi_state == TCP_ESTABLISHED;
  }

  HttpTargetOptions options_;
  const Clock::time_point epoch_ = Clock::now();
  asio::io_context io_{1};  // declared first, to outlive the sockets and timers
  asio::steady_timer sweep_timer_;
  asio::steady_timer wake_timer_;
  tcp::endpoint endpoint_;
  bool stopping_ = false;
  int64_t strays_ = 0;
  std::vector<RequestResult> results_;
  std::vector<std::unique_ptr<Connection>> idle_;  // reusable, between requests
  std::unordered_set<Call*> active_;               // each owned by its coroutine

  IdleStreamOptions idle_options_;
  bool releasing_ = false;
  std::vector<std::shared_ptr<IdleStream>> idle_streams_;
};

HttpTarget::HttpTarget(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpTarget::~HttpTarget() = default;

Result<std::unique_ptr<HttpTarget>> HttpTarget::Create(HttpTargetOptions options) {
  for (const char c : options.api_key) {
    if (c <= ' ' || c >= 0x7f) {
      return absl::InvalidArgumentError("the API key must be printable ASCII without spaces");
    }
  }
  auto impl = std::make_unique<Impl>(std::move(options));
  MOESERVE_RETURN_IF_ERROR(impl->Open());
  return std::unique_ptr<HttpTarget>(new HttpTarget(std::move(impl)));
}

double HttpTarget::Now() { return impl_->Now(); }
void HttpTarget::Start(const LoadRequest& request, double scheduled) {
  impl_->Start(request, scheduled);
}
std::vector<RequestResult> HttpTarget::Wait(double until) { return impl_->Wait(until); }
void HttpTarget::CancelAll() { impl_->CancelAll(); }
int64_t HttpTarget::StrayAnswers() const { return impl_->StrayAnswers(); }
Result<ServerCounters> HttpTarget::Counters() { return impl_->Counters(); }
void HttpTarget::OpenIdleStreams(const IdleStreamOptions& options, const Workload& workload) {
  impl_->OpenIdleStreams(options, workload);
}
void HttpTarget::HoldIdleStreams(double seconds) { impl_->Hold(seconds); }
IdleStreamReport HttpTarget::ReleaseIdleStreams(double seconds) {
  return impl_->ReleaseIdleStreams(seconds);
}

}  // namespace moeserve::server

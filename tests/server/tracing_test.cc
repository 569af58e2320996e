// Trace contexts, spans and their export to a collector.
#include <gtest/gtest.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/read_until.hpp>
#include <boost/asio/streambuf.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "nlohmann/json.hpp"
#include "server/tracing/request_observer.h"
#include "server/tracing/span_exporter.h"
#include "server/tracing/trace_context.h"

namespace moeserve::server {
namespace {

using std::chrono::milliseconds;
using Json = nlohmann::json;

constexpr char kParent[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

TEST(TraceState, KeepsWhatIsWellFormed) {
  EXPECT_EQ(ParseTraceState(""), "");
  EXPECT_EQ(ParseTraceState("a=1"), "a=1");
  EXPECT_EQ(ParseTraceState(" a=1 ,\tb@c=x y:z/, ,"), "a=1,b@c=x y:z/");
  EXPECT_EQ(ParseTraceState("0a_-*/=~"), "0a_-*/=~");
  std::string most;
  for (int i = 0; i < 32; ++i) most += "k" + std::to_string(i) + "=v,";
  EXPECT_TRUE(ParseTraceState(most));
  for (const std::string& bad :
       {std::string("a"), std::string("=1"), std::string("a="), std::string("A=1"),
        std::string("a=1=2"), std::string("a@=1"), std::string("@a=1"), std::string("a=\x01"),
        std::string("a=\xc3\xa9"), most + "last=1", "a=" + std::string(257, 'x'),
        std::string(257, 'x') + "=1",
        "a=" + std::string(250, 'x') + ",b=" + std::string(256, 'x') + ",c=1"}) {
    EXPECT_EQ(ParseTraceState(bad), std::nullopt) << bad;
  }
}

TEST(TraceContext, HeaderNamesTheSpan) {
  const TraceContext trace = StartSpan(ParseTraceParent(kParent), 0.0);
  EXPECT_EQ(TraceParentHeader(trace),
            "00-0af7651916cd43dd8448eb211c80319c-" + trace.span_id + "-01");
  EXPECT_TRUE(ParseTraceParent(TraceParentHeader(trace)));
  EXPECT_TRUE(TraceParentHeader(StartSpan(std::nullopt, 0.0)).ends_with("-00"));
}

// An HTTP server that keeps the requests it gets and gives each the next of its answers.
class Collector {
 public:
  struct Received {
    std::string head;
    std::string body;
  };

  // An empty answer closes the connection without one. The last answer is repeated.
  explicit Collector(std::vector<std::string> answers)
      : acceptor_(io_, {boost::asio::ip::make_address("127.0.0.1"), 0}),
        answers_(std::move(answers)),
        thread_([this] { Run(); }) {}

  ~Collector() {
    // A connection ends the blocking accept().
    stop_ = true;
    boost::asio::ip::tcp::socket socket(io_);
    boost::system::error_code ignored;
    socket.connect(acceptor_.local_endpoint(), ignored);
    thread_.join();
  }

  OtlpEndpoint endpoint() const {
    return {.host = "127.0.0.1", .port = acceptor_.local_endpoint().port()};
  }

  std::vector<Received> WaitFor(size_t count) {
    MutexLock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(10), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return received_.size() >= count;
    });
    return received_;
  }

 private:
  void Run() {
    while (true) {
      boost::system::error_code error;
      boost::asio::ip::tcp::socket socket(io_);
      acceptor_.accept(socket, error);
      if (stop_) return;
      boost::asio::streambuf buffer;
      const size_t head = boost::asio::read_until(socket, buffer, "\r\n\r\n", error);
      if (error) continue;
      const char* const data = static_cast<const char*>(buffer.data().data());
      Received received{.head = std::string(data, head), .body = {}};
      const size_t field = received.head.find("Content-Length: ");
      const size_t length =
          field == std::string::npos ? 0 : std::stoul(received.head.substr(field + 16));
      if (buffer.size() < head + length) {
        boost::asio::read(socket, buffer,
                          boost::asio::transfer_exactly(head + length - buffer.size()), error);
      }
      received.body.assign(static_cast<const char*>(buffer.data().data()) + head, length);
      std::string answer;
      {
        const MutexLock lock(mutex_);
        answer = answers_[std::min(received_.size(), answers_.size() - 1)];
        received_.push_back(std::move(received));
      }
      changed_.notify_all();
      boost::asio::write(socket, boost::asio::buffer(answer), error);
    }
  }

  boost::asio::io_context io_;
  boost::asio::ip::tcp::acceptor acceptor_;
  const std::vector<std::string> answers_;
  Mutex mutex_;
  std::condition_variable changed_;
  std::vector<Received> received_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

std::string Answer(const std::string& status, const std::string& body = "{}",
                   const std::string& headers = "") {
  return "HTTP/1.1 " + status + "\r\nContent-Type: application/json\r\n" + headers +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

SpanExporterOptions Options(const Collector& collector) {
  SpanExporterOptions options;
  options.endpoint = collector.endpoint();
  options.delay = milliseconds(0);
  options.retry_delay = milliseconds(1);
  return options;
}

Span NamedSpan(const std::string& name) {
  Span span;
  span.trace_id = RandomHex(32);
  span.span_id = RandomHex(16);
  span.name = name;
  return span;
}

const Json& Spans(const Json& body) { return body["resourceSpans"][0]["scopeSpans"][0]["spans"]; }

// Returns the attributes of a span or resource, with the type of each in its value.
Json Attributes(const Json& holder) {
  Json out = Json::object();
  for (const Json& attribute : holder["attributes"]) {
    out[attribute["key"].get<std::string>()] = attribute["value"];
  }
  return out;
}

TEST(TraceContextTest, ReadsTheParts) {
  const auto parent = ParseTraceParent(kParent);
  ASSERT_TRUE(parent);
  EXPECT_EQ(parent->trace_id, "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(parent->parent_id, "b7ad6b7169203331");
  EXPECT_TRUE(parent->sampled);
  EXPECT_FALSE(
      ParseTraceParent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-02")->sampled);
  EXPECT_TRUE(ParseTraceParent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-ff")->sampled);
  // A later version.
  EXPECT_TRUE(ParseTraceParent("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more"));
  EXPECT_TRUE(ParseTraceParent("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"));
}

TEST(TraceContextTest, IgnoresWhatIsMalformed) {
  const std::string valid = kParent;
  for (size_t size = 0; size < valid.size(); ++size) {
    EXPECT_FALSE(ParseTraceParent(valid.substr(0, size))) << size;
  }
  for (size_t i = 0; i < valid.size(); ++i) {
    for (const char c : {'g', 'A', ' ', '\0', '\xff', '_'}) {
      std::string changed = valid;
      changed[i] = c;
      EXPECT_FALSE(ParseTraceParent(changed)) << changed;
    }
  }
  for (const char* header : {"00-00000000000000000000000000000000-b7ad6b7169203331-01",
                             "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
                             "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                             "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
                             "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01more",
                             " 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}) {
    EXPECT_FALSE(ParseTraceParent(header)) << header;
  }
}

TEST(TraceContextTest, ContinuesTheTraceOfTheClient) {
  const TraceContext sampled = StartSpan(ParseTraceParent(kParent), 0.0);
  EXPECT_EQ(sampled.trace_id, "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(sampled.parent_id, "b7ad6b7169203331");
  EXPECT_NE(sampled.span_id, sampled.parent_id);
  EXPECT_TRUE(sampled.sampled);
  auto parent = *ParseTraceParent(kParent);
  parent.sampled = false;
  EXPECT_FALSE(StartSpan(parent, 1.0).sampled);
}

TEST(TraceContextTest, SamplesThePartOfNewTraces) {
  int sampled = 0;
  std::set<std::string> ids;
  for (int i = 0; i < 4000; ++i) {
    const TraceContext context = StartSpan(std::nullopt, 0.25);
    EXPECT_EQ(context.trace_id.size(), 32u);
    EXPECT_EQ(context.span_id.size(), 16u);
    EXPECT_EQ(context.parent_id, "");
    ids.insert(context.trace_id);
    sampled += context.sampled ? 1 : 0;
    EXPECT_TRUE(StartSpan(std::nullopt, 1.0).sampled);
    EXPECT_FALSE(StartSpan(std::nullopt, 0.0).sampled);
  }
  EXPECT_EQ(ids.size(), 4000u);
  // Seven standard deviations around 1000.
  EXPECT_GT(sampled, 800);
  EXPECT_LT(sampled, 1200);
}

TEST(OtlpOptionsTest, Endpoints) {
  const auto text = [](const char* url) {
    const auto endpoint = ParseOtlpEndpoint(url);
    if (!endpoint.ok()) return std::string("error");
    return endpoint->host + " " + std::to_string(endpoint->port) + " " + endpoint->path;
  };
  EXPECT_EQ(text("http://collector:4318"), "collector 4318 /v1/traces");
  EXPECT_EQ(text("http://collector"), "collector 4318 /v1/traces");
  EXPECT_EQ(text("http://127.0.0.1:80/"), "127.0.0.1 80 /v1/traces");
  EXPECT_EQ(text("http://[::1]:80/otlp/"), "::1 80 /otlp/v1/traces");
  EXPECT_EQ(text("http://[::1]"), "::1 4318 /v1/traces");
  for (const char* url : {"", "collector:4318", "https://collector:4318", "http://", "http://:80",
                          "http://a:b", "http://a:0", "http://a:70000", "http://user@a:80",
                          "http://a:80/x\r\ny", "http://a b", "http://[::1", "ftp://a"}) {
    EXPECT_EQ(text(url), "error") << url;
  }
}

TEST(OtlpOptionsTest, Headers) {
  const auto headers = ParseOtlpHeaders("Authorization=Bearer a=b,x-tenant=");
  ASSERT_TRUE(headers.ok());
  EXPECT_EQ(*headers, (HttpHeaders{{"Authorization", "Bearer a=b"}, {"x-tenant", ""}}));
  EXPECT_TRUE(ParseOtlpHeaders("")->empty());
  for (const char* text :
       {"s3cret", "=s3cret", "a b=s3cret", "a=s3cret\r\nb: c", "a=1,s3cret", "a=1,,b=s3cret"}) {
    const auto parsed = ParseOtlpHeaders(text);
    EXPECT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(std::string(parsed.status().message()).find("s3cret"), std::string::npos);
  }
}

TEST(SpanExporterTest, SendsBatchesWithTheirHeaders) {
  Collector collector({Answer("200 OK")});
  SpanExporterOptions options = Options(collector);
  options.headers = {{"x-tenant", "a"}};
  SpanExporter exporter(options, {.service_name = "s", .service_version = "1", .instance_id = "i"});
  Span span = NamedSpan("\xff hostile \"name\"");
  span.start = absl::FromUnixNanos(1700000000000000001);
  span.end = absl::FromUnixNanos(1700000000000000009);
  span.failed = true;
  span.attributes = {{"text", std::string("a")},
                     {"integer", int64_t{1} << 60},
                     {"number", 0.5},
                     {"list", std::vector<std::string>{"x", "y"}}};
  std::vector<Span> spans;
  spans.push_back(span);
  spans.push_back(NamedSpan("second"));
  exporter.Add(std::move(spans));
  ASSERT_TRUE(exporter.Flush(milliseconds(10000)));
  EXPECT_EQ(exporter.exported(), 2u);
  EXPECT_EQ(exporter.dropped(), 0u);
  const auto received = collector.WaitFor(1);
  ASSERT_EQ(received.size(), 1u);
  EXPECT_TRUE(received[0].head.starts_with("POST /v1/traces HTTP/1.1\r\n")) << received[0].head;
  EXPECT_NE(received[0].head.find("\r\nx-tenant: a\r\n"), std::string::npos);
  EXPECT_NE(received[0].head.find("\r\nContent-Type: application/json\r\n"), std::string::npos);
  const Json body = Json::parse(received[0].body);
  EXPECT_EQ(Attributes(body["resourceSpans"][0]["resource"])["service.name"]["stringValue"], "s");
  const Json& first = Spans(body)[0];
  EXPECT_EQ(first["traceId"], span.trace_id);
  EXPECT_EQ(first["spanId"], span.span_id);
  EXPECT_EQ(first["name"], "\xef\xbf\xbd hostile \"name\"");
  EXPECT_EQ(first["startTimeUnixNano"], "1700000000000000001");
  EXPECT_EQ(first["endTimeUnixNano"], "1700000000000000009");
  EXPECT_EQ(first["status"]["code"], 2);
  const Json attributes = Attributes(first);
  EXPECT_EQ(attributes["text"]["stringValue"], "a");
  EXPECT_EQ(attributes["integer"]["intValue"], "1152921504606846976");
  EXPECT_EQ(attributes["number"]["doubleValue"], 0.5);
  EXPECT_EQ(attributes["list"]["arrayValue"]["values"][1]["stringValue"], "y");
  EXPECT_EQ(Spans(body)[1]["name"], "second");
}

TEST(SpanExporterTest, TriesAgainWhenTheCollectorIsBusy) {
  Collector collector(
      {Answer("503 Busy"), Answer("429 Busy", "", "Retry-After: 0\r\n"), "", Answer("200 OK")});
  SpanExporter exporter(Options(collector), {});
  exporter.Add({NamedSpan("a")});
  ASSERT_TRUE(exporter.Flush(milliseconds(10000)));
  EXPECT_EQ(exporter.exported(), 1u);
  EXPECT_EQ(exporter.dropped(), 0u);
  const auto received = collector.WaitFor(4);
  ASSERT_EQ(received.size(), 4u);
  EXPECT_EQ(received[0].body, received[3].body);
}

TEST(SpanExporterTest, GivesUpWhatIsRefused) {
  Collector collector({Answer("400 Bad Request"), Answer("200 OK")});
  SpanExporter exporter(Options(collector), {});
  exporter.Add({NamedSpan("a"), NamedSpan("b")});
  ASSERT_TRUE(exporter.Flush(milliseconds(10000)));
  EXPECT_EQ(exporter.dropped(), 2u);
  exporter.Add({NamedSpan("c")});
  ASSERT_TRUE(exporter.Flush(milliseconds(10000)));
  EXPECT_EQ(exporter.exported(), 1u);
}

TEST(SpanExporterTest, GivesUpAfterTheLastTry) {
  Collector collector({Answer("503 Busy")});
  SpanExporterOptions options = Options(collector);
  options.max_tries = 3;
  SpanExporter exporter(options, {});
  exporter.Add({NamedSpan("a")});
  ASSERT_TRUE(exporter.Flush(milliseconds(10000)));
  EXPECT_EQ(exporter.dropped(), 1u);
  EXPECT_EQ(collector.WaitFor(3).size(), 3u);
}

TEST(SpanExporterTest, CountsSpansThatTheCollectorRejects) {
  Collector collector({Answer("200 OK", R"({"partialSuccess": {"rejectedSpans": "1"}})")});
  SpanExporter exporter(Options(collector), {});
  exporter.Add({NamedSpan("a"), NamedSpan("b")});
  ASSERT_TRUE(exporter.Flush(milliseconds(10000)));
  EXPECT_EQ(exporter.exported(), 1u);
  EXPECT_EQ(exporter.dropped(), 1u);
}

TEST(SpanExporterTest, HostileAnswersAreBounded) {
  Collector collector({Answer("200 OK", std::string(1 << 20, 'x')),
                       "HTTP/1.1 200 OK\r\n" + std::string(1 << 20, 'h'), "\x16\x03\x01 not HTTP",
                       Answer("200 OK", "[[[["), Answer("200 OK")});
  SpanExporterOptions options = Options(collector);
  options.max_tries = 1;
  SpanExporter exporter(options, {});
  for (int i = 0; i < 5; ++i) {
    exporter.Add({NamedSpan("a")});
    ASSERT_TRUE(exporter.Flush(milliseconds(10000)));
  }
  // An answer that is not JSON, but has status 200, is a success.
  EXPECT_EQ(exporter.exported(), 2u);
  EXPECT_EQ(exporter.dropped(), 3u);
}

TEST(SpanExporterTest, FullQueueDropsWithoutBlocking) {
  // Accepts connections, in the system's queue, and never answers.
  boost::asio::io_context io;
  boost::asio::ip::tcp::acceptor silent(io, {boost::asio::ip::make_address("127.0.0.1"), 0});
  SpanExporterOptions options;
  options.endpoint = {.host = "127.0.0.1", .port = silent.local_endpoint().port()};
  options.delay = milliseconds(0);
  options.max_queued = 10;
  options.max_batch = 5;
  SpanExporter exporter(options, {});
  for (int i = 0; i < 1000; ++i) exporter.Add({NamedSpan("a")});
  EXPECT_GE(exporter.dropped(), 1000u - 15u);
  EXPECT_FALSE(exporter.Flush(milliseconds(1)));
}

// A thread that outlived the exporter would use objects that the end of the process destroys.
TEST(SpanExporterTest, DestructionEndsTheRequest) {
  boost::asio::io_context io;
  boost::asio::ip::tcp::acceptor silent(io, {boost::asio::ip::make_address("127.0.0.1"), 0});
  SpanExporterOptions options;
  options.endpoint = {.host = "127.0.0.1", .port = silent.local_endpoint().port()};
  options.delay = milliseconds(0);
  options.timeout = std::chrono::minutes(5);
  auto exporter = std::make_unique<SpanExporter>(options, SpanResource{});
  exporter->Add({NamedSpan("a")});
  boost::asio::ip::tcp::socket connection = silent.accept();
  const auto start = std::chrono::steady_clock::now();
  exporter.reset();
  // The exporter waits for two seconds at most if it cannot end its thread.
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(1900));
  // The connection was closed before. What was sent until then can still be read.
  connection.non_blocking(true);
  std::array<char, 4096> bytes;
  boost::system::error_code error;
  while (!error) connection.read_some(boost::asio::buffer(bytes), error);
  EXPECT_NE(error, boost::asio::error::would_block);
}

TEST(SpanExporterTest, SilentCollectorsRunIntoTheTimeout) {
  boost::asio::io_context io;
  boost::asio::ip::tcp::acceptor silent(io, {boost::asio::ip::make_address("127.0.0.1"), 0});
  SpanExporterOptions options;
  options.endpoint = {.host = "127.0.0.1", .port = silent.local_endpoint().port()};
  options.timeout = milliseconds(50);
  options.max_tries = 1;
  SpanExporter exporter(options, {});
  exporter.Add({NamedSpan("a")});
  EXPECT_TRUE(exporter.Flush(milliseconds(10000)));
  EXPECT_EQ(exporter.dropped(), 1u);
}

// A finished chat over HTTP.
std::shared_ptr<RequestRecord> FinishedChat(const RequestObserver& observer,
                                            std::string_view traceparent) {
  const auto now = std::chrono::steady_clock::now();
  auto record = observer.Begin({.protocol = "http",
                                .request_id = "id-1",
                                .method = "POST",
                                .path = "/v1/chat/completions",
                                .client = "10.0.0.1:99",
                                .time = now - milliseconds(1000)},
                               traceparent);
  record->Update([&](RequestFacts& facts) {
    facts.operation = "chat";
    facts.model = "m";
    facts.response_id = "chatcmpl-1";
    facts.max_tokens = 8;
    facts.choices = 1;
    facts.prompt_tokens = 5;
    facts.output_tokens = 3;
    facts.submitted = now - milliseconds(900);
    facts.queue_seconds = 0.1;
    facts.first_token = now - milliseconds(500);
    facts.last_token = now - milliseconds(100);
    facts.finish_reasons = {"stop"};
  });
  return record;
}

RequestEnd ChatEnd(int status) {
  RequestEnd end;
  end.status = status;
  end.method = "POST";
  end.route = "/v1/chat/completions";
  end.key = "team-a";
  end.failed = status >= 500;
  return end;
}

TEST(RequestObserverTest, ExportsTheRequestAndItsPhases) {
  Collector collector({Answer("200 OK")});
  RequestObserverOptions options;
  options.access_log = AccessLog::kOff;
  options.exporter = Options(collector);
  RequestObserver observer(options);
  observer.End(*FinishedChat(observer, kParent), ChatEnd(200));
  observer.Flush(milliseconds(10000));
  const auto received = collector.WaitFor(1);
  ASSERT_EQ(received.size(), 1u);
  const Json body = Json::parse(received[0].body);
  ASSERT_EQ(Spans(body).size(), 4u);
  const Json& server = Spans(body)[0];
  EXPECT_EQ(server["traceId"], "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(server["parentSpanId"], "b7ad6b7169203331");
  EXPECT_EQ(server["name"], "POST /v1/chat/completions");
  EXPECT_EQ(server["kind"], 2);
  EXPECT_FALSE(server.contains("status"));
  const Json attributes = Attributes(server);
  EXPECT_EQ(attributes["gen_ai.operation.name"]["stringValue"], "chat");
  EXPECT_EQ(attributes["gen_ai.request.model"]["stringValue"], "m");
  EXPECT_EQ(attributes["gen_ai.usage.input_tokens"]["intValue"], "5");
  EXPECT_EQ(attributes["gen_ai.usage.output_tokens"]["intValue"], "3");
  EXPECT_EQ(attributes["gen_ai.request.max_tokens"]["intValue"], "8");
  EXPECT_EQ(attributes["gen_ai.response.finish_reasons"]["arrayValue"]["values"][0]["stringValue"],
            "stop");
  EXPECT_NEAR(attributes["gen_ai.latency.time_to_first_token"]["doubleValue"].get<double>(), 0.5,
              1e-6);
  EXPECT_EQ(attributes["http.response.status_code"]["intValue"], "200");
  EXPECT_EQ(attributes["client.address"]["stringValue"], "10.0.0.1");
  EXPECT_EQ(attributes["moeserve.key.name"]["stringValue"], "team-a");
  const auto nanos = [&](const char* field, int span) {
    return std::stoll(Spans(body)[static_cast<size_t>(span)][field].get<std::string>());
  };
  const std::vector<std::string> names = {"queue", "prefill", "decode"};
  int64_t before = nanos("startTimeUnixNano", 0) + 100'000'000;
  for (int i = 1; i <= 3; ++i) {
    const Json& phase = Spans(body)[static_cast<size_t>(i)];
    EXPECT_EQ(phase["name"], names[static_cast<size_t>(i - 1)]);
    EXPECT_EQ(phase["parentSpanId"], server["spanId"]);
    EXPECT_EQ(phase["traceId"], server["traceId"]);
    EXPECT_NEAR(static_cast<double>(nanos("startTimeUnixNano", i) - before), 0.0, 1e6);
    before = nanos("endTimeUnixNano", i);
  }
  EXPECT_LE(before, nanos("endTimeUnixNano", 0));
}

TEST(RequestObserverTest, ServerErrorsFailTheSpan) {
  Collector collector({Answer("200 OK")});
  RequestObserverOptions options;
  options.access_log = AccessLog::kOff;
  options.exporter = Options(collector);
  RequestObserver observer(options);
  observer.End(*FinishedChat(observer, kParent), ChatEnd(503));
  observer.Flush(milliseconds(10000));
  const Json body = Json::parse(collector.WaitFor(1).at(0).body);
  EXPECT_EQ(Spans(body)[0]["status"]["code"], 2);
  EXPECT_EQ(Attributes(Spans(body)[0])["error.type"]["stringValue"], "503");
}

TEST(RequestObserverTest, OnlySampledRequestsAreExported) {
  Collector collector({Answer("200 OK")});
  RequestObserverOptions options;
  options.access_log = AccessLog::kOff;
  options.exporter = Options(collector);
  options.sample_ratio = 0.0;
  RequestObserver observer(options);
  observer.End(*FinishedChat(observer, ""), ChatEnd(200));
  observer.End(*FinishedChat(observer, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"),
               ChatEnd(200));
  RequestEnd health = ChatEnd(200);
  health.for_operators = true;
  observer.End(*FinishedChat(observer, kParent), health);
  observer.End(*FinishedChat(observer, kParent), ChatEnd(200));
  observer.Flush(milliseconds(10000));
  const Json body = Json::parse(collector.WaitFor(1).at(0).body);
  EXPECT_EQ(Spans(body).size(), 4u);
  EXPECT_EQ(Spans(body)[0]["parentSpanId"], "b7ad6b7169203331");
}

}  // namespace
}  // namespace moeserve::server

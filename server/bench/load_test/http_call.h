// One HTTP request of a load run and the response to it. Internal to http_target.cc.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/buffers_range.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/bench/load_test/completion_stream.h"
#include "server/bench/load_test/load_target.h"

namespace moeserve::server::load {

namespace asio = boost::asio;
namespace beast = boost::beast;
using boost::system::error_code;

inline constexpr double kNever = std::numeric_limits<double>::infinity();

// The received part of the response to one HTTP request.
struct Answer {
  void OnHead(const beast::http::response_header<>& head);
  void OnBody(std::string_view bytes);

  double now = 0.0;  // arrival time of the bytes being parsed
  int status = 0;    // 0 until the head has arrived
  bool event_stream = false;
  std::optional<double> retry_after;
  CompletionStream stream;
  std::vector<double> arrivals;
  std::string body;  // of a response that is not an event stream; at most 4 MiB
};

// Body type for Beast's HTTP parser; passes each received piece of the body to an Answer.
struct AnswerBody {
  using value_type = Answer*;
  class reader {
   public:
    template <bool is_request, typename Fields>
    reader(beast::http::header<is_request, Fields>& head, value_type& answer)
        : head_(head), answer_(answer) {}
    void init(const boost::optional<uint64_t>&, error_code& error) {
      error = {};
      answer_->OnHead(head_);
    }
    template <typename Buffers>
    size_t put(const Buffers& buffers, error_code& error) {
      error = {};
      size_t size = 0;
      for (const asio::const_buffer buffer : beast::buffers_range_ref(buffers)) {
        answer_->OnBody({static_cast<const char*>(buffer.data()), buffer.size()});
        size += buffer.size();
      }
      return size;
    }
    void finish(error_code& error) { error = {}; }

   private:
    const beast::http::response_header<>& head_;
    value_type& answer_;  // not set yet when the parser constructs this reader
  };
};

struct Connection {
  explicit Connection(asio::io_context& io) : socket(io) {}
  asio::ip::tcp::socket socket;
  beast::flat_buffer buffer;
};

// One HTTP request and the response to it.
struct Call {
  std::string request;
  double deadline = kNever;
  std::unique_ptr<Connection> connection;
  Answer answer;
  std::string failure;   // empty if the response is complete
  bool surplus = false;  // whether bytes followed the response
  bool timed_out = false;
  bool cut_off = false;
  bool held = false;  // an idle stream, which CancelAll() does not end
  RequestResult result;

  void Break() {
    error_code ignored;
    if (connection) connection->socket.close(ignored);
  }
};

// Parses the bytes that arrive on the connection of a call.
class AnswerParser {
 public:
  explicit AnswerParser(Call& call);

  // Parses the bytes in the connection's buffer, which arrived at `now`. Sets the call's `failure`
  // on an error.
  void Parse(double now);
  // Handles the end of the connection, which can be the regular end of a response.
  void ParseEnd();

  bool done() const { return parser_.is_done(); }
  bool keep_alive() const { return parser_.keep_alive(); }

 private:
  Call& call_;
  beast::http::response_parser<AnswerBody> parser_;
};

// Fills `call.result` from an ended call, complete or not.
void Judge(Call& call);

}  // namespace moeserve::server::load

// Limits of one request and of one connection.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"

namespace moeserve::server {

struct RequestLimits {
  int max_n = 128;
  int max_prompts = 256;
  int max_choices = 512;  // number of prompts times `n`
  int max_stop = 16;
  size_t max_stop_bytes = 256;
  int max_stop_token_ids = 64;
  size_t max_logit_bias = 1024;
  size_t max_bad_words = 128;
  size_t max_bad_word_tokens = 1024;
  int max_logprobs = 20;
  size_t max_prompt_bytes = size_t{4} << 20;  // of one prompt; a request may have several
  size_t max_messages = 2048;
  size_t max_message_bytes = size_t{1} << 20;
  size_t max_rendered_bytes = size_t{4} << 20;  // of a conversation after the chat template
  size_t max_template_variables = 64;
  int json_depth = 64;
  // Limit on the (row, expert) pairs of one request's routing records that are in memory at once:
  // all pairs of a unary response, only the prompts' pairs of a streaming response. A pair takes
  // about 60 bytes until it is sent.
  int64_t max_routes = int64_t{1} << 22;
  // From the arrival of a request to its last token; the answer is cut then. Infinite: no limit.
  absl::Duration max_request_time = absl::Seconds(600);
  // Limit on the output of a stream that waits for a slow client. A stream that exceeds it is
  // cancelled with the error "slow_reader".
  size_t max_unread_bytes = size_t{1} << 20;
};

struct HttpLimits {
  size_t max_line_bytes = 8 << 10;  // the request line or one header line
  size_t max_header_bytes = 32 << 10;
  int max_headers = 100;
  size_t max_body_bytes = size_t{16} << 20;
  int max_chunks = 65536;
  size_t max_chunk_extension_bytes = 4 << 10;  // total over all chunks of a body
  int max_connections = 4096;
  // Beyond max_connections, when all of these are busy; such a connection serves only what an
  // operator needs: health and metrics.
  int reserved_connections = 16;
  absl::Duration header_timeout = absl::Seconds(10);
  absl::Duration body_idle_timeout = absl::Seconds(30);
  // A body must arrive within body_idle_timeout and the time that this rate takes.
  int64_t min_body_bytes_per_second = 1024;
  absl::Duration keep_alive_timeout = absl::Seconds(75);
  // A client that reads an answer at min_read_bytes_per_second or faster is never cut off. One that
  // reads nothing is cut off after write_stall_timeout (at most twice that) and the time in which
  // it could have read what it has acknowledged, at most max_receive_buffer, at that rate: until it
  // has read a good part of a full receive buffer, it looks as if it read nothing. With these
  // values, that makes 316 s at most.
  absl::Duration write_stall_timeout = absl::Seconds(30);
  int64_t min_read_bytes_per_second = 1024;
  size_t max_receive_buffer = size_t{256} << 10;
  absl::Duration stream_comment_interval = absl::Seconds(15);
};

}  // namespace moeserve::server

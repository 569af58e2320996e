// Streams that are opened and then not read, to test a server with many of them.
#pragma once

#include <map>
#include <string>

namespace moeserve::server {

struct IdleStreamOptions {
  int count = 0;
  int output_tokens = 64;         // per stream
  int read_bytes_per_second = 0;  // per stream; 0: nothing is read while held
  double open_seconds = 60.0;     // limit for all streams to begin
};

struct IdleStreamReport {
  int wanted = 0;
  int opened = 0;                         // answered with status 200
  std::map<std::string, int> not_opened;  // by error
  int ended_early = 0;                    // complete before the release
  // Unfinished at the release and, as far as known, connected: unread output hides the end of a
  // connection.
  int alive = 0;
  int lost = 0;                           // neither: closed or reset by the server
  int completed = 0;                      // of the opened: complete in the end
  std::map<std::string, int> incomplete;  // of the opened: the others, by error
};

}  // namespace moeserve::server

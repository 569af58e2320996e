// Idle streams: responses that are requested and then not read, to test a server with many slow
// clients.
#pragma once

#include <map>
#include <string>

namespace moeserve::server {

struct IdleStreamOptions {
  int count = 0;
  int output_tokens = 64;         // per stream
  int read_bytes_per_second = 0;  // per stream; 0 reads nothing while the stream is held
  double open_seconds = 60.0;     // time limit for all streams to begin
};

struct IdleStreamReport {
  int wanted = 0;
  int opened = 0;                         // the response had status 200
  std::map<std::string, int> not_opened;  // count per error
  int ended_early = 0;                    // complete before they were released
  // Incomplete when they were released, and not known to be disconnected: unread output can hide
  // that the server closed a connection.
  int alive = 0;
  int lost = 0;                           // closed or reset by the server before the release
  int completed = 0;                      // opened streams that became complete
  std::map<std::string, int> incomplete;  // other opened streams; count per error
};

}  // namespace moeserve::server

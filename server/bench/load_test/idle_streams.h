// Streams that are opened and then left alone, to see what a server does with many of them.
#pragma once

#include <map>
#include <string>

namespace moeserve::server {

struct IdleStreamOptions {
  int count = 0;
  int output_tokens = 64;         // of each
  int read_bytes_per_second = 0;  // of each; 0: nothing is read while it is held
  double open_seconds = 60.0;     // for all to begin
};

struct IdleStreamReport {
  int wanted = 0;
  int opened = 0;                         // the answer's head came with status 200
  std::map<std::string, int> not_opened;  // by error
  int ended_early = 0;                    // complete before the release
  // Unfinished at the release and connected as far as can be seen: a server's parting hides behind
  // output that has not been read.
  int alive = 0;
  int lost = 0;                           // neither: the server had closed or reset it
  int completed = 0;                      // of the opened: complete in the end, nothing missing
  std::map<std::string, int> incomplete;  // of the opened: the others, by error
};

}  // namespace moeserve::server

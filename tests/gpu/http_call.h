// One HTTP request to a server on this machine.
#pragma once

#include <string>

namespace moeserve::gpu_run {

struct HttpAnswer {
  int status = 0;    // 0 if there was no complete answer
  std::string type;  // the media type
  std::string body;
  std::string error;  // why there was no answer
};

// Sends a request to `address`, such as "127.0.0.1:8080", and waits for the whole answer, at most
// `seconds`. A request with an empty `body` is a GET, every other one a POST of JSON.
HttpAnswer HttpCall(const std::string& address, const std::string& path, const std::string& body,
                    int seconds);

}  // namespace moeserve::gpu_run

// Command line options of a model that several processes compute together.
#pragma once

#include <string>

namespace moeserve::server {

struct RankOptions {
  std::string transport = "off";  // --ranks: "off" or "mpi"
  double timeout_seconds = 10.0;
  double start_seconds = 1800.0;
  std::string link_host;  // empty: all addresses of the leader's machine
};

}  // namespace moeserve::server

// Command line options of a model that several processes compute together.
#pragma once

#include <string>

namespace moeserve::server {

struct RankOptions {
  std::string transport = "off";  // --ranks: "off" or "mpi"
  int threads = 0;                // of each process; 0: one for each of its cores
  double timeout_seconds = 10.0;
  double start_seconds = 1800.0;
  std::string link_host;            // empty: all addresses of the leader's machine
  std::string split_rows = "auto";  // a SplitChoice
  std::string split_head = "auto";
  // The leader's: a file of a placement. Empty: experts are placed with uniform loads and so many
  // copies.
  std::string placement;
  int copies_percent = 0;
  double rebalance_seconds = 60.0;  // between rounds that move experts; 0: they stay
  int rebalance_mib = 256;          // that ranks load in a round, all together
};

}  // namespace moeserve::server

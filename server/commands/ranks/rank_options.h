// Command line options of a model that several processes compute together.
#pragma once

#include <string>

namespace moeserve::server {

struct RankOptions {
  std::string transport = "off";  // --ranks: "off", "mpi", "tcp" or "nccl"
  // With "tcp" and "nccl": the number of this process, how many there are, and a file with what all
  // know and nobody else. -1, 0 and empty: not given.
  int rank = -1;
  int of = 0;
  std::string key_file;
  int threads = 0;               // of each process; 0: one for each of its cores
  double timeout_seconds = 0.0;  // of process 0; 0: not given (rank_timeout.h)
  double start_seconds = 1800.0;
  // With "mpi", the address of the leader's machine for the link; empty: all addresses. Otherwise
  // HOST:PORT at which the leader listens.
  std::string link;
  std::string split_rows = "auto";  // a SplitChoice
  std::string split_head = "auto";
  std::string owner_sums = "auto";
  bool no_checksums = false;
  // The leader's: a file of a placement. Empty: experts are placed with uniform loads and so many
  // copies.
  std::string placement;
  int copies_percent = 0;
  double rebalance_seconds = 60.0;  // between rounds that move experts; 0: they stay
  int rebalance_mib = 256;          // that ranks load in a round, all together
};

}  // namespace moeserve::server

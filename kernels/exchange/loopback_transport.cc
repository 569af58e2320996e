#include "kernels/exchange/loopback_transport.h"

#include <cstring>
#include <deque>

#include "base/check.h"
#include "base/mutex.h"

namespace moeserve {
namespace {

// The messages in one direction between two ranks: at most one of the two queues has entries.
struct Channel {
  struct Sent {
    const void* data;
    int64_t bytes;
  };
  struct Expected {
    void* data;
    int64_t bytes;
  };
  std::deque<Sent> sent;
  std::deque<Expected> expected;
  bool sizes_differ = false;
};

class Network {
 public:
  explicit Network(int ranks)
      : ranks_(ranks), channels_(static_cast<size_t>(ranks) * static_cast<size_t>(ranks)) {}

  int ranks() const { return ranks_; }

  void Send(int from, int to, const void* data, int64_t bytes) {
    MutexLock lock(mutex_);
    Channel& channel = Between(from, to);
    channel.sent.push_back({data, bytes});
    Match(channel);
  }
  void Receive(int from, int to, void* data, int64_t bytes) {
    MutexLock lock(mutex_);
    Channel& channel = Between(from, to);
    channel.expected.push_back({data, bytes});
    Match(channel);
  }
  bool SizesDiffer(int rank) {
    MutexLock lock(mutex_);
    for (int r = 0; r < ranks_; ++r) {
      if (Between(rank, r).sizes_differ || Between(r, rank).sizes_differ) return true;
    }
    return false;
  }
  int UnfinishedSends(int from, int to) {
    MutexLock lock(mutex_);
    return static_cast<int>(Between(from, to).sent.size());
  }
  int UnfinishedReceives(int from, int to) {
    MutexLock lock(mutex_);
    return static_cast<int>(Between(from, to).expected.size());
  }
  void Withdraw(int rank) {
    MutexLock lock(mutex_);
    for (int r = 0; r < ranks_; ++r) {
      Between(rank, r).sent.clear();
      Between(r, rank).expected.clear();
    }
  }

 private:
  Channel& Between(int from, int to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return channels_[static_cast<size_t>(from) * static_cast<size_t>(ranks_) +
                     static_cast<size_t>(to)];
  }
  static void Match(Channel& channel) {
    while (!channel.sent.empty() && !channel.expected.empty() && !channel.sizes_differ) {
      const Channel::Sent sent = channel.sent.front();
      const Channel::Expected expected = channel.expected.front();
      if (sent.bytes != expected.bytes) {
        channel.sizes_differ = true;
        return;
      }
      std::memcpy(expected.data, sent.data, static_cast<size_t>(sent.bytes));
      channel.sent.pop_front();
      channel.expected.pop_front();
    }
  }

  const int ranks_;
  Mutex mutex_;
  std::vector<Channel> channels_ ABSL_GUARDED_BY(mutex_);
};

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<Network> network, int rank)
      : network_(std::move(network)), rank_(rank) {}
  ~LoopbackTransport() override { network_->Withdraw(rank_); }

  int rank() const override { return rank_; }
  int ranks() const override { return network_->ranks(); }
  const char* Send(int rank, const void* data, int64_t bytes) override {
    network_->Send(rank_, rank, data, bytes);
    return Advance();
  }
  const char* Receive(int rank, void* data, int64_t bytes) override {
    network_->Receive(rank, rank_, data, bytes);
    return Advance();
  }
  const char* Advance() override {
    return network_->SizesDiffer(rank_) ? "a message has another size than its receiver expects"
                                        : nullptr;
  }
  int unfinished_sends(int rank) const override { return network_->UnfinishedSends(rank_, rank); }
  int unfinished_receives(int rank) const override {
    return network_->UnfinishedReceives(rank, rank_);
  }

 private:
  const std::shared_ptr<Network> network_;
  const int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> LoopbackTransports(int ranks) {
  MOESERVE_CHECK(ranks >= 1, "at least one rank");
  const auto network = std::make_shared<Network>(ranks);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int r = 0; r < ranks; ++r) {
    transports.push_back(std::make_unique<LoopbackTransport>(network, r));
  }
  return transports;
}

}  // namespace moeserve

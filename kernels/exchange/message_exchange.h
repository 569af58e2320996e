// An exchange by messages of a transport.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "kernels/exchange/exchange.h"
#include "kernels/exchange/transport.h"

namespace moeserve {

class MessageExchange : public Exchange {
 public:
  struct Options {
    // A rank that a function has waited for longer than this is lost.
    absl::Duration timeout = absl::Seconds(10);
    // Whether every function first compares its name, number and sizes with those of the ranks that
    // take part, which costs a message to each.
    bool check_order = false;
    // For how long a waiting rank keeps its core before it lets other threads run, if it shares the
    // core with no other rank. Otherwise a thread of the lowest priority would run whenever a rank
    // waits for the others, and they for it afterwards.
    absl::Duration spin = absl::ZeroDuration();
    // A follower's: sleeps while the leader has nothing to do, until it calls its `wake` or the
    // time has passed. Null: sleeps for half a millisecond.
    std::function<void(absl::Duration)> sleep = {};
    // The leader's: called before a message that followers may sleep for. Null: nothing.
    std::function<void()> wake = {};
    // Returns a rank of which nothing was heard lately, or -1. Asked by any thread when devices
    // have not exchanged their parts in time, because they do not tell whose is missing. Null:
    // nobody knows.
    std::function<int()> silent_rank = {};
  };

  MessageExchange(std::unique_ptr<Transport> transport, Options options);

  // Replaces the options between two calls.
  void SetOptions(Options options) { options_ = std::move(options); }
  // Sets names that follow the numbers of ranks in messages, such as those of their hosts. To be
  // called before other threads use the object.
  void SetNames(std::vector<std::string> names) { names_ = std::move(names); }

  void SetTimeout(absl::Duration timeout) override { options_.timeout = timeout; }
  void SetWaitCheck(std::function<absl::Status()> check) override { check_ = std::move(check); }
  // Of the next call; for the thread that calls the functions of an exchange.
  absl::Duration timeout() const { return options_.timeout; }

  int rank() const override { return transport_->rank(); }
  int ranks() const override { return transport_->ranks(); }
  void StartGather(void* buffer, std::span<const int64_t> bytes) override;
  void FinishGather() override;
  void StartAllToAll(const void* send, std::span<const int64_t> send_bytes, void* receive,
                     std::span<const int64_t> receive_bytes) override;
  void FinishAllToAll() override { FinishGather(); }
  void Broadcast(std::span<char> message) override;
  void BroadcastWhenever(std::span<char> message) override;
  void GatherAtLeader(std::span<const char> own, std::span<char> all) override;
  void Lose(int rank, std::string_view reason) override;
  absl::Status status() const override;
  // Returns the rank that was lost first, which is rank() if its check has failed; -1 if none was,
  // or if it is not known. Any thread may call it.
  int lost_rank() const;
  ExchangeCounts counts() const override;
  // Connects the devices of the ranks if the exchange reads device memory. To be called once, by
  // the thread that has chosen the device, while the functions of an exchange may be called. All
  // ranks return when the last one has connected or one has failed. Returns the own error; OK if
  // only others have failed.
  virtual absl::Status ConnectDevices() { return absl::OkStatus(); }

 protected:
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  // Declares the exchange failed with this status, because of this rank or, if that is -1, of an
  // unknown one, unless it has failed before.
  void Fail(absl::Status status, int rank = -1);
  // The leader's: waits a little for Lose(), which another thread may call.
  void WaitForReason() const;
  // Begin and end a gather or all-to-all; `arrived` [ranks] are the seconds until each rank's part
  // came.
  void BeginGather(std::span<const int64_t> bytes);
  void BeginAllToAll(std::span<const int64_t> send_bytes, std::span<const int64_t> receive_bytes);
  void EndGather(std::span<const double> arrived);
  // Count bytes of the current call.
  void CountSent(int64_t bytes);
  void CountReceived(int64_t bytes);
  const Options& options() const { return options_; }

 private:
  // What a rank is about to do. Sent as it is: all ranks run the same program.
  struct Call {
    uint64_t number = 0;
    uint64_t sizes = 0;  // a hash; of an all-to-all: what is sent to the rank that gets this
    uint64_t bytes = 0;  // all sizes together; of an all-to-all: what is received from that rank
    ExchangeKind kind = ExchangeKind::kGather;
    uint32_t padding = 0;
  };

  // Returns "rank 2", with its name if it has one.
  std::string RankName(int rank) const;
  // Start a message unless a rank is lost. `rank` is lost if the transport fails.
  void Send(int rank, const void* data, int64_t bytes);
  void Receive(int rank, void* data, int64_t bytes);
  // Declares the rank lost with which the transport has failed; `rank` if that is not known.
  void LoseFailed(int rank, const char* error);
  // Waits for all messages. `arrived`, if it is not null, gets the seconds until all messages from
  // each rank had arrived. `patient`: without a deadline.
  void Wait(std::vector<double>* arrived = nullptr, bool patient = false);
  void StartBroadcast(std::span<char> message);
  // Begins a call. Compares it with those of all ranks (`everyone`) or between the leader and each
  // rank.
  void CompareCalls(ExchangeKind kind, std::span<const int64_t> sizes, bool everyone,
                    bool patient = false);
  // Tells every other rank r the call told[r] and compares what it tells with expected[r]. Ranks
  // other than the leader are left out unless `everyone`.
  void Compare(std::span<const Call> told, std::span<const Call> expected, bool everyone,
               bool patient);
  static std::string Describe(const Call& call);

  std::unique_ptr<Transport> transport_;
  Options options_;
  std::function<absl::Status()> check_;        // of SetWaitCheck()
  std::vector<std::string> names_;             // [ranks], or empty
  absl::Time last_ = absl::InfinitePast();     // the end of the last call, by SteadyNow()
  ExchangeKind kind_ = ExchangeKind::kGather;  // of the call that runs
  bool counting_ = true;                       // whether messages count
  absl::Time gather_start_ = absl::InfinitePast();
  uint64_t calls_ = 0;
  bool gathering_ = false;
  std::atomic<bool> lost_ = false;
  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  int lost_rank_ ABSL_GUARDED_BY(mutex_) = -1;
  ExchangeCounts counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moeserve

// Moves bytes between the ranks that compute a model together.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "base/check.h"

namespace moeserve {

// The functions of an exchange.
enum class ExchangeKind : uint32_t { kGather, kBroadcast, kGatherAtLeader };
inline constexpr size_t kExchangeKinds = 3;

// Upper bounds of the times of gathers in seconds; longer ones follow.
inline constexpr std::array kGatherSecondsBounds = {2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3,
                                                    1e-2, 2e-2, 5e-2, 1e-1, 2e-1, 5e-1, 1.,   5.};

// What one rank has exchanged. Headers and other bytes of a transport are not counted.
struct ExchangeCounts {
  uint64_t gathers = 0;                            // finished ones
  uint64_t bytes_sent = 0;                         // by all functions, to all other ranks together
  std::array<uint64_t, kExchangeKinds> sent_by{};  // the same by function
  // How many gathers took so long, from StartGather() to the end of FinishGather(): [i] up to
  // kGatherSecondsBounds[i] and above [i - 1]; the last one above all.
  std::array<uint64_t, kGatherSecondsBounds.size() + 1> gather_times{};
  double gather_seconds = 0.0;  // of all
  uint64_t bytes_received = 0;  // by all functions, from all other ranks together
  // [ranks] seconds in FinishGather() until the part of that rank had arrived.
  std::vector<double> wait_seconds;
};

// A rank is one of the processes (in tests: threads) that run the same steps of a model, each with
// a part of the experts. Rank 0 is the leader. All ranks call the same functions in the same order
// with equal sizes. No function computes with numbers: only bytes move, so results do not depend on
// the number of ranks.
//
// If a rank is lost, every rank stops: a waiting function returns, the following ones return at
// once, and status() is an error from then on. What should have been received is then zero or
// partly received; the caller checks status() before it delivers anything. After a loss, buffers
// that were passed must stay valid until the process ends, because a transport may still use them.
//
// One thread at a time calls all functions but Lose(), status() and counts(), which any thread may
// call.
class Exchange {
 public:
  virtual ~Exchange() = default;

  virtual int rank() const = 0;
  virtual int ranks() const = 0;

  // Starts to gather a buffer that consists of the parts of ranks 0, 1, ...; part r has bytes[r]
  // bytes, which may be none or more than 2^31. The own part is filled before. Until
  // FinishGather(), the caller neither writes the own part nor touches the others. At most one
  // gather is in progress, and no other function is called meanwhile.
  virtual void StartGather(void* buffer, std::span<const int64_t> bytes) = 0;
  virtual void FinishGather() = 0;

  // Whether StartDeviceGather() exists. If not, a device copies what it exchanges through host
  // memory.
  virtual bool reads_device_memory() const { return false; }
  // StartGather() of a buffer in device memory: the exchange is in the order of the operations on
  // `stream`, a CUDA stream.
  virtual void StartDeviceGather(void* /*buffer*/, std::span<const int64_t> /*bytes*/,
                                 void* /*stream*/) {
    MOESERVE_CHECK(false, "an exchange of device memory");
  }
  // Operations that are issued on the stream from now on find the buffer complete.
  virtual void FinishDeviceGather() { MOESERVE_CHECK(false, "an exchange of device memory"); }

  // Copies the leader's message to all ranks.
  virtual void Broadcast(std::span<char> message) = 0;
  // The same, but there is no deadline: it is for messages that the leader sends whenever it has
  // something to do. After some time, ranks that wait for it sleep between attempts.
  virtual void BroadcastWhenever(std::span<char> message) = 0;
  // Copies `own` of every rank to `all` at the leader, in the order of ranks. `own` has the same
  // size on all ranks; `all` has ranks() times this size at the leader and is empty on others.
  virtual void GatherAtLeader(std::span<const char> own, std::span<char> all) = 0;

  // Declares a rank lost. The first loss is the one that status() reports.
  virtual void Lose(int rank, std::string_view reason) = 0;
  // OK, or Unavailable "rank 2 was lost: REASON"; Internal if ranks called different functions.
  virtual absl::Status status() const = 0;

  // Any thread may call this.
  virtual ExchangeCounts counts() const = 0;
};

}  // namespace moeserve

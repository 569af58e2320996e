// Moves bytes between the ranks that compute a model together.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "base/check.h"

namespace moeserve {

// The functions of an exchange.
enum class ExchangeKind : uint32_t { kGather, kBroadcast, kGatherAtLeader, kAllToAll };
inline constexpr size_t kExchangeKinds = 4;

// Upper bounds of the times of gathers and all-to-alls in seconds; longer ones follow.
inline constexpr std::array kGatherSecondsBounds = {2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3,
                                                    1e-2, 2e-2, 5e-2, 1e-1, 2e-1, 5e-1, 1.,   5.};

// What one rank has exchanged. Headers and other bytes of a transport are not counted.
struct ExchangeCounts {
  uint64_t gathers = 0;                            // finished ones, and all-to-alls
  uint64_t bytes_sent = 0;                         // by all functions, to all other ranks together
  std::array<uint64_t, kExchangeKinds> sent_by{};  // the same by function
  // How many gathers and all-to-alls took so long, from the call that starts them to the end of the
  // one that finishes them: [i] up to kGatherSecondsBounds[i] and above [i - 1]; the last one above
  // all.
  std::array<uint64_t, kGatherSecondsBounds.size() + 1> gather_times{};
  double gather_seconds = 0.0;  // of all
  uint64_t bytes_received = 0;  // by all functions, from all other ranks together
  // [ranks] seconds in FinishGather() and FinishAllToAll() until the part of that rank had arrived.
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

  // Starts to send another part to every rank. `send` consists of the parts for ranks 0, 1, ...,
  // of send_bytes[r] bytes; that for this rank must be empty. `receive` consists of the parts from
  // ranks 0, 1, ..., of receive_bytes[r] bytes; the part at this rank's place is the caller's, and
  // is neither read nor written. What a rank sends to another one is what that one receives. Until
  // FinishAllToAll(), the caller does not write `send` nor touch the parts from others. Apart from
  // the sizes, all that is said of gathers holds. An exchange for backends that do not use it may
  // lack it.
  virtual void StartAllToAll(const void* /*send*/, std::span<const int64_t> /*send_bytes*/,
                             void* /*receive*/, std::span<const int64_t> /*receive_bytes*/) {
    MOESERVE_CHECK(false, "an exchange with all-to-alls");
  }
  virtual void FinishAllToAll() { MOESERVE_CHECK(false, "an exchange with all-to-alls"); }

  // Whether the functions of device memory may be called.
  virtual bool reads_device_memory() const { return false; }
  // The same as StartGather() for a buffer in the memory of the device, in the order of `stream`,
  // which is one of the backend (cudaStream_t): the own part is what work that was queued before
  // has written, and work that is queued later finds all parts. Until FinishDeviceGather(), the
  // stream need not be waited for.
  virtual void StartDeviceGather([[maybe_unused]] void* buffer,
                                 [[maybe_unused]] std::span<const int64_t> bytes,
                                 [[maybe_unused]] void* stream) {
    MOESERVE_CHECK(false, "an exchange that reads device memory");
  }
  // Waits until the buffer is complete, and with it all work of the stream.
  virtual void FinishDeviceGather() {
    MOESERVE_CHECK(false, "an exchange that reads device memory");
  }
  // The same as StartAllToAll() for buffers in the memory of the device, as above.
  virtual void StartDeviceAllToAll(const void* /*send*/, std::span<const int64_t> /*send_bytes*/,
                                   void* /*receive*/, std::span<const int64_t> /*receive_bytes*/,
                                   void* /*stream*/) {
    MOESERVE_CHECK(false, "an exchange that reads device memory");
  }
  virtual void FinishDeviceAllToAll() {
    MOESERVE_CHECK(false, "an exchange that reads device memory");
  }

  // Copies the leader's message to all ranks.
  virtual void Broadcast(std::span<char> message) = 0;
  // The same, but there is no deadline: it is for messages that the leader sends whenever it has
  // something to do. After some time, ranks that wait for it sleep between attempts.
  virtual void BroadcastWhenever(std::span<char> message) = 0;
  // Copies `own` of every rank to `all` at the leader, in the order of ranks. `own` has the same
  // size on all ranks; `all` has ranks() times this size at the leader and is empty on others.
  virtual void GatherAtLeader(std::span<const char> own, std::span<char> all) = 0;

  // From the next call on, a rank that a function waits for longer than this is lost. An exchange
  // without deadlines ignores it.
  virtual void SetTimeout(absl::Duration /*timeout*/) {}

  // Until it is replaced, a function that waits for long calls `check` now and then, on its thread,
  // unless it waits without a deadline. If that returns an error, the exchange has failed with it:
  // a rank need not wait for others if it has found out that it cannot agree with them. Null: no
  // check. To be called between two functions. An exchange may ignore it.
  virtual void SetWaitCheck(std::function<absl::Status()> /*check*/) {}

  // Declares a rank lost. The first loss is the one that status() reports.
  virtual void Lose(int rank, std::string_view reason) = 0;
  // OK, or Unavailable "rank 2 was lost: REASON"; Internal if ranks called different functions; or
  // what the check of SetWaitCheck() has returned.
  virtual absl::Status status() const = 0;

  // Any thread may call this.
  virtual ExchangeCounts counts() const = 0;
};

}  // namespace moeserve

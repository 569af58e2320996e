// Messages between ranks, without deadlines: what MPI or, in tests, memory provides.
#pragma once

#include <cstdint>

namespace moeserve {

// Changes with every change of this class, so that a shared object of another build is refused.
inline constexpr int kTransportVersion = 3;

// One thread at a time calls all functions. Messages between two ranks arrive in the order in which
// they were sent; a message has the size that its receiver expects. A function that fails returns
// the reason, which stays valid until the next call, otherwise null. After a failure or a loss, the
// buffers of unfinished messages must stay valid until the process ends.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int ranks() const = 0;

  // Start a message to or from another rank. The buffer must stay valid until the message has
  // finished.
  virtual const char* Send(int rank, const void* data, int64_t bytes) = 0;
  virtual const char* Receive(int rank, void* data, int64_t bytes) = 0;
  // Advances all messages that have started, without waiting.
  virtual const char* Advance() = 0;
  // The number of messages to and from the rank that have not finished.
  virtual int unfinished_sends(int rank) const = 0;
  virtual int unfinished_receives(int rank) const = 0;
  // After a failure, the rank whose messages failed; -1 if that is not known.
  virtual int failed_rank() const { return -1; }
};

}  // namespace moeserve

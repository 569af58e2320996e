// Connections between the leader and its followers beside the exchange, which tell that a rank has
// ended or lost its network although no step waits for it.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "base/descriptor.h"
#include "base/mutex.h"
#include "base/status.h"

namespace moeserve {

// What a link tells. A message is its kind (1 byte), the length of its text (4 bytes, little
// endian) and the text.
enum class LinkMessage : uint8_t {
  kHello,  // follower to leader: the key, then its rank in decimal digits
  kBeat,   // both ways: the process lives
  kWake,   // leader to follower: a step follows
  kError,  // follower to leader: why it ends
  kLoss,   // follower to leader: another rank was lost; its number, a space, and the reason
  kStop,   // leader to follower: the link will be closed, which is no loss
};

struct LinkOptions {
  absl::Duration beat = absl::Seconds(1);     // between two kBeat
  absl::Duration silence = absl::Seconds(5);  // a rank that has sent nothing for so long is lost
};

// One TCP connection for each follower, from the follower to the leader, with a thread that sends
// kBeat and reads. Neither encrypted nor, beyond a random key, authenticated: for private networks.
// All functions but the destructor may be called by several threads.
class Link {
 public:
  // `rank` is that of the process at the other end. Called for each rank that is lost, by the
  // link's thread; more than once if others tell the loss, too.
  using OnLoss = std::function<void(int rank, const std::string& reason)>;

  // Ends the thread and closes all connections.
  ~Link();

  // Returns the leader's link, which listens for `ranks` - 1 followers on a free port of `host`, a
  // name or address; empty: all addresses of this machine. Unavailable if that is not possible.
  static Result<std::unique_ptr<Link>> Listen(const std::string& host, int ranks,
                                              const LinkOptions& options);
  // Returns what followers need to connect: addresses, port and key, as text. It is secret.
  const std::string& invitation() const { return invitation_; }
  // Waits until all followers have connected. Unavailable, with the missing ranks, if they have not
  // done so within `timeout`.
  absl::Status Accept(absl::Duration timeout);

  // Returns a follower's link. Unavailable, with what was tried, if no address of the invitation
  // answers within `timeout`.
  static Result<std::unique_ptr<Link>> Connect(std::string_view invitation, int rank,
                                               absl::Duration timeout, const LinkOptions& options);

  // Starts the thread. To be called once, after Accept() or Connect().
  void Watch(OnLoss on_loss);

  // The leader's: wakes followers that wait in WaitForWake().
  void Wake();
  // A follower's: waits until Wake() was called since the last return, at most for `timeout`.
  void WaitForWake(absl::Duration timeout);
  // Returns the rank of which nothing was heard for the longest time, if that is two beats or more;
  // else -1.
  int SilentRank() const;
  // A follower's: tells the leader why this rank ends. The text is cut to 4096 bytes.
  void SendError(std::string_view reason);
  // A follower's: tells the leader that this rank has lost another one.
  void SendLoss(int rank, std::string_view reason);

  // From now on, closed connections are no losses. The leader tells this to the followers, and
  // waits until they have closed their ends; a follower waits until it was told. Returns false if
  // that has not happened within `timeout`, or if nothing was heard of one for
  // LinkOptions::silence.
  bool Stop(absl::Duration timeout);

 private:
  struct Peer;

  explicit Link(const LinkOptions& options);
  void Run();
  // Sends what is due and says how long to wait at most.
  absl::Duration Beat(absl::Time now);
  void Read(Peer& peer);
  void Handle(Peer& peer, LinkMessage kind, std::string text);
  // Reports the loss of a rank that a follower has told; false if the text is none.
  bool ReportLoss(std::string_view text);
  // Sends a message; never waits. False if the peer takes no more.
  bool Send(Peer& peer, LinkMessage kind, std::string_view text);
  void Lose(Peer& peer, std::string reason);
  void Interrupt();

  const LinkOptions options_;
  bool leader_ = false;
  int ranks_ = 1;
  std::string key_;
  std::string invitation_;
  std::vector<Descriptor> listeners_;
  std::vector<std::unique_ptr<Peer>> peers_;
  Descriptor interrupt_;  // an eventfd that the thread waits for, too
  OnLoss on_loss_;

  mutable Mutex mutex_;  // guards the members below and what is sent to peers
  std::condition_variable changed_;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;   // the thread ends
  bool quiet_ ABSL_GUARDED_BY(mutex_) = false;    // losses are not reported
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;  // kStop was received
  int open_ ABSL_GUARDED_BY(mutex_) = 0;          // connections
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  int silent_rank_ ABSL_GUARDED_BY(mutex_) = -1;  // SilentRank(), as of the last beat
  int lost_silent_ ABSL_GUARDED_BY(mutex_) = -1;  // a rank that was lost because it was silent
  std::thread thread_;
};

}  // namespace moeserve

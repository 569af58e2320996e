#include "kernels/exchange/tcp/tcp_transport.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <string>
#include <utility>

#include "kernels/exchange/tcp/sockets.h"

namespace moeserve {
namespace {

constexpr int64_t kSizeBytes = 8;

class Connections final : public Transport {
 public:
  Connections(int rank, std::vector<Descriptor> peers) : rank_(rank) {
    for (Descriptor& peer : peers) peers_.emplace_back(std::move(peer));
  }

  int rank() const override { return rank_; }
  int ranks() const override { return static_cast<int>(peers_.size()); }

  const char* Send(int rank, const void* data, int64_t bytes) override {
    // Nothing is written to memory that is sent.
    peers_[static_cast<size_t>(rank)].sends.emplace_back(
        static_cast<char*>(const_cast<void*>(data)), bytes);
    AdvanceSends(rank);
    return Reason();
  }
  const char* Receive(int rank, void* data, int64_t bytes) override {
    peers_[static_cast<size_t>(rank)].receives.emplace_back(static_cast<char*>(data), bytes);
    AdvanceReceives(rank);
    return Reason();
  }
  const char* Advance() override {
    for (int r = 0; r < ranks(); ++r) {
      AdvanceSends(r);
      AdvanceReceives(r);
    }
    return Reason();
  }
  int failed_rank() const override { return failed_rank_; }
  int unfinished_sends(int rank) const override {
    return static_cast<int>(peers_[static_cast<size_t>(rank)].sends.size());
  }
  int unfinished_receives(int rank) const override {
    return static_cast<int>(peers_[static_cast<size_t>(rank)].receives.size());
  }

 private:
  // A message and how far it has come, with its size before it.
  struct Message {
    Message(char* message_data, int64_t message_bytes) : data(message_data), bytes(message_bytes) {
      for (size_t i = 0; i < size.size(); ++i) {
        size[i] = static_cast<char>(static_cast<uint64_t>(message_bytes) >> (8 * i) & 255);
      }
    }
    bool finished() const { return done == kSizeBytes + bytes; }
    // What remains, as `parts` of a call of the system. Returns their number.
    size_t Rest(char* head, std::array<iovec, 2>& parts) const {
      size_t count = 0;
      if (done < kSizeBytes) {
        parts[count++] = {head + done, static_cast<size_t>(kSizeBytes - done)};
      }
      const int64_t sent = std::max<int64_t>(done - kSizeBytes, 0);
      if (sent < bytes) parts[count++] = {data + sent, static_cast<size_t>(bytes - sent)};
      return count;
    }

    char* data;
    int64_t bytes;
    int64_t done = 0;
    std::array<char, kSizeBytes> size;
  };
  struct Peer {
    explicit Peer(Descriptor connection) : socket(std::move(connection)) {}
    Descriptor socket;
    std::deque<Message> sends;
    std::deque<Message> receives;
    std::array<char, kSizeBytes> size;  // of the message that is received
  };

  const char* Reason() const { return failed_rank_ < 0 ? nullptr : reason_.c_str(); }
  void Fail(int rank, std::string reason) {
    if (failed_rank_ >= 0) return;
    failed_rank_ = rank;
    reason_ = std::move(reason);
  }
  // Handles the result of a call of the system for a message. False if there is no more to do.
  bool Moved(int rank, Message& message, ssize_t count) {
    if (count > 0) {
      message.done += count;
      return true;
    }
    if (count < 0 && errno == EINTR) return true;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    const bool ended = count == 0 || errno == ECONNRESET || errno == EPIPE;
    Fail(rank, ended ? "its process has ended" : "its connection: " + SystemError());
    return false;
  }

  void AdvanceSends(int rank) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    while (!peer.sends.empty() && failed_rank_ < 0) {
      Message& message = peer.sends.front();
      std::array<iovec, 2> parts;
      msghdr header{};
      header.msg_iov = parts.data();
      header.msg_iovlen = message.Rest(message.size.data(), parts);
      if (!Moved(rank, message, sendmsg(peer.socket.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT))) {
        return;
      }
      if (message.finished()) peer.sends.pop_front();
    }
  }

  void AdvanceReceives(int rank) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    while (!peer.receives.empty() && failed_rank_ < 0) {
      Message& message = peer.receives.front();
      const bool had_size = message.done >= kSizeBytes;
      std::array<iovec, 2> parts;
      msghdr header{};
      header.msg_iov = parts.data();
      // Not more than this message, whatever the other end sends.
      header.msg_iovlen = message.Rest(peer.size.data(), parts);
      if (!Moved(rank, message, recvmsg(peer.socket.get(), &header, MSG_DONTWAIT))) return;
      if (!had_size && message.done >= kSizeBytes && peer.size != message.size) {
        return Fail(rank, "a message has another size than its receiver expects");
      }
      if (message.finished()) peer.receives.pop_front();
    }
  }

  const int rank_;
  std::vector<Peer> peers_;
  int failed_rank_ = -1;
  std::string reason_;
};

}  // namespace

std::unique_ptr<Transport> TcpTransport(int rank, std::vector<Descriptor> peers) {
  return std::make_unique<Connections>(rank, std::move(peers));
}

}  // namespace moeserve

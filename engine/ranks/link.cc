#include "engine/ranks/link.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "base/steady_clock.h"
#include "kernels/exchange/tcp/sockets.h"

namespace moeserve {
namespace {

constexpr size_t kLinkKeyDigits = 64;
constexpr size_t kMostText = 4096;
constexpr size_t kLinkHeaderBytes = 5;
// A connection that says nothing must not keep others from being accepted.
constexpr size_t kMostStrangers = 256;
constexpr absl::Duration kHelloTime = absl::Seconds(2);
constexpr absl::Duration kConnectTime = absl::Seconds(2);
constexpr absl::Duration kBetweenAttempts = absl::Milliseconds(100);
// A thread that wakes up so late has not been run.
constexpr absl::Duration kLate = absl::Milliseconds(200);

// Returns 64 random hexadecimal digits; empty if the system has none.
std::string RandomKey() {
  std::array<unsigned char, kLinkKeyDigits / 2> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != std::ssize(bytes)) return "";
  std::string key;
  for (const unsigned char byte : bytes) {
    key += "0123456789abcdef"[byte >> 4];
    key += "0123456789abcdef"[byte & 15];
  }
  return key;
}

// Compares without telling by its time where the texts differ.
bool SameKey(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

std::optional<int> Number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string MessageBytes(LinkMessage kind, std::string_view text) {
  const auto size = static_cast<uint32_t>(text.size());
  std::string bytes(1, static_cast<char>(kind));
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(size >> (8 * i) & 255);
  return bytes.append(text);
}

// Takes the first message from `bytes` if it is complete. False if it can be none.
bool TakeMessage(std::string& bytes, std::optional<std::pair<LinkMessage, std::string>>& message) {
  message.reset();
  if (bytes.size() < kLinkHeaderBytes) return true;
  uint32_t size = 0;
  for (int i = 0; i < 4; ++i) {
    size |= static_cast<uint32_t>(static_cast<unsigned char>(bytes[static_cast<size_t>(1 + i)]))
            << (8 * i);
  }
  if (static_cast<unsigned char>(bytes[0]) > static_cast<unsigned char>(LinkMessage::kStop) ||
      size > kMostText) {
    return false;
  }
  if (bytes.size() < kLinkHeaderBytes + size) return true;
  message.emplace(static_cast<LinkMessage>(bytes[0]), bytes.substr(kLinkHeaderBytes, size));
  bytes.erase(0, kLinkHeaderBytes + size);
  return true;
}

// Returns the addresses of this machine by which others may reach it, those of its loop last.
std::vector<std::string> OwnAddresses() {
  std::vector<std::string> near, far;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {"127.0.0.1"};
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || (at->ifa_flags & IFF_UP) == 0) continue;
    const int family = at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    char host[NI_MAXHOST];
    if (getnameinfo(at->ifa_addr, size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) != 0) {
      continue;
    }
    ((at->ifa_flags & IFF_LOOPBACK) != 0 ? near : far).emplace_back(host);
  }
  freeifaddrs(list);
  far.insert(far.end(), near.begin(), near.end());
  return far;
}

}  // namespace

struct Link::Peer {
  Peer(int peer_rank, Descriptor connection) : rank(peer_rank), socket(std::move(connection)) {}
  const int rank;
  Descriptor socket;
  std::string input = {};
  absl::Time heard = SteadyNow();
  bool open = true;
};

Link::Link(const LinkOptions& options)
    : options_(options), interrupt_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  MOESERVE_CHECK(interrupt_.get() >= 0, "an eventfd");
}

Link::~Link() {
  {
    const MutexLock lock(mutex_);
    ending_ = true;
  }
  Interrupt();
  if (thread_.joinable()) thread_.join();
}

void Link::Interrupt() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(interrupt_.get(), &one, sizeof(one));
}

Result<std::unique_ptr<Link>> Link::Listen(const std::string& host, int ranks,
                                           const LinkOptions& options) {
  std::unique_ptr<Link> link(new Link(options));
  link->leader_ = true;
  link->ranks_ = ranks;
  link->key_ = RandomKey();
  if (link->key_.empty()) return absl::UnavailableError("the system has no random numbers");
  int port = 0;
  const std::string reason = EachAddress(host, 0, AI_PASSIVE, [&](const addrinfo& address) {
    Descriptor socket = ListenAt(address, port);
    if (socket.get() < 0) return false;
    link->listeners_.push_back(std::move(socket));
    return !host.empty();  // without a host, all families
  });
  if (link->listeners_.empty()) {
    return absl::UnavailableError(
        Concat("cannot listen on ", host.empty() ? "any address" : Quoted(host), ": ", reason));
  }
  link->invitation_ = Concat(link->key_, ' ', port);
  const std::vector<std::string> addresses =
      host.empty() ? OwnAddresses() : std::vector<std::string>{host};
  for (const std::string& address : addresses) link->invitation_ += Concat(' ', address);
  return link;
}

absl::Status Link::Accept(absl::Duration timeout) {
  const absl::Time deadline = SteadyNow() + timeout;
  std::vector<bool> known(static_cast<size_t>(ranks_));
  known[0] = true;
  // The connections that have not told their rank, with the time when they are given up.
  std::vector<std::pair<std::unique_ptr<Peer>, absl::Time>> strangers;
  while (std::ssize(peers_) < ranks_ - 1) {
    const absl::Time now = SteadyNow();
    if (now > deadline) {
      std::string missing;
      for (int r = 1; r < ranks_; ++r) {
        if (!known[static_cast<size_t>(r)]) missing += Concat(missing.empty() ? "" : ", ", r);
      }
      return absl::UnavailableError(
          Concat("ranks ", missing, " have not connected within ", absl::FormatDuration(timeout)));
    }
    std::vector<pollfd> waited;
    for (const Descriptor& listener : listeners_) waited.push_back({listener.get(), POLLIN, 0});
    for (const auto& [peer, until] : strangers) waited.push_back({peer->socket.get(), POLLIN, 0});
    poll(waited.data(), waited.size(),
         PollMilliseconds(std::min(deadline - now, absl::Milliseconds(500))));
    for (const Descriptor& listener : listeners_) {
      Descriptor socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (socket.get() < 0 || strangers.size() >= kMostStrangers) continue;
      SetSocketOptions(socket.get());
      strangers.emplace_back(std::make_unique<Peer>(-1, std::move(socket)), now + kHelloTime);
    }
    for (auto& [peer, until] : strangers) {
      char bytes[256];
      const ssize_t count = recv(peer->socket.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
      if (count > 0) peer->input.append(bytes, static_cast<size_t>(count));
      peer->open = count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
      std::optional<std::pair<LinkMessage, std::string>> hello;
      if (!TakeMessage(peer->input, hello)) peer->open = false;
      if (!hello.has_value()) continue;
      const std::string_view text = hello->second;
      const std::optional<int> rank =
          text.size() > kLinkKeyDigits ? Number(text.substr(kLinkKeyDigits)) : std::nullopt;
      peer->open = false;
      if (hello->first != LinkMessage::kHello || !rank.has_value() || *rank < 1 ||
          *rank >= ranks_ || known[static_cast<size_t>(*rank)] ||
          !SameKey(text.substr(0, kLinkKeyDigits), key_)) {
        continue;
      }
      known[static_cast<size_t>(*rank)] = true;
      auto joined = std::make_unique<Peer>(*rank, std::move(peer->socket));
      joined->input = std::move(peer->input);
      const MutexLock lock(mutex_);
      Send(*joined, LinkMessage::kBeat, "");
      peers_.push_back(std::move(joined));
    }
    std::erase_if(strangers, [&](const auto& s) { return !s.first->open || s.second < now; });
  }
  listeners_.clear();
  return absl::OkStatus();
}

Result<std::unique_ptr<Link>> Link::Connect(std::string_view invitation, int rank,
                                            absl::Duration timeout, const LinkOptions& options) {
  std::vector<std::string> words(1);
  for (const char c : invitation) {
    if (c == ' ') {
      words.emplace_back();
    } else {
      words.back() += c;
    }
  }
  const std::optional<int> port = words.size() < 3 ? std::nullopt : Number(words[1]);
  if (!port.has_value()) return absl::InternalError("link: expected an invitation, found none");
  std::unique_ptr<Link> link(new Link(options));
  const std::string hello = MessageBytes(LinkMessage::kHello, Concat(words[0], rank));
  const absl::Time deadline = SteadyNow() + timeout;
  std::string tried;
  do {
    tried.clear();
    for (size_t i = 2; i < words.size(); ++i) {
      std::optional<Descriptor> socket;
      std::string reason = EachAddress(words[i], *port, 0, [&](const addrinfo& address) {
        Descriptor connected = ConnectTo(address, std::min(timeout, kConnectTime));
        if (connected.get() < 0) return false;
        socket.emplace(std::move(connected));
        return true;
      });
      // Only the leader answers: something else may listen on this port of another machine.
      char answer[kLinkHeaderBytes];
      if (socket.has_value() &&
          send(socket->get(), hello.data(), hello.size(), MSG_NOSIGNAL) == std::ssize(hello) &&
          WaitForEvent(socket->get(), POLLIN, kHelloTime) &&
          recv(socket->get(), answer, sizeof(answer), 0) == sizeof(answer) &&
          std::string_view(answer, sizeof(answer)) == MessageBytes(LinkMessage::kBeat, "")) {
        link->peers_.push_back(std::make_unique<Peer>(0, *std::move(socket)));
        return link;
      }
      if (reason.empty()) reason = "no answer";
      tried += Concat(tried.empty() ? "" : "; ", words[i], ": ", reason);
    }
    absl::SleepFor(kBetweenAttempts);
  } while (SteadyNow() < deadline);
  return absl::UnavailableError(
      Concat("the link to rank 0 could not be opened (port ", *port, "; ", tried, ")"));
}

bool Link::Send(Peer& peer, LinkMessage kind, std::string_view text) {
  const std::string bytes = MessageBytes(kind, text.substr(0, kMostText));
  const ssize_t sent =
      send(peer.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  // A peer that reads nothing is lost by its silence. A part of a message cannot be continued.
  return sent == std::ssize(bytes) || (sent < 0 && errno == EAGAIN);
}

void Link::Watch(OnLoss on_loss) {
  on_loss_ = std::move(on_loss);
  {
    const MutexLock lock(mutex_);
    open_ = static_cast<int>(peers_.size());
  }
  for (const auto& peer : peers_) peer->heard = SteadyNow();
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "link");
    Run();
  });
}

void Link::Lose(Peer& peer, std::string reason) {
  bool told = false;
  {
    const MutexLock lock(mutex_);
    if (!peer.open) return;
    peer.open = false;
    shutdown(peer.socket.get(), SHUT_RDWR);
    --open_;
    told = !quiet_;
  }
  changed_.notify_all();
  if (told) on_loss_(peer.rank, reason);
}

void Link::Handle(Peer& peer, LinkMessage kind, std::string text) {
  switch (kind) {
    case LinkMessage::kHello:
    case LinkMessage::kBeat:
      return;
    case LinkMessage::kWake: {
      const MutexLock lock(mutex_);
      woken_ = true;
      break;
    }
    case LinkMessage::kError:
      return Lose(peer, std::move(text));
    case LinkMessage::kLoss:
      if (!ReportLoss(text)) Lose(peer, "it sent an unknown loss");
      return;
    case LinkMessage::kStop: {
      const MutexLock lock(mutex_);
      quiet_ = stopped_ = true;
      break;
    }
  }
  changed_.notify_all();
}

bool Link::ReportLoss(std::string_view text) {
  const size_t space = text.find(' ');
  const std::optional<int> rank =
      space == std::string_view::npos ? std::nullopt : Number(text.substr(0, space));
  if (!leader_ || !rank.has_value() || *rank < 0 || *rank >= ranks_) return false;
  {
    const MutexLock lock(mutex_);
    if (quiet_) return true;
  }
  on_loss_(*rank, std::string(text.substr(space + 1)));
  return true;
}

void Link::Read(Peer& peer) {
  char bytes[4096];
  for (;;) {
    const ssize_t count = recv(peer.socket.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    if (count <= 0) {
      // A process that ends with unread messages resets its connections.
      const bool ended = count == 0 || errno == ECONNRESET || errno == EPIPE;
      return Lose(peer, ended ? "its process has ended" : "its connection: " + SystemError());
    }
    peer.heard = SteadyNow();
    peer.input.append(bytes, static_cast<size_t>(count));
    std::optional<std::pair<LinkMessage, std::string>> message;
    do {
      if (!TakeMessage(peer.input, message)) return Lose(peer, "it sent an unknown message");
      if (message.has_value()) Handle(peer, message->first, std::move(message->second));
    } while (message.has_value());
  }
}

int Link::SilentRank() const {
  const MutexLock lock(mutex_);
  return lost_silent_ >= 0 ? lost_silent_ : silent_rank_;
}

absl::Duration Link::Beat(absl::Time now) {
  absl::Duration wait = options_.beat;
  absl::Duration longest = 2 * options_.beat;
  int silent_rank = -1;
  for (const auto& peer : peers_) {
    bool broken = false;
    {
      const MutexLock lock(mutex_);
      if (!peer->open) continue;
      broken = !Send(*peer, LinkMessage::kBeat, "");
    }
    const absl::Duration silence = now - peer->heard;
    if (silence >= longest) {
      longest = silence;
      silent_rank = peer->rank;
    }
    if (broken) {
      Lose(*peer, "its process has ended");
    } else if (silence > options_.silence) {
      {
        const MutexLock lock(mutex_);
        lost_silent_ = peer->rank;
      }
      Lose(*peer, Concat("nothing was heard from it for ", absl::FormatDuration(options_.silence)));
    } else {
      wait = std::min(wait, options_.silence - silence);
    }
  }
  const MutexLock lock(mutex_);
  silent_rank_ = silent_rank;
  return wait;
}

void Link::Run() {
  absl::Time next = SteadyNow();
  for (;;) {
    absl::Time now = SteadyNow();
    // While this process does not run, its machine may not either, and others with it: that is not
    // their silence. What they have sent in the meantime has not been read yet.
    if (now - next > kLate) {
      for (const auto& peer : peers_) peer->heard += now - next;
    }
    if (now >= next) next = now + Beat(now);
    std::vector<pollfd> waited = {{interrupt_.get(), POLLIN, 0}};
    std::vector<Peer*> read;
    {
      const MutexLock lock(mutex_);
      if (ending_) return;
      for (const auto& peer : peers_) {
        if (!peer->open) continue;
        waited.push_back({peer->socket.get(), POLLIN, 0});
        read.push_back(peer.get());
      }
    }
    poll(waited.data(), waited.size(), PollMilliseconds(next - SteadyNow()));
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t interrupts = ::read(interrupt_.get(), &count, sizeof(count));
    for (size_t i = 0; i < read.size(); ++i) {
      if (waited[i + 1].revents != 0) Read(*read[i]);
    }
  }
}

void Link::Wake() {
  const MutexLock lock(mutex_);
  for (const auto& peer : peers_) {
    if (peer->open) Send(*peer, LinkMessage::kWake, "");
  }
}

void Link::WaitForWake(absl::Duration timeout) {
  MutexLock lock(mutex_);
  changed_.wait_for(lock, absl::ToChronoMicroseconds(timeout),
                    [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return woken_; });
  woken_ = false;
}

void Link::SendError(std::string_view reason) {
  const MutexLock lock(mutex_);
  for (const auto& peer : peers_) {
    if (peer->open) Send(*peer, LinkMessage::kError, reason);
  }
}

void Link::SendLoss(int rank, std::string_view reason) {
  const MutexLock lock(mutex_);
  for (const auto& peer : peers_) {
    if (peer->open) Send(*peer, LinkMessage::kLoss, Concat(rank, ' ', reason));
  }
}

bool Link::Stop(absl::Duration timeout) {
  MutexLock lock(mutex_);
  quiet_ = true;
  for (const auto& peer : peers_) {
    if (leader_ && peer->open) Send(*peer, LinkMessage::kStop, "");
  }
  const bool ended = changed_.wait_for(
      lock, absl::ToChronoMicroseconds(timeout),
      [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return open_ == 0 || stopped_; });
  return ended && lost_silent_ < 0;
}

}  // namespace moeserve

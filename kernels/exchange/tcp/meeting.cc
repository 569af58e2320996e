#include "kernels/exchange/tcp/meeting.h"

#include <netdb.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "base/steady_clock.h"
#include "kernels/exchange/tcp/meeting_messages.h"
#include "kernels/exchange/tcp/sockets.h"

namespace moeserve {
namespace {

// A connection that says nothing must not keep others from being accepted.
constexpr size_t kMostSilentGuests = 256;
constexpr absl::Duration kGreetingTime = absl::Seconds(2);
// How long an error waits for the ranks that shall have it, too.
constexpr absl::Duration kErrorTime = absl::Seconds(2);
constexpr absl::Duration kPauseBetweenAttempts = absl::Milliseconds(100);
constexpr absl::Duration kLookAround = absl::Milliseconds(100);

Result<std::string> NewNonce() {
  std::string nonce(kNonceBytes, '\0');
  if (getrandom(nonce.data(), nonce.size(), 0) != std::ssize(nonce)) {
    return absl::UnavailableError("the system has no random numbers");
  }
  return nonce;
}

bool SendAll(int fd, std::string_view bytes) {
  // The messages of a meeting fit into the buffer of a new connection.
  return send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == std::ssize(bytes);
}

// Receives until `bytes` has `size` bytes. False if that takes too long, the connection ends, or
// `stop` returns true.
bool ReceiveAll(int fd, std::string& bytes, size_t size, absl::Time until,
                const std::function<bool()>& stop = {}) {
  while (bytes.size() < size) {
    if (SteadyNow() > until || (stop && stop())) return false;
    WaitForEvent(fd, POLLIN, std::min(until - SteadyNow(), kLookAround));
    char part[4096];
    const ssize_t count = recv(fd, part, std::min(sizeof(part), size - bytes.size()), MSG_DONTWAIT);
    if (count > 0) bytes.append(part, static_cast<size_t>(count));
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) return false;
  }
  return true;
}

// Whether the other end has closed an idle connection.
bool IsClosed(int fd) {
  char byte;
  const ssize_t count = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
}

// Returns the numeric address of this end of a connection, or of the other one.
std::string AddressOf(int fd, bool own) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  char host[NI_MAXHOST];
  if ((own ? getsockname(fd, any, &size) : getpeername(fd, any, &size)) != 0 ||
      getnameinfo(any, size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) != 0) {
    return "";
  }
  return host;
}

std::string HostOf(const RankHello& hello) { return Printable(hello.host); }

// A process that has connected and proven that it has the key.
struct Guest {
  Descriptor socket;
  RankHello hello;
};

void Answer(const Guest& guest, const MeetingAnswer& answer, const std::string& key) {
  SendAll(guest.socket.get(), SerializeAnswer(answer, key, guest.hello.nonce));
}

// Accepts connections and receives their greetings.
class Door {
 public:
  Door(std::vector<Descriptor> listeners, std::string key)
      : listeners_(std::move(listeners)), key_(std::move(key)) {}

  // Returns the next process that greets with the key, or nothing after some time.
  std::optional<Guest> Next(absl::Time until);
  int other_keys() const { return other_keys_; }

 private:
  struct Silent {
    Descriptor socket;
    std::string challenge;
    std::string input = {};
    absl::Time until;
    bool done = false;
  };
  void AcceptAll(absl::Time now);
  // Returns the guest if the greeting is complete and proven.
  std::optional<Guest> Listen(Silent& silent);

  std::vector<Descriptor> listeners_;
  const std::string key_;
  std::vector<std::unique_ptr<Silent>> silent_;
  int other_keys_ = 0;
};

void Door::AcceptAll(absl::Time now) {
  for (const Descriptor& listener : listeners_) {
    Descriptor socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.get() < 0 || silent_.size() >= kMostSilentGuests) continue;
    SetSocketOptions(socket.get());
    auto nonce = NewNonce();
    if (!nonce.ok() || !SendAll(socket.get(), SerializeChallenge(*nonce))) continue;
    silent_.push_back(std::make_unique<Silent>(Silent{.socket = std::move(socket),
                                                      .challenge = *std::move(nonce),
                                                      .until = now + kGreetingTime}));
  }
}

std::optional<Guest> Door::Listen(Silent& silent) {
  const int fd = silent.socket.get();
  char bytes[kHelloBytes];
  const ssize_t count = recv(fd, bytes, kHelloBytes - silent.input.size(), MSG_DONTWAIT);
  if (count > 0) silent.input.append(bytes, static_cast<size_t>(count));
  silent.done = count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
  if (silent.done || silent.input.size() < kHelloBytes) return std::nullopt;
  silent.done = true;
  auto hello = ParseHello(silent.input);
  if (!hello.ok()) return std::nullopt;
  if (!HelloIsProven(silent.input, key_, silent.challenge)) {
    ++other_keys_;
    SendAll(fd, SerializeAnswer({.other_key = true}, key_, ""));
    return std::nullopt;
  }
  return Guest{.socket = std::move(silent.socket), .hello = *std::move(hello)};
}

std::optional<Guest> Door::Next(absl::Time until) {
  for (;;) {
    const absl::Time now = SteadyNow();
    AcceptAll(now);
    std::optional<Guest> guest;
    for (const auto& silent : silent_) {
      if (!guest.has_value()) guest = Listen(*silent);
    }
    std::erase_if(silent_, [now](const auto& s) { return s->done || s->until < now; });
    if (guest.has_value() || now > until) return guest;
    std::vector<pollfd> waited;
    for (const Descriptor& listener : listeners_) waited.push_back({listener.get(), POLLIN, 0});
    for (const auto& silent : silent_) waited.push_back({silent->socket.get(), POLLIN, 0});
    poll(waited.data(), waited.size(), PollMilliseconds(std::min(until - now, kLookAround)));
  }
}

// Connects to an address, introduces this rank and returns the connection. `own` may be changed
// once there is a connection, before it is told.
Result<Guest> Introduce(const std::string& host, int port, const std::string& key,
                        absl::Time deadline, RankHello own,
                        const std::function<absl::Status(int fd, RankHello&)>& prepare = {}) {
  std::optional<Descriptor> socket;
  const std::string reason = EachAddress(host, port, 0, [&](const addrinfo& address) {
    Descriptor connected =
        ConnectTo(address, std::clamp(deadline - SteadyNow(), absl::ZeroDuration(), kGreetingTime));
    if (connected.get() < 0) return false;
    socket.emplace(std::move(connected));
    return true;
  });
  if (!socket.has_value()) return absl::UnavailableError(reason);
  const int fd = socket->get();
  std::string bytes;
  if (!ReceiveAll(fd, bytes, kChallengeBytes, SteadyNow() + kGreetingTime)) {
    return absl::UnavailableError("no answer");
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::string challenge, ParseChallenge(bytes));
  MOESERVE_ASSIGN_OR_RETURN(own.nonce, NewNonce());
  if (prepare) MOESERVE_RETURN_IF_ERROR(prepare(fd, own));
  if (!SendAll(fd, SerializeHello(own, key, challenge))) {
    return absl::UnavailableError("it closed the connection");
  }
  return Guest{.socket = *std::move(socket), .hello = std::move(own)};
}

// Waits for the answer to an introduction. Unavailable if there is none.
Result<MeetingAnswer> AwaitAnswer(const Guest& own, const std::string& key, absl::Time deadline,
                                  const std::function<bool()>& stop = {}) {
  std::string bytes;
  const int fd = own.socket.get();
  if (!ReceiveAll(fd, bytes, kAnswerHeaderBytes, deadline, stop)) {
    return absl::UnavailableError("it closed the connection without an answer");
  }
  MOESERVE_ASSIGN_OR_RETURN(const size_t size, AnswerBytes(bytes));
  if (!ReceiveAll(fd, bytes, size, std::min(deadline, SteadyNow() + kGreetingTime))) {
    return absl::UnavailableError("its answer ended too early");
  }
  return ParseAnswer(bytes, key, own.hello.nonce);
}

class Meeting {
 public:
  explicit Meeting(const MeetingOptions& options)
      : options_(options), deadline_(SteadyNow() + options.timeout) {
    for (int r = 0; r < options.ranks; ++r) peers_.emplace_back(-1);
  }

  absl::Status Lead();
  absl::Status Follow();
  std::vector<Descriptor> TakePeers() { return std::move(peers_); }

 private:
  std::string Place() const { return Concat(options_.host, ':', options_.port); }
  RankHello Own() const {
    return {.rank = static_cast<uint32_t>(options_.rank),
            .ranks = static_cast<uint32_t>(options_.ranks),
            .host = options_.name};
  }
  // Returns why a process cannot be a rank; `known` has those that are.
  absl::Status Judge(const Guest& guest, std::vector<std::optional<Guest>>& known) const;
  absl::Status Missing(const std::vector<std::optional<Guest>>& known, int other_keys) const;
  // Connects to rank 0, tells where this rank listens, and receives where others do.
  Result<RankAddresses> JoinLeader(std::vector<Descriptor>& listeners);
  absl::Status ConnectToRank(int rank, const std::string& address, int port);
  absl::Status AcceptLaterRanks(std::vector<Descriptor> listeners);
  bool LeaderHasEnded() const { return IsClosed(peers_[0].get()); }

  const MeetingOptions& options_;
  const absl::Time deadline_;
  std::vector<Descriptor> peers_;
};

absl::Status Meeting::Judge(const Guest& guest, std::vector<std::optional<Guest>>& known) const {
  const RankHello& hello = guest.hello;
  const std::string who = Concat("rank ", hello.rank, " on ", HostOf(hello));
  const std::string as_leader = Concat(" as rank 0 on ", Printable(options_.name));
  if (hello.protocol != kMeetingProtocol) {
    return absl::FailedPreconditionError(Concat(who, ": another version of the program (protocol ",
                                                hello.protocol, ", expected ", kMeetingProtocol,
                                                as_leader, ')'));
  }
  const auto ranks = static_cast<uint32_t>(options_.ranks);
  if (hello.ranks != ranks) {
    return absl::InvalidArgumentError(
        Concat(who, ": number of ranks: expected ", ranks, as_leader, ", found ", hello.ranks));
  }
  if (hello.rank == 0 || hello.rank >= ranks) {
    return absl::InvalidArgumentError(Concat("a process on ", HostOf(hello),
                                             ": number of the rank: expected 1 to ", ranks - 1,
                                             ", found ", hello.rank));
  }
  std::optional<Guest>& earlier = known[hello.rank];
  // One that has ended can be started again.
  if (earlier.has_value() && IsClosed(earlier->socket.get())) earlier.reset();
  if (!earlier.has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError(Concat("rank ", hello.rank,
                                           ": expected one process, found two, on ",
                                           HostOf(earlier->hello), " and ", HostOf(hello)));
}

absl::Status Meeting::Missing(const std::vector<std::optional<Guest>>& known,
                              int other_keys) const {
  std::string missing;
  int count = 0;
  for (int r = 1; r < options_.ranks; ++r) {
    if (known[static_cast<size_t>(r)].has_value()) continue;
    missing += Concat(missing.empty() ? "" : ", ", r);
    ++count;
  }
  std::string message = Concat(count == 1 ? "rank " : "ranks ", missing,
                               count == 1 ? " has" : " have", " not connected to rank 0 at ",
                               Place(), " within ", absl::FormatDuration(options_.timeout));
  if (other_keys > 0) message += Concat("; ", other_keys, " connections had another key");
  return absl::UnavailableError(message);
}

absl::Status Meeting::Lead() {
  std::vector<Descriptor> listeners;
  int port = options_.port;
  const std::string reason =
      EachAddress(options_.host, port, AI_PASSIVE, [&](const addrinfo& address) {
        Descriptor socket = ListenAt(address, port);
        if (socket.get() < 0) return false;
        listeners.push_back(std::move(socket));
        return true;
      });
  if (listeners.empty()) {
    return absl::UnavailableError(Concat("cannot listen on ", Place(), ": ", reason));
  }
  Door door(std::move(listeners), options_.key);
  std::vector<std::optional<Guest>> known(static_cast<size_t>(options_.ranks));
  std::vector<Guest> others;  // that cannot be ranks
  absl::Status status;
  absl::Time until = deadline_;
  // One that has ended while it waited is missing again.
  const auto complete = [&] {
    for (auto& guest : known) {
      if (guest.has_value() && IsClosed(guest->socket.get())) guest.reset();
    }
    return std::all_of(known.begin() + 1, known.end(),
                       [](const auto& guest) { return guest.has_value(); });
  };
  while (!complete() || !status.ok()) {
    std::optional<Guest> guest = door.Next(until);
    if (!guest.has_value()) {
      if (status.ok() && !complete()) status = Missing(known, door.other_keys());
      break;
    }
    const absl::Status verdict = Judge(*guest, known);
    if (verdict.ok()) {
      const uint32_t rank = guest->hello.rank;
      known[rank] = std::move(guest);
      continue;
    }
    others.push_back(*std::move(guest));
    if (!status.ok()) continue;
    status = verdict;
    until = std::min(deadline_, SteadyNow() + kErrorTime);
  }
  MeetingAnswer answer{.status = status};
  if (status.ok()) {
    RankAddresses addresses;
    for (int r = 1; r < options_.ranks; ++r) {
      const Guest& guest = *known[static_cast<size_t>(r)];
      addresses.emplace_back(AddressOf(guest.socket.get(), /*own=*/false), guest.hello.port);
    }
    answer.text = SerializeAddresses(addresses);
  }
  for (const Guest& guest : others) Answer(guest, answer, options_.key);
  for (size_t r = 1; r < known.size(); ++r) {
    if (!known[r].has_value()) continue;
    Answer(*known[r], answer, options_.key);
    peers_[r] = std::move(known[r]->socket);
  }
  return status;
}

Result<RankAddresses> Meeting::JoinLeader(std::vector<Descriptor>& listeners) {
  const std::string leader = Concat("rank 0 at ", Place(), ": ");
  const auto listen = [&](int fd, RankHello& own) -> absl::Status {
    listeners.clear();
    int port = 0;
    const std::string reason = EachAddress(
        AddressOf(fd, /*own=*/true), 0, AI_NUMERICHOST | AI_PASSIVE, [&](const addrinfo& address) {
          Descriptor socket = ListenAt(address, port);
          if (socket.get() < 0) return false;
          listeners.push_back(std::move(socket));
          return true;
        });
    own.port = static_cast<uint32_t>(port);
    return listeners.empty() ? absl::UnavailableError("cannot listen: " + reason)
                             : absl::OkStatus();
  };
  for (;;) {
    auto own = Introduce(options_.host, options_.port, options_.key, deadline_, Own(), listen);
    absl::Status failed = own.status();
    if (own.ok()) {
      auto answer = AwaitAnswer(*own, options_.key, deadline_);
      failed = answer.status();
      if (answer.ok() && answer->other_key) {
        return absl::PermissionDeniedError(leader + "it has another key");
      }
      if (answer.ok()) {
        MOESERVE_RETURN_IF_ERROR(answer->status);
        peers_[0] = std::move(own->socket);
        return ParseAddresses(answer->text, static_cast<size_t>(options_.ranks) - 1);
      }
    }
    // It may not have started yet, or start again.
    if (SteadyNow() + kPauseBetweenAttempts > deadline_) {
      return Prefixed(
          Concat(leader, "no meeting within ", absl::FormatDuration(options_.timeout), ": "),
          absl::UnavailableError(failed.message()));
    }
    absl::SleepFor(kPauseBetweenAttempts);
  }
}

absl::Status Meeting::ConnectToRank(int rank, const std::string& address, int port) {
  for (;;) {
    auto own = Introduce(address, port, options_.key, deadline_, Own());
    absl::Status failed = own.status();
    if (own.ok()) {
      auto answer = AwaitAnswer(*own, options_.key, deadline_, [this] { return LeaderHasEnded(); });
      if (answer.ok() && !answer->other_key && answer->status.ok()) {
        peers_[static_cast<size_t>(rank)] = std::move(own->socket);
        return absl::OkStatus();
      }
      failed = answer.ok() ? answer->status : answer.status();
    }
    if (LeaderHasEnded()) return absl::UnavailableError("rank 0 has ended");
    if (SteadyNow() > deadline_) {
      return Prefixed(Concat("rank ", rank, " at ", address, ':', port, ": "), failed);
    }
    absl::SleepFor(kPauseBetweenAttempts);
  }
}

absl::Status Meeting::AcceptLaterRanks(std::vector<Descriptor> listeners) {
  Door door(std::move(listeners), options_.key);
  const auto missing = [&] {
    for (size_t r = static_cast<size_t>(options_.rank) + 1; r < peers_.size(); ++r) {
      if (peers_[r].get() < 0) return static_cast<int>(r);
    }
    return -1;
  };
  while (missing() >= 0) {
    if (LeaderHasEnded()) return absl::UnavailableError("rank 0 has ended");
    if (SteadyNow() > deadline_) {
      return absl::UnavailableError(Concat("rank ", missing(), " has not connected to rank ",
                                           options_.rank, " within ",
                                           absl::FormatDuration(options_.timeout)));
    }
    std::optional<Guest> guest = door.Next(std::min(deadline_, SteadyNow() + kLookAround));
    if (!guest.has_value()) continue;
    const uint32_t rank = guest->hello.rank;
    // What rank 0 has accepted is right; anything else is not of this meeting.
    if (rank <= static_cast<uint32_t>(options_.rank) || rank >= peers_.size()) continue;
    Answer(*guest, {}, options_.key);
    peers_[rank] = std::move(guest->socket);
  }
  return absl::OkStatus();
}

absl::Status Meeting::Follow() {
  std::vector<Descriptor> listeners;
  MOESERVE_ASSIGN_OR_RETURN(const RankAddresses addresses, JoinLeader(listeners));
  // Lower ranks listen already: each has told its address to rank 0.
  for (int r = 1; r < options_.rank; ++r) {
    const auto& [address, port] = addresses[static_cast<size_t>(r) - 1];
    MOESERVE_RETURN_IF_ERROR(ConnectToRank(r, address, port));
  }
  return AcceptLaterRanks(std::move(listeners));
}

}  // namespace

Result<std::vector<Descriptor>> MeetRanks(const MeetingOptions& options) {
  MOESERVE_CHECK(options.rank >= 0 && options.rank < options.ranks, "the number of a rank");
  Meeting meeting(options);
  if (options.ranks > 1) {
    MOESERVE_RETURN_IF_ERROR(options.rank == 0 ? meeting.Lead() : meeting.Follow());
  }
  return meeting.TakePeers();
}

}  // namespace moeserve

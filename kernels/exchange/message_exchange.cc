#include "kernels/exchange/message_exchange.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "base/check.h"
#include "base/error_text.h"
#include "base/steady_clock.h"

namespace moeserve {
namespace {

// Attempts before a waiting thread lets others run. Ranks can share a core.
constexpr int kAttemptsBeforeYield = 100;
// A rank that waits without a deadline polls for this time, then sleeps between attempts.
constexpr absl::Duration kPollTime = absl::Milliseconds(2);
constexpr absl::Duration kSleep = absl::Microseconds(500);
// How long a rank that is woken may sleep at a time, if a wake-up should be lost.
constexpr absl::Duration kLongSleep = absl::Milliseconds(20);
// The leader wakes others if the last call is older than this. It is far less than kPollTime,
// because other ranks may have ended that call earlier.
constexpr absl::Duration kAwakeTime = absl::Microseconds(500);
// A waiting thread that does not run for so long shares its machine with too much other work, or
// the machine stands still. That is not the time of the rank that it waits for, which may be there.
constexpr absl::Duration kPause = absl::Milliseconds(200);
// The time between two checks of SetWaitCheck(), and before the first one.
constexpr absl::Duration kCheckTime = absl::Milliseconds(25);
// How long the leader waits, after a failure or a deadline, for Lose() to tell the rank and why.
constexpr absl::Duration kReasonTime = absl::Milliseconds(200);

}  // namespace

MessageExchange::MessageExchange(std::unique_ptr<Transport> transport, Options options)
    : transport_(std::move(transport)), options_(options) {
  const MutexLock lock(mutex_);
  counts_.wait_seconds.resize(static_cast<size_t>(ranks()));
}

std::string MessageExchange::RankName(int rank) const {
  const auto i = static_cast<size_t>(rank);
  return i < names_.size() ? Concat("rank ", rank, " on ", names_[i]) : Concat("rank ", rank);
}

int MessageExchange::lost_rank() const {
  MutexLock lock(mutex_);
  return lost_rank_;
}

void MessageExchange::Fail(absl::Status status, int rank) {
  MutexLock lock(mutex_);
  if (!status_.ok()) return;
  status_ = std::move(status);
  lost_rank_ = rank;
  lost_.store(true, std::memory_order_release);
}

void MessageExchange::Lose(int rank, std::string_view reason) {
  Fail(absl::UnavailableError(Concat(RankName(rank), " was lost: ", reason)), rank);
}

absl::Status MessageExchange::status() const {
  MutexLock lock(mutex_);
  return status_;
}

void MessageExchange::CountSent(int64_t bytes) {
  const MutexLock lock(mutex_);
  counts_.bytes_sent += static_cast<uint64_t>(bytes);
  counts_.sent_by[static_cast<size_t>(kind_)] += static_cast<uint64_t>(bytes);
}

void MessageExchange::CountReceived(int64_t bytes) {
  const MutexLock lock(mutex_);
  counts_.bytes_received += static_cast<uint64_t>(bytes);
}

void MessageExchange::Send(int rank, const void* data, int64_t bytes) {
  if (bytes == 0 || lost()) return;
  if (counting_) CountSent(bytes);
  if (const char* error = transport_->Send(rank, data, bytes)) LoseFailed(rank, error);
}

void MessageExchange::Receive(int rank, void* data, int64_t bytes) {
  if (bytes == 0 || lost()) return;
  if (counting_) CountReceived(bytes);
  if (const char* error = transport_->Receive(rank, data, bytes)) LoseFailed(rank, error);
}

void MessageExchange::LoseFailed(int rank, const char* error) {
  const int failed = transport_->failed_rank();
  if (failed < 0 && rank < 0)
    return Fail(absl::UnavailableError(Concat("a rank was lost: ", error)));
  Lose(failed >= 0 ? failed : rank, error);
}

ExchangeCounts MessageExchange::counts() const {
  const MutexLock lock(mutex_);
  return counts_;
}

void MessageExchange::WaitForReason() const {
  if (rank() != 0) return;
  const absl::Time until = SteadyNow() + kReasonTime;
  while (!lost() && SteadyNow() < until) absl::SleepFor(kSleep);
}

void MessageExchange::Wait(std::vector<double>* arrived, bool patient) {
  const absl::Time start = SteadyNow();
  std::vector<bool> noted(arrived == nullptr ? 0 : arrived->size());
  absl::Time last_attempt = start, next_check = start + kCheckTime;
  absl::Duration paused;
  for (int attempt = 0; !lost(); ++attempt) {
    if (const char* error = transport_->Advance()) {
      WaitForReason();
      return LoseFailed(-1, error);
    }
    const absl::Time now = SteadyNow();
    const absl::Duration waited = now - start;
    if (now - last_attempt > kPause) paused += now - last_attempt;
    last_attempt = now;
    int missing = -1;  // the first rank with a message that has not arrived
    int silent = -1;   // the first rank that has not taken a message
    for (int r = 0; r < ranks(); ++r) {
      if (silent < 0 && transport_->unfinished_sends(r) > 0) silent = r;
      const bool complete = transport_->unfinished_receives(r) == 0;
      if (!complete && missing < 0) missing = r;
      const auto i = static_cast<size_t>(r);
      if (i < noted.size() && complete && !noted[i]) {
        noted[i] = true;
        if (r != rank()) (*arrived)[i] = absl::ToDoubleSeconds(waited);
      }
    }
    if (missing < 0 && silent < 0) {
      last_ = start + waited;
      return;
    }
    if (patient && waited > kPollTime) {
      if (options_.sleep) {
        options_.sleep(kLongSleep);
      } else {
        absl::SleepFor(kSleep);
      }
      continue;
    }
    if (!patient && check_ && now > next_check) {
      if (absl::Status checked = check_(); !checked.ok()) return Fail(std::move(checked), rank());
      next_check = now + kCheckTime;
    }
    if (!patient && waited - paused > options_.timeout) {
      WaitForReason();
      const std::string what = Concat(" within ", absl::FormatDuration(options_.timeout));
      return missing >= 0 ? Lose(missing, "it sent nothing" + what)
                          : Lose(silent, "it took no message" + what);
    }
    if (attempt >= kAttemptsBeforeYield && waited >= options_.spin) std::this_thread::yield();
  }
}

std::string MessageExchange::Describe(const Call& call) {
  const char* const names[kExchangeKinds] = {"a gather", "a broadcast", "a gather at the leader",
                                             "an all-to-all"};
  const auto kind = static_cast<uint32_t>(call.kind);
  const std::string name = Concat("call ", call.number, ", ",
                                  kind < kExchangeKinds ? names[kind] : "an unknown function");
  if (call.kind == ExchangeKind::kAllToAll) {
    return Concat(name, " that sends ", call.sizes, " and receives ", call.bytes, " bytes");
  }
  return Concat(name, " of ", call.bytes, " bytes");
}

void MessageExchange::CompareCalls(ExchangeKind kind, std::span<const int64_t> sizes, bool everyone,
                                   bool patient) {
  kind_ = kind;
  Call own{.number = calls_++, .kind = kind};
  for (const int64_t size : sizes) {
    own.sizes = (own.sizes ^ static_cast<uint64_t>(size)) * 0x9E3779B97F4A7C15u;
    own.bytes += static_cast<uint64_t>(size);
  }
  if (!options_.check_order || lost()) return;
  const std::vector<Call> calls(static_cast<size_t>(ranks()), own);
  Compare(calls, calls, everyone, patient);
}

void MessageExchange::Compare(std::span<const Call> told, std::span<const Call> expected,
                              bool everyone, bool patient) {
  counting_ = false;  // release builds do not send these messages
  std::vector<Call> others(expected.begin(), expected.end());
  const auto takes_part = [&](int r) { return r != rank() && (everyone || r == 0 || rank() == 0); };
  for (int r = 0; r < ranks(); ++r) {
    if (takes_part(r)) Receive(r, &others[static_cast<size_t>(r)], sizeof(Call));
  }
  for (int r = 0; r < ranks(); ++r) {
    if (takes_part(r)) Send(r, &told[static_cast<size_t>(r)], sizeof(Call));
  }
  Wait(nullptr, patient);
  counting_ = true;
  if (lost()) return;
  for (int r = 0; r < ranks(); ++r) {
    const auto i = static_cast<size_t>(r);
    if (std::memcmp(&expected[i], &others[i], sizeof(Call)) != 0) {
      Fail(absl::InternalError(
          Concat("the ranks are at different calls of the exchange: ", RankName(rank()), " at ",
                 Describe(told[i]), "; ", RankName(r), " at ", Describe(others[i]))));
      return;
    }
  }
}

void MessageExchange::BeginGather(std::span<const int64_t> bytes) {
  MOESERVE_CHECK(!gathering_, "one exchange at a time");
  MOESERVE_CHECK(std::ssize(bytes) == ranks(), "a part for every rank");
  for (const int64_t size : bytes) MOESERVE_CHECK(size >= 0, "sizes of parts");
  gathering_ = true;
  gather_start_ = SteadyNow();
  CompareCalls(ExchangeKind::kGather, bytes, /*everyone=*/true);
}

void MessageExchange::StartGather(void* buffer, std::span<const int64_t> bytes) {
  BeginGather(bytes);
  auto* part = static_cast<char*>(buffer);
  char* own = nullptr;
  // Receives are started first, so that no message has to be kept by the transport.
  for (int r = 0; r < ranks(); ++r) {
    const int64_t size = bytes[static_cast<size_t>(r)];
    if (r == rank()) {
      own = part;
    } else {
      Receive(r, part, size);
    }
    part += size;
  }
  // Rank r begins with rank r + 1, so that no rank is the first of all others.
  for (int i = 1; i < ranks(); ++i) {
    Send((rank() + i) % ranks(), own, bytes[static_cast<size_t>(rank())]);
  }
}

void MessageExchange::BeginAllToAll(std::span<const int64_t> send_bytes,
                                    std::span<const int64_t> receive_bytes) {
  MOESERVE_CHECK(!gathering_, "one exchange at a time");
  MOESERVE_CHECK(std::ssize(send_bytes) == ranks() && std::ssize(receive_bytes) == ranks(),
                 "parts for and from every rank");
  MOESERVE_CHECK(send_bytes[static_cast<size_t>(rank())] == 0, "a rank sends nothing to itself");
  for (const int64_t size : send_bytes) MOESERVE_CHECK(size >= 0, "sizes of parts");
  for (const int64_t size : receive_bytes) MOESERVE_CHECK(size >= 0, "sizes of parts");
  gathering_ = true;
  gather_start_ = SteadyNow();
  kind_ = ExchangeKind::kAllToAll;
  const uint64_t number = calls_++;
  if (options_.check_order && !lost()) {
    std::vector<Call> told(static_cast<size_t>(ranks())), expected(told.size());
    for (size_t r = 0; r < told.size(); ++r) {
      const auto sent = static_cast<uint64_t>(send_bytes[r]);
      const auto received = static_cast<uint64_t>(receive_bytes[r]);
      told[r] = {.number = number, .sizes = sent, .bytes = received, .kind = kind_};
      expected[r] = {.number = number, .sizes = received, .bytes = sent, .kind = kind_};
    }
    Compare(told, expected, /*everyone=*/true, /*patient=*/false);
  }
}

void MessageExchange::StartAllToAll(const void* send, std::span<const int64_t> send_bytes,
                                    void* receive, std::span<const int64_t> receive_bytes) {
  BeginAllToAll(send_bytes, receive_bytes);
  std::vector<const char*> parts;
  const auto* part = static_cast<const char*>(send);
  for (const int64_t size : send_bytes) {
    parts.push_back(part);
    part += size;
  }
  auto* to = static_cast<char*>(receive);
  for (int r = 0; r < ranks(); ++r) {
    const int64_t size = receive_bytes[static_cast<size_t>(r)];
    if (r != rank()) Receive(r, to, size);
    to += size;
  }
  for (int i = 1; i < ranks(); ++i) {
    const int r = (rank() + i) % ranks();
    Send(r, parts[static_cast<size_t>(r)], send_bytes[static_cast<size_t>(r)]);
  }
}

void MessageExchange::FinishGather() {
  MOESERVE_CHECK(gathering_, "the end of an exchange follows its start");
  std::vector<double> arrived(static_cast<size_t>(ranks()));
  Wait(&arrived);
  EndGather(arrived);
}

void MessageExchange::EndGather(std::span<const double> arrived) {
  MOESERVE_CHECK(gathering_, "a gather that ends has begun");
  gathering_ = false;
  if (lost()) return;
  const double seconds = absl::ToDoubleSeconds(SteadyNow() - gather_start_);
  const auto bucket =
      std::lower_bound(kGatherSecondsBounds.begin(), kGatherSecondsBounds.end(), seconds) -
      kGatherSecondsBounds.begin();
  const MutexLock lock(mutex_);
  ++counts_.gathers;
  ++counts_.gather_times[static_cast<size_t>(bucket)];
  counts_.gather_seconds += seconds;
  for (size_t r = 0; r < arrived.size(); ++r) counts_.wait_seconds[r] += arrived[r];
}

void MessageExchange::StartBroadcast(std::span<char> message) {
  const auto bytes = static_cast<int64_t>(message.size());
  if (rank() != 0) return Receive(0, message.data(), bytes);
  for (int r = 1; r < ranks(); ++r) Send(r, message.data(), bytes);
}

void MessageExchange::Broadcast(std::span<char> message) {
  MOESERVE_CHECK(!gathering_, "no broadcast during a gather");
  const auto bytes = static_cast<int64_t>(message.size());
  CompareCalls(ExchangeKind::kBroadcast, {&bytes, 1}, /*everyone=*/false);
  StartBroadcast(message);
  Wait();
}

void MessageExchange::BroadcastWhenever(std::span<char> message) {
  MOESERVE_CHECK(!gathering_, "no broadcast during a gather");
  const auto bytes = static_cast<int64_t>(message.size());
  // The leader does not wait long, because the others are there.
  const bool patient = rank() != 0;
  if (!patient && options_.wake && SteadyNow() - last_ > kAwakeTime) options_.wake();
  CompareCalls(ExchangeKind::kBroadcast, {&bytes, 1}, /*everyone=*/false, patient);
  StartBroadcast(message);
  Wait(nullptr, patient);
}

void MessageExchange::GatherAtLeader(std::span<const char> own, std::span<char> all) {
  MOESERVE_CHECK(!gathering_, "no gather at the leader during another");
  const auto bytes = static_cast<int64_t>(own.size());
  CompareCalls(ExchangeKind::kGatherAtLeader, {&bytes, 1}, /*everyone=*/false);
  if (rank() == 0) {
    MOESERVE_CHECK(all.size() == own.size() * static_cast<size_t>(ranks()),
                   "room for the bytes of all ranks");
    if (!own.empty()) std::memcpy(all.data(), own.data(), own.size());
    for (int r = 1; r < ranks(); ++r) Receive(r, all.data() + r * bytes, bytes);
  } else {
    Send(0, own.data(), bytes);
  }
  Wait();
}

}  // namespace moeserve

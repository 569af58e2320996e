#include "kernels/exchange/nccl/nccl_exchange.h"

#include <dlfcn.h>
#include <pthread.h>

#include <condition_variable>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "base/check.h"
#include "base/error_text.h"
#include "base/steady_clock.h"
#include "kernels/exchange/nccl/nccl_api.h"

namespace moeserve {
namespace {

constexpr char kLibraryName[] = "libnccl.so.2";
// The first version whose communicators are finalized without waiting.
constexpr int kOldestVersion = NCCL_VERSION(2, 18, 0);
// How often the thread that watches an operation looks at its errors and deadline.
constexpr auto kWatchTime = std::chrono::milliseconds(20);
constexpr absl::Duration kConnectPoll = absl::Milliseconds(10);
constexpr absl::Duration kFinalizeTime = absl::Seconds(5);
// Attempts before a waiting thread lets others run.
constexpr int kAttemptsBeforeYield = 100;

// How far a rank has come in connecting.
enum class Progress : uint32_t { kWaiting, kReady, kFailed };

// What one message to or from the memory of another rank's device is.
struct Piece {
  int rank;
  char* data;
  int64_t bytes;
};

class NcclExchange final : public MessageExchange {
 public:
  NcclExchange(const NcclApi& api, std::unique_ptr<Transport> transport, Options options,
               StreamQuery query)
      : MessageExchange(std::move(transport), std::move(options)), api_(api), query_(query) {
    MOESERVE_CHECK(query_ != nullptr, "a device that can be asked");
  }
  ~NcclExchange() override;

  absl::Status ConnectDevices() override;
  bool reads_device_memory() const override { return true; }
  void StartDeviceGather(void* buffer, std::span<const int64_t> bytes, void* stream) override;
  void FinishDeviceGather() override;
  void StartDeviceAllToAll(const void* send, std::span<const int64_t> send_bytes, void* receive,
                           std::span<const int64_t> receive_bytes, void* stream) override;
  void FinishDeviceAllToAll() override { FinishDeviceGather(); }
  void Lose(int rank, std::string_view reason) override;

 private:
  // Starts a group of sends and receives, which may be empty, and waits until it is queued on the
  // stream; waits for its end. Any exchange of parts can be made of these.
  void StartGroup(std::span<const Piece> sends, std::span<const Piece> receives, void* stream);
  void FinishGroup();

  absl::Status ErrorOf(ncclResult_t result, std::string_view what)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(comm_mutex_);
  // Returns what NCCL says of the communicator: ncclInProgress while it works.
  ncclResult_t State() ABSL_EXCLUSIVE_LOCKS_REQUIRED(comm_mutex_);
  absl::Status StartConnecting(ncclUniqueId& id, bool valid);
  // Tells all ranks how far each is; returns what they have in common.
  Progress Compare(Progress own, absl::Time deadline);
  // Declares the exchange failed because of NCCL, unless the link tells the leader a better reason.
  void LoseTo(const absl::Status& error) ABSL_EXCLUSIVE_LOCKS_REQUIRED(comm_mutex_);
  void Abort() ABSL_EXCLUSIVE_LOCKS_REQUIRED(comm_mutex_);
  // The thread: aborts what runs once a rank is lost, and notices errors and deadlines.
  void Watch();

  const NcclApi api_;
  const StreamQuery query_;
  void* stream_ = nullptr;  // of the group that runs

  // NCCL's functions do not wait but for an abort, so the mutex is not held for long.
  Mutex comm_mutex_;
  std::condition_variable changed_;
  // Null before ConnectDevices(), with one rank, and once it was aborted.
  ncclComm_t comm_ ABSL_GUARDED_BY(comm_mutex_) = nullptr;
  bool runs_ ABSL_GUARDED_BY(comm_mutex_) = false;  // a group
  absl::Time deadline_ ABSL_GUARDED_BY(comm_mutex_) = absl::InfiniteFuture();
  bool ending_ ABSL_GUARDED_BY(comm_mutex_) = false;
  std::thread watch_;
};

NcclExchange::~NcclExchange() {
  {
    const MutexLock lock(comm_mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (watch_.joinable()) watch_.join();
  const MutexLock lock(comm_mutex_);
  if (comm_ == nullptr) return;
  ncclResult_t state = lost() ? ncclRemoteError : api_.comm_finalize(comm_);
  const absl::Time deadline = SteadyNow() + kFinalizeTime;
  while (state == ncclInProgress && SteadyNow() < deadline) {
    absl::SleepFor(kConnectPoll);
    state = State();
  }
  if (state == ncclSuccess) {
    api_.comm_destroy(comm_);
  } else {
    Abort();
  }
}

absl::Status NcclExchange::ErrorOf(ncclResult_t result, std::string_view what) {
  const char* const detail = comm_ == nullptr ? nullptr : api_.get_last_error(comm_);
  std::string message = Concat("NCCL: ", what, ": ", api_.get_error_string(result));
  if (detail != nullptr && *detail != '\0') message += Concat(" (", Printable(detail, 500), ")");
  return absl::UnavailableError(message);
}

ncclResult_t NcclExchange::State() {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = api_.comm_get_async_error(comm_, &state);
  return asked == ncclSuccess ? state : asked;
}

void NcclExchange::LoseTo(const absl::Status& error) {
  WaitForReason();
  Fail(Prefixed("a rank was lost: ", error));
}

void NcclExchange::Abort() {
  if (comm_ == nullptr) return;
  api_.comm_abort(comm_);
  comm_ = nullptr;
}

absl::Status NcclExchange::StartConnecting(ncclUniqueId& id, bool valid) {
  if (!valid) return absl::OkStatus();  // rank 0 tells why
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const MutexLock lock(comm_mutex_);
  const ncclResult_t result = api_.comm_init_rank_config(&comm_, ranks(), id, rank(), &config);
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  const absl::Status status = ErrorOf(result, "connecting");
  Abort();
  return status;
}

Progress NcclExchange::Compare(Progress own, absl::Time deadline) {
  std::vector<Progress> all(rank() == 0 ? static_cast<size_t>(ranks()) : 0);
  GatherAtLeader({reinterpret_cast<const char*>(&own), sizeof(own)},
                 {reinterpret_cast<char*>(all.data()), all.size() * sizeof(own)});
  auto common = Progress::kReady;
  for (const Progress one : all) {
    if (one == Progress::kFailed || common == Progress::kFailed) {
      common = Progress::kFailed;
    } else if (one == Progress::kWaiting) {
      common = Progress::kWaiting;
    }
  }
  if (common == Progress::kWaiting && SteadyNow() > deadline) common = Progress::kFailed;
  Broadcast({reinterpret_cast<char*>(&common), sizeof(common)});
  return common;
}

absl::Status NcclExchange::ConnectDevices() {
  if (ranks() == 1) return absl::OkStatus();
  struct {
    ncclUniqueId id{};
    uint32_t valid = 0;
  } invitation;
  absl::Status own;
  if (rank() == 0) {
    const ncclResult_t result = api_.get_unique_id(&invitation.id);
    invitation.valid = result == ncclSuccess ? 1 : 0;
    const MutexLock lock(comm_mutex_);
    if (result != ncclSuccess) own = ErrorOf(result, "finding an address");
  }
  Broadcast({reinterpret_cast<char*>(&invitation), sizeof(invitation)});
  MOESERVE_RETURN_IF_ERROR(status());
  if (own.ok()) own = StartConnecting(invitation.id, invitation.valid != 0);
  const absl::Time deadline = SteadyNow() + options().timeout;
  for (;;) {
    auto progress = own.ok() ? Progress::kWaiting : Progress::kFailed;
    {
      const MutexLock lock(comm_mutex_);
      if (const ncclResult_t state = comm_ == nullptr ? ncclInProgress : State();
          state == ncclSuccess) {
        progress = Progress::kReady;
      } else if (state != ncclInProgress) {
        own = ErrorOf(state, "connecting");
        progress = Progress::kFailed;
      }
    }
    const Progress common = Compare(progress, deadline);
    if (lost() || common == Progress::kFailed) {
      const MutexLock lock(comm_mutex_);
      Abort();
      if (lost()) return status();
      if (own.ok() && progress == Progress::kWaiting && SteadyNow() > deadline) {
        own = absl::UnavailableError(Concat("NCCL: the devices have not connected within ",
                                            absl::FormatDuration(options().timeout)));
      }
      return own;
    }
    if (common == Progress::kReady) break;
    absl::SleepFor(kConnectPoll);
  }
  watch_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "nccl watch");
    Watch();
  });
  return absl::OkStatus();
}

void NcclExchange::Watch() {
  MutexLock lock(comm_mutex_);
  while (!ending_) {
    if (lost()) {
      // It may take long, and Lose() must not wait for it: others have to be told of the loss.
      const ncclComm_t aborted = std::exchange(comm_, nullptr);
      lock.unlock();
      if (aborted != nullptr) api_.comm_abort(aborted);
      lock.lock();
      return;
    }
    if (!runs_) {
      changed_.wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(comm_mutex_) {
        return ending_ || runs_ || lost();
      });
      continue;
    }
    changed_.wait_for(lock, kWatchTime);
    if (!runs_ || lost()) continue;
    const ncclResult_t state = State();
    if (state != ncclSuccess && state != ncclInProgress) {
      LoseTo(ErrorOf(state, "an exchange"));
    } else if (SteadyNow() > deadline_) {
      WaitForReason();
      const std::string reason = Concat("the devices have not exchanged their parts within ",
                                        absl::FormatDuration(options().timeout));
      const int silent = options().silent_rank ? options().silent_rank() : -1;
      if (silent >= 0) {
        MessageExchange::Lose(silent, reason);
      } else {
        Fail(absl::UnavailableError(Concat("a rank was lost: ", reason)));
      }
    }
  }
}

void NcclExchange::Lose(int rank, std::string_view reason) {
  MessageExchange::Lose(rank, reason);
  { const MutexLock lock(comm_mutex_); }  // the thread waits or has not looked yet
  changed_.notify_all();
}

void NcclExchange::StartGroup(std::span<const Piece> sends, std::span<const Piece> receives,
                              void* stream) {
  stream_ = stream;
  if (lost()) return;
  for (const Piece& piece : sends) CountSent(piece.bytes);
  for (const Piece& piece : receives) CountReceived(piece.bytes);
  if (sends.empty() && receives.empty()) return;
  auto* const queue = static_cast<cudaStream_t>(stream);
  {
    const MutexLock lock(comm_mutex_);
    if (comm_ == nullptr) {
      MOESERVE_CHECK(lost(), "ConnectDevices() comes before gathers of device memory");
      return;
    }
    // An error of a part is one of the group, too.
    ncclResult_t result = api_.group_start();
    const auto note = [&result](ncclResult_t found) {
      if (result == ncclSuccess || result == ncclInProgress) result = found;
    };
    for (const Piece& piece : receives) {
      note(api_.receive(piece.data, static_cast<size_t>(piece.bytes), ncclUint8, piece.rank, comm_,
                        queue));
    }
    for (const Piece& piece : sends) {
      note(api_.send(piece.data, static_cast<size_t>(piece.bytes), ncclUint8, piece.rank, comm_,
                     queue));
    }
    note(api_.group_end());
    if (result != ncclSuccess && result != ncclInProgress) {
      LoseTo(ErrorOf(result, "starting an exchange"));  // the thread aborts
      changed_.notify_all();
      return;
    }
    runs_ = true;
    deadline_ = SteadyNow() + options().timeout;
  }
  changed_.notify_all();
  // Until the group is queued, nothing else may be put on the stream. The first group connects
  // pairs of devices, which takes a while.
  for (int attempt = 0; !lost(); ++attempt) {
    {
      const MutexLock lock(comm_mutex_);
      if (comm_ == nullptr || State() != ncclInProgress) return;
    }
    if (attempt >= kAttemptsBeforeYield) std::this_thread::yield();
  }
}

void NcclExchange::FinishGroup() {
  for (int attempt = 0; !lost(); ++attempt) {
    const Result<bool> idle = query_(stream_);
    if (!idle.ok()) {
      Fail(Prefixed("the device: ", idle.status()));
    } else if (*idle) {
      break;
    }
    if (attempt >= kAttemptsBeforeYield) std::this_thread::yield();
  }
  const MutexLock lock(comm_mutex_);
  // A stream ends its work after an error, too.
  const ncclResult_t state = runs_ && comm_ != nullptr ? State() : ncclSuccess;
  if (state != ncclSuccess) LoseTo(ErrorOf(state, "an exchange"));
  runs_ = false;
}

void NcclExchange::StartDeviceGather(void* buffer, std::span<const int64_t> bytes, void* stream) {
  BeginGather(bytes);
  std::vector<Piece> sends;
  std::vector<Piece> receives;
  auto* part = static_cast<char*>(buffer);
  char* own = nullptr;
  for (int r = 0; r < ranks(); ++r) {
    const int64_t size = bytes[static_cast<size_t>(r)];
    if (r == rank()) {
      own = part;
    } else if (size > 0) {
      receives.push_back({r, part, size});
    }
    part += size;
  }
  if (const int64_t size = bytes[static_cast<size_t>(rank())]; size > 0) {
    for (int i = 1; i < ranks(); ++i) sends.push_back({(rank() + i) % ranks(), own, size});
  }
  StartGroup(sends, receives, stream);
}

void NcclExchange::FinishDeviceGather() {
  FinishGroup();
  EndGather({});
}

void NcclExchange::StartDeviceAllToAll(const void* send, std::span<const int64_t> send_bytes,
                                       void* receive, std::span<const int64_t> receive_bytes,
                                       void* stream) {
  BeginAllToAll(send_bytes, receive_bytes);
  std::vector<Piece> sends;
  std::vector<Piece> receives;
  // Nothing is written to memory that is sent.
  auto* from = static_cast<char*>(const_cast<void*>(send));
  auto* to = static_cast<char*>(receive);
  for (int r = 0; r < ranks(); ++r) {
    const int64_t sent = send_bytes[static_cast<size_t>(r)];
    const int64_t received = receive_bytes[static_cast<size_t>(r)];
    if (r != rank() && sent > 0) sends.push_back({r, from, sent});
    if (r != rank() && received > 0) receives.push_back({r, to, received});
    from += sent;
    to += received;
  }
  StartGroup(sends, receives, stream);
}

class OpenedNccl final : public NcclLibrary {
 public:
  OpenedNccl(const NcclApi& api, int version) : api_(api), version_(version) {}
  std::string version() const override {
    return Concat(version_ / 10000, '.', version_ / 100 % 100, '.', version_ % 100);
  }
  std::unique_ptr<MessageExchange> NewExchange(std::unique_ptr<Transport> transport,
                                               MessageExchange::Options options,
                                               StreamQuery query) const override {
    return std::make_unique<NcclExchange>(api_, std::move(transport), std::move(options), query);
  }

 private:
  const NcclApi api_;
  const int version_;
};

template <typename F>
bool Load(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

Result<std::unique_ptr<NcclLibrary>> OpenNccl() {
  void* const library = dlopen(kLibraryName, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return absl::NotFoundError(Concat("NCCL: ", dlerror()));
  NcclApi api;
  const bool complete = Load(library, "ncclGetVersion", api.get_version) &&
                        Load(library, "ncclGetUniqueId", api.get_unique_id) &&
                        Load(library, "ncclCommInitRankConfig", api.comm_init_rank_config) &&
                        Load(library, "ncclCommGetAsyncError", api.comm_get_async_error) &&
                        Load(library, "ncclCommFinalize", api.comm_finalize) &&
                        Load(library, "ncclCommDestroy", api.comm_destroy) &&
                        Load(library, "ncclCommAbort", api.comm_abort) &&
                        Load(library, "ncclGroupStart", api.group_start) &&
                        Load(library, "ncclGroupEnd", api.group_end) &&
                        Load(library, "ncclSend", api.send) &&
                        Load(library, "ncclRecv", api.receive) &&
                        Load(library, "ncclGetErrorString", api.get_error_string) &&
                        Load(library, "ncclGetLastError", api.get_last_error);
  int version = 0;
  if (!complete || api.get_version(&version) != ncclSuccess || version < kOldestVersion ||
      version >= NCCL_VERSION(3, 0, 0)) {
    return absl::FailedPreconditionError(
        Concat("NCCL: expected version 2.18 or a later 2, found ",
               complete ? Concat("number ", version) : std::string("one without its functions")));
  }
  return std::unique_ptr<NcclLibrary>(std::make_unique<OpenedNccl>(api, version));
}

}  // namespace moeserve

// A stand-in for libnccl.so.2 on the emulated device: the functions that moeserve uses, between
// threads and processes of one machine. The program that opens it must export the emulated runtime.
//
// The unique id names a socket at which a thread of rank 0's process, the hub, connects the ranks
// and passes their messages on. A group is one operation of its stream that sends at once when the
// stream reaches it, and another that ends when all its messages have arrived, so groups that do
// not fit each other hang, as with NCCL. What NCCL leaves undefined is an error: a message of
// another size than expected, a second operation on a communicator that has not ended the first
// call, a communicator that is destroyed with messages that nobody has received.
#include "tests/exchange/nccl_loopback/nccl_loopback.h"

#include <nccl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cuda_emulator/stream_operation.h"

namespace {

using moeserve::testing::NcclLoopbackControl;

NcclLoopbackControl g_control;
std::atomic<int> g_aborts = 0;

// A message between a rank and the hub.
struct Frame {
  uint32_t from;
  uint32_t to;
  uint64_t bytes;
};
constexpr uint32_t kHub = 0xffffffff;  // as `to` of a rank's first frame; as `from`: all are there

bool WriteAll(int fd, const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t count = send(fd, at, bytes, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    at += count;
    bytes -= static_cast<size_t>(count);
  }
  return true;
}

bool ReadAll(int fd, void* data, size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t count = recv(fd, at, bytes, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    at += count;
    bytes -= static_cast<size_t>(count);
  }
  return true;
}

struct FrameWithData {
  Frame frame{};
  std::vector<char> data;
};

bool ReadFrame(int fd, FrameWithData& out) {
  if (!ReadAll(fd, &out.frame, sizeof(out.frame))) return false;
  out.data.resize(out.frame.bytes);
  return ReadAll(fd, out.data.data(), out.data.size());
}

sockaddr_un AddressOf(const ncclUniqueId& id, socklen_t& size) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t length = strnlen(id.internal, sizeof(id.internal));
  // A name without a file begins with a zero byte.
  std::memcpy(address.sun_path + 1, id.internal, length);
  size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return address;
}

// Passes messages on until all ranks have closed their ends. Each rank's messages are read by a
// thread of their own, so that no rank waits for another one.
void RunHub(int listener) {
  std::map<uint32_t, int> socket_of;
  size_t count = 1;
  while (socket_of.size() < count) {
    const int socket = accept(listener, nullptr, nullptr);
    if (socket < 0) return;
    FrameWithData hello;
    uint32_t ranks = 0;
    if (!ReadFrame(socket, hello) || hello.data.size() != sizeof(ranks)) return;
    std::memcpy(&ranks, hello.data.data(), sizeof(ranks));
    count = ranks;
    socket_of[hello.frame.from] = socket;
  }
  close(listener);
  std::vector<int> sockets;  // in the order of ranks
  for (const auto& [rank, socket] : socket_of) sockets.push_back(socket);
  auto locks = std::make_shared<std::vector<std::mutex>>(count);
  const auto shared = std::make_shared<const std::vector<int>>(sockets);
  std::vector<std::thread> readers;
  for (const int socket : sockets) {
    const Frame all_there{.from = kHub, .to = 0, .bytes = 0};
    WriteAll(socket, &all_there, sizeof(all_there));
  }
  for (size_t r = 0; r < count; ++r) {
    readers.emplace_back([r, shared, locks] {
      FrameWithData message;
      while (ReadFrame((*shared)[r], message)) {
        const uint32_t to = message.frame.to;
        if (to >= shared->size()) break;
        const std::lock_guard lock((*locks)[to]);
        WriteAll((*shared)[to], &message.frame, sizeof(message.frame));
        WriteAll((*shared)[to], message.data.data(), message.data.size());
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  for (const int socket : sockets) close(socket);
}

}  // namespace

// NCCL's type, which its header only declares.
struct ncclComm {
  int rank = 0;
  int ranks = 1;
  int socket = -1;
  std::thread reader;
  std::mutex mutex;
  bool connected = false;
  bool aborted = false;
  ncclResult_t error = ncclSuccess;
  std::string reason;
  std::map<int, std::deque<std::vector<char>>> inbox;
  std::mutex writing;
};

namespace {

using Comm = std::shared_ptr<ncclComm>;

std::mutex g_mutex;
std::map<ncclComm_t, Comm> g_comms;

Comm Find(ncclComm_t comm) {
  const std::lock_guard lock(g_mutex);
  const auto found = g_comms.find(comm);
  if (found == g_comms.end()) {
    std::fprintf(stderr, "nccl loop-back: a communicator that does not exist\n");
    std::abort();
  }
  return found->second;
}

bool Concerns(const ncclComm& comm) { return g_control.rank == comm.rank; }

void FailComm(ncclComm& comm, ncclResult_t error, std::string reason) {
  const std::lock_guard lock(comm.mutex);
  if (comm.error != ncclSuccess) return;
  comm.error = error;
  comm.reason = std::move(reason);
}

void RunReader(const Comm& comm) {
  FrameWithData message;
  while (ReadFrame(comm->socket, message)) {
    const std::lock_guard lock(comm->mutex);
    if (message.frame.from == kHub) {
      if (!(Concerns(*comm) && g_control.never_connects)) comm->connected = true;
      continue;
    }
    comm->inbox[static_cast<int>(message.frame.from)].push_back(std::move(message.data));
  }
  // The end of another rank is not reported: NCCL often does not notice it.
}

struct Part {
  ncclComm_t comm;
  int peer;
  char* data;
  size_t bytes;
  cudaStream_t stream;
  bool sends;
};
thread_local int t_depth = 0;
thread_local std::vector<Part> t_parts;

// Whether the group's messages have arrived, or never will.
bool IsComplete(const Comm& comm, const std::vector<Part>& parts) {
  const std::lock_guard lock(comm->mutex);
  if (comm->aborted || comm->error != ncclSuccess) return true;
  if (Concerns(*comm) && g_control.hangs) return false;
  std::map<int, size_t> expected;
  for (const Part& part : parts) {
    if (!part.sends && comm->inbox[part.peer].size() < ++expected[part.peer]) return false;
  }
  return true;
}

void Complete(const Comm& comm, const std::vector<Part>& parts) {
  const std::lock_guard lock(comm->mutex);
  if (comm->aborted || comm->error != ncclSuccess) return;
  for (const Part& part : parts) {
    if (part.sends) continue;
    const std::vector<char> message = std::move(comm->inbox[part.peer].front());
    comm->inbox[part.peer].pop_front();
    if (message.size() != part.bytes) {
      comm->error = ncclInvalidUsage;
      comm->reason = "rank " + std::to_string(part.peer) + " has sent " +
                     std::to_string(message.size()) + " bytes, expected " +
                     std::to_string(part.bytes);
      return;
    }
    std::memcpy(part.data, message.data(), message.size());
  }
}

void SendParts(const Comm& comm, const std::vector<Part>& parts) {
  {
    const std::lock_guard lock(comm->mutex);
    if (comm->aborted || comm->error != ncclSuccess) return;
  }
  for (const Part& part : parts) {
    if (!part.sends) continue;
    const Frame frame{.from = static_cast<uint32_t>(comm->rank),
                      .to = static_cast<uint32_t>(part.peer),
                      .bytes = part.bytes};
    const std::lock_guard lock(comm->writing);
    // A hub that has ended is like a network that is cut.
    if (!WriteAll(comm->socket, &frame, sizeof(frame)) ||
        !WriteAll(comm->socket, part.data, part.bytes)) {
      return;
    }
  }
}

ncclResult_t Launch(std::vector<Part> parts) {
  const Comm comm = Find(parts.front().comm);
  for (const Part& part : parts) {
    const bool other = part.comm != comm.get() || part.stream != parts.front().stream;
    if (other || part.peer < 0 || part.peer >= comm->ranks || part.peer == comm->rank) {
      return ncclInvalidArgument;
    }
  }
  {
    const std::lock_guard lock(comm->mutex);
    if (!comm->connected || comm->aborted) return ncclInvalidUsage;
    if (comm->error != ncclSuccess) return comm->error;
  }
  if (Concerns(*comm) && g_control.fails) FailComm(*comm, ncclSystemError, "a test lets it fail");
  void* const stream = parts.front().stream;
  const bool queued = moeserve::emulator::EnqueueWhenReady(
                          stream, [] { return true; }, [comm, parts] { SendParts(comm, parts); }) &&
                      moeserve::emulator::EnqueueWhenReady(
                          stream, [comm, parts] { return IsComplete(comm, parts); },
                          [comm, parts] { Complete(comm, parts); });
  // NCCL returns before the group is queued.
  return queued ? ncclInProgress : ncclInvalidArgument;
}

void Close(ncclComm_t handle, bool aborts) {
  const Comm comm = Find(handle);
  {
    const std::lock_guard lock(comm->mutex);
    comm->aborted = true;
  }
  shutdown(comm->socket, SHUT_RDWR);
  if (comm->reader.joinable()) comm->reader.join();
  close(comm->socket);
  if (!aborts) {
    for (const auto& [rank, messages] : comm->inbox) {
      if (messages.empty()) continue;
      std::fprintf(stderr, "nccl loop-back: rank %d has not received a message of rank %d\n",
                   comm->rank, rank);
      std::abort();
    }
  }
  const std::lock_guard lock(g_mutex);
  g_comms.erase(handle);
}

ncclResult_t AddPart(const Part& part) {
  t_parts.push_back(part);
  if (t_depth > 0) return ncclSuccess;
  return Launch(std::exchange(t_parts, {}));
}

}  // namespace

extern "C" {

void moeserve_set_nccl_loopback(const NcclLoopbackControl& control) { g_control = control; }
int moeserve_nccl_loopback_aborts() { return g_aborts; }

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> number = 0;
  *id = {};
  std::snprintf(id->internal, sizeof(id->internal), "moeserve_nccl_%d_%d",
                static_cast<int>(getpid()), number++);
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t size = 0;
  const sockaddr_un address = AddressOf(*id, size);
  if (bind(listener, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      listen(listener, 64) != 0) {
    return ncclSystemError;
  }
  std::thread(RunHub, listener).detach();
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  *handle = nullptr;
  if (config == nullptr || config->blocking != 0 || rank < 0 || rank >= ranks) {
    return ncclInvalidArgument;
  }
  const auto comm = std::make_shared<ncclComm>();
  comm->rank = rank;
  comm->ranks = ranks;
  if (Concerns(*comm) && g_control.refuses_to_connect) return ncclUnhandledCudaError;
  socklen_t size = 0;
  const sockaddr_un address = AddressOf(id, size);
  comm->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto count = static_cast<uint32_t>(ranks);
  const Frame hello{.from = static_cast<uint32_t>(rank), .to = kHub, .bytes = sizeof(count)};
  if (connect(comm->socket, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      !WriteAll(comm->socket, &hello, sizeof(hello)) ||
      !WriteAll(comm->socket, &count, sizeof(count))) {
    return ncclSystemError;
  }
  if (Concerns(*comm) && g_control.fails_to_connect) {
    FailComm(*comm, ncclSystemError, "a test lets it fail");
  }
  comm->reader = std::thread(RunReader, comm);
  const std::lock_guard lock(g_mutex);
  g_comms[comm.get()] = comm;
  *handle = comm.get();
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* state) {
  const Comm comm = Find(handle);
  const std::lock_guard lock(comm->mutex);
  *state = comm->error != ncclSuccess ? comm->error
           : comm->connected          ? ncclSuccess
                                      : ncclInProgress;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclInProgress; }

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  Close(handle, /*aborts=*/false);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  ++g_aborts;
  Close(handle, /*aborts=*/true);
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++t_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (t_depth == 0) return ncclInvalidUsage;
  if (--t_depth > 0 || t_parts.empty()) return ncclSuccess;
  return Launch(std::exchange(t_parts, {}));
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  if (type != ncclUint8) return ncclInvalidArgument;
  return AddPart({.comm = comm,
                  .peer = peer,
                  .data = static_cast<char*>(const_cast<void*>(data)),
                  .bytes = count,
                  .stream = stream,
                  .sends = true});
}

ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  if (type != ncclUint8) return ncclInvalidArgument;
  return AddPart({.comm = comm,
                  .peer = peer,
                  .data = static_cast<char*>(data),
                  .bytes = count,
                  .stream = stream,
                  .sends = false});
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSystemError:
      return "unhandled system error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    default:
      return "error of the loop-back";
  }
}

const char* ncclGetLastError(ncclComm_t handle) {
  thread_local std::string reason;
  const Comm comm = Find(handle);
  const std::lock_guard lock(comm->mutex);
  reason = comm->reason;
  return reason.c_str();
}

}  // extern "C"

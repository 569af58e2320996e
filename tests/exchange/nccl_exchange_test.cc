// Gathers of the emulated device's memory by a stand-in for NCCL, between threads.
#include "kernels/exchange/nccl/nccl_exchange.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>

#include "absl/time/clock.h"
#include "base/error_text.h"
#include "kernels/exchange/loopback_transport.h"
#include "tests/cuda_emulator/runtime_api.h"
#include "tests/exchange/exchange_cases.h"
#include "tests/exchange/nccl_loopback/nccl_loopback.h"
#include "tests/exchange/rank_threads.h"

namespace moeserve {
namespace {

using namespace emulator::names;  // NOLINT(google-build-using-namespace)
using Options = MessageExchange::Options;
using Control = testing::NcclLoopbackControl;

constexpr size_t kDeviceBytes = 4 << 20;

Result<bool> IsIdle(void* stream) {
  const cudaError_t error = cudaStreamQuery(static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess || error == cudaErrorNotReady) return error == cudaSuccess;
  return absl::InternalError(cudaGetErrorString(error));
}

const NcclLibrary& Library() {
  static const Result<std::unique_ptr<NcclLibrary>> library = OpenNccl();
  MOESERVE_CHECK(library.ok(), "the stand-in for NCCL: LD_LIBRARY_PATH names its folder");
  return **library;
}

template <typename F>
F* Symbol(const char* name) {
  Library();
  // It is open already; this only finds it.
  void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<F*>(dlsym(library, name));
}

int Aborts() { return Symbol<testing::NcclLoopbackAborts>(testing::kNcclLoopbackAbortsName)(); }

// Lets the stand-in misbehave while it exists.
class Misbehaviour {
 public:
  explicit Misbehaviour(const Control& control) {
    Symbol<testing::SetNcclLoopback>(testing::kSetNcclLoopbackName)(control);
  }
  ~Misbehaviour() { Symbol<testing::SetNcclLoopback>(testing::kSetNcclLoopbackName)({}); }
};

// A rank of the tests: its exchange, stream and device memory.
struct Device {
  Device() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&memory, kDeviceBytes), cudaSuccess);
  }
  ~Device() {
    exchange.reset();
    cudaStreamDestroy(stream);
    cudaFree(memory);
  }
  std::unique_ptr<MessageExchange> exchange;
  cudaStream_t stream = nullptr;
  char* memory = nullptr;
};

// Runs `f` on a thread for each rank. Devices are made before the threads and freed after them,
// because cudaFree() waits for the streams of all ranks, which share the emulated device.
void OnDevices(int ranks, const Options& options, const std::function<void(Device&)>& f,
               bool connects = true, StreamQuery query = IsIdle) {
  std::vector<std::unique_ptr<Transport>> transports = LoopbackTransports(ranks);
  std::vector<std::unique_ptr<Device>> devices;
  for (std::unique_ptr<Transport>& transport : transports) {
    devices.push_back(std::make_unique<Device>());
    devices.back()->exchange = Library().NewExchange(std::move(transport), options, query);
  }
  OnThreads(ranks, [&](int rank) {
    Device& device = *devices[static_cast<size_t>(rank)];
    if (connects) {
      const absl::Status connected = device.exchange->ConnectDevices();
      ASSERT_TRUE(connected.ok()) << connected;
    }
    f(device);
  });
  // Each finalizes what all use.
  OnThreads(ranks, [&](int rank) { devices[static_cast<size_t>(rank)]->exchange.reset(); });
}

// Gathers through device memory what is gathered through it. All work is queued on the stream, so
// the own part is written only when the stream reaches it.
class ThroughDevice final : public Exchange {
 public:
  explicit ThroughDevice(Device& device) : device_(device), to_(*device.exchange) {}

  int rank() const override { return to_.rank(); }
  int ranks() const override { return to_.ranks(); }
  void StartGather(void* buffer, std::span<const int64_t> bytes) override {
    buffer_ = static_cast<char*>(buffer);
    bytes_.assign(bytes.begin(), bytes.end());
    EXPECT_LE(std::accumulate(bytes.begin(), bytes.end(), size_t{0}), kDeviceBytes);
    EXPECT_EQ(cudaMemsetAsync(device_.memory, 0x33, kDeviceBytes, device_.stream), cudaSuccess);
    ForEachPart([this](int r, int64_t begin, size_t size) {
      if (r != rank()) return;
      EXPECT_EQ(cudaMemcpyAsync(device_.memory + begin, buffer_ + begin, size,
                                cudaMemcpyHostToDevice, device_.stream),
                cudaSuccess);
    });
    to_.StartDeviceGather(device_.memory, bytes, device_.stream);
  }
  void FinishGather() override {
    to_.FinishDeviceGather();
    if (!status().ok()) return;
    ForEachPart([this](int, int64_t begin, size_t size) {
      EXPECT_EQ(cudaMemcpyAsync(buffer_ + begin, device_.memory + begin, size,
                                cudaMemcpyDeviceToHost, device_.stream),
                cudaSuccess);
    });
    EXPECT_EQ(cudaStreamSynchronize(device_.stream), cudaSuccess);
  }
  void StartAllToAll(const void* send, std::span<const int64_t> send_bytes, void* receive,
                     std::span<const int64_t> receive_bytes) override {
    char* const from = device_.memory + kDeviceBytes / 2;
    const auto total = std::accumulate(send_bytes.begin(), send_bytes.end(), size_t{0});
    buffer_ = static_cast<char*>(receive);
    EXPECT_LE(std::accumulate(receive_bytes.begin(), receive_bytes.end(), total), kDeviceBytes / 2);
    EXPECT_EQ(cudaMemsetAsync(device_.memory, 0x33, kDeviceBytes, device_.stream), cudaSuccess);
    if (total > 0) {
      EXPECT_EQ(cudaMemcpyAsync(from, send, total, cudaMemcpyHostToDevice, device_.stream),
                cudaSuccess);
    }
    bytes_.assign(receive_bytes.begin(), receive_bytes.end());
    to_.StartDeviceAllToAll(from, send_bytes, device_.memory, receive_bytes, device_.stream);
  }
  void FinishAllToAll() override {
    to_.FinishDeviceAllToAll();
    if (!status().ok()) return;
    ForEachPart([this](int r, int64_t begin, size_t size) {
      if (r == rank()) return;  // the caller's, which stays as it is
      EXPECT_EQ(cudaMemcpyAsync(buffer_ + begin, device_.memory + begin, size,
                                cudaMemcpyDeviceToHost, device_.stream),
                cudaSuccess);
    });
    EXPECT_EQ(cudaStreamSynchronize(device_.stream), cudaSuccess);
  }
  void Broadcast(std::span<char> message) override { to_.Broadcast(message); }
  void BroadcastWhenever(std::span<char> message) override { to_.BroadcastWhenever(message); }
  void GatherAtLeader(std::span<const char> own, std::span<char> all) override {
    to_.GatherAtLeader(own, all);
  }
  void Lose(int rank, std::string_view reason) override { to_.Lose(rank, reason); }
  absl::Status status() const override { return to_.status(); }
  ExchangeCounts counts() const override { return to_.counts(); }

 private:
  void ForEachPart(const std::function<void(int, int64_t, size_t)>& f) {
    int64_t begin = 0;
    for (int r = 0; r < ranks(); ++r) {
      const int64_t size = bytes_[static_cast<size_t>(r)];
      if (size > 0) f(r, begin, static_cast<size_t>(size));
      begin += size;
    }
  }

  Device& device_;
  Exchange& to_;
  char* buffer_ = nullptr;
  std::vector<int64_t> bytes_;
};

class NcclExchangeTest : public ::testing::TestWithParam<int> {};

TEST_P(NcclExchangeTest, MovesBytes) {
  for (const bool check_order : {false, true}) {
    OnDevices(GetParam(), {.timeout = absl::Seconds(60), .check_order = check_order},
              [](Device& device) {
                EXPECT_TRUE(device.exchange->reads_device_memory());
                ThroughDevice exchange(device);
                for (const ExchangeCase& test : ExchangeCases()) {
                  SCOPED_TRACE(test.name);
                  test.run(exchange);
                }
              });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclExchangeTest, ::testing::Values(1, 2, 3, 4));

// Host memory is gathered, too, by the transport.
TEST(NcclExchangeTest, GathersHostMemory) {
  OnDevices(2, {}, [](Device& device) {
    for (const ExchangeCase& test : ExchangeCases()) test.run(*device.exchange);
  });
}

// Work that is queued before the gather ends finds its result.
TEST(NcclExchangeTest, KeepsTheOrderOfTheStream) {
  OnDevices(2, {.timeout = absl::Seconds(60)}, [](Device& device) {
    const int rank = device.exchange->rank();
    const std::vector<int64_t> bytes = {100, 200};
    cudaMemsetAsync(device.memory, 9, kDeviceBytes, device.stream);
    cudaMemsetAsync(device.memory + (rank == 0 ? 0 : 100), rank + 1, rank == 0 ? 100 : 200,
                    device.stream);
    device.exchange->StartDeviceGather(device.memory, bytes, device.stream);
    std::vector<char> found(301);
    cudaMemcpyAsync(found.data(), device.memory, found.size(), cudaMemcpyDeviceToHost,
                    device.stream);
    device.exchange->FinishDeviceGather();
    EXPECT_TRUE(device.exchange->status().ok()) << device.exchange->status();
    std::vector<char> expected(100, 1);
    expected.resize(300, 2);
    expected.push_back(9);
    EXPECT_EQ(found, expected);
  });
}

void GatherTen(Device& device) {
  const std::vector<int64_t> bytes(static_cast<size_t>(device.exchange->ranks()), 10);
  device.exchange->StartDeviceGather(device.memory, bytes, device.stream);
  device.exchange->FinishDeviceGather();
}

// A rank that takes no part does not end in order, either.
void Leave(Device& device) { device.exchange->Lose(0, "a test"); }

TEST(NcclExchangeTest, ADeadlineAbortsTheGather) {
  const int aborts = Aborts();
  OnDevices(3, {.timeout = absl::Milliseconds(300)}, [](Device& device) {
    if (device.exchange->rank() == 2) return Leave(device);
    GatherTen(device);
    EXPECT_EQ(device.exchange->status(),
              absl::UnavailableError("a rank was lost: the devices have not exchanged their parts "
                                     "within 300ms"));
    // What was queued ends, and so does what follows.
    EXPECT_EQ(cudaStreamSynchronize(device.stream), cudaSuccess);
    for (int i = 0; i < 100; ++i) GatherTen(device);
    EXPECT_EQ(device.exchange->counts().gathers, 0u);
  });
  EXPECT_EQ(Aborts(), aborts + 3);
}

// Such as by the thread of the link, while the backend waits for the stream.
TEST(NcclExchangeTest, ALossAbortsWhatTheDeviceWaitsFor) {
  const int aborts = Aborts();
  OnDevices(2, {.timeout = absl::InfiniteDuration()}, [](Device& device) {
    if (device.exchange->rank() == 1) return Leave(device);
    const std::vector<int64_t> bytes(2, 10);
    device.exchange->StartDeviceGather(device.memory, bytes, device.stream);
    std::thread link([&] {
      absl::SleepFor(absl::Milliseconds(50));
      device.exchange->Lose(1, "its connection was closed");
    });
    EXPECT_EQ(cudaStreamSynchronize(device.stream), cudaSuccess);
    device.exchange->FinishDeviceGather();
    link.join();
    EXPECT_EQ(device.exchange->status(),
              absl::UnavailableError("rank 1 was lost: its connection was closed"));
  });
  EXPECT_EQ(Aborts(), aborts + 2);
}

TEST(NcclExchangeTest, ALossBetweenGathersAborts) {
  const int aborts = Aborts();
  OnDevices(2, {}, [](Device& device) {
    GatherTen(device);
    device.exchange->Lose(1 - device.exchange->rank(), "a test");
    GatherTen(device);
    EXPECT_EQ(device.exchange->counts().gathers, 1u);
  });
  EXPECT_EQ(Aborts(), aborts + 2);
}

TEST(NcclExchangeTest, AnErrorOfNcclIsALoss) {
  const Misbehaviour fails({.rank = 0, .fails = true});
  OnDevices(2, {.timeout = absl::Milliseconds(500)}, [](Device& device) {
    GatherTen(device);
    const std::string message(device.exchange->status().message());
    if (device.exchange->rank() == 0) {
      EXPECT_EQ(message,
                "a rank was lost: NCCL: an exchange: unhandled system error (a test lets it fail)");
    } else {
      EXPECT_NE(message.find("within 500ms"), std::string::npos) << message;
    }
  });
}

TEST(NcclExchangeTest, AGatherThatHangsOnOneDeviceIsALoss) {
  const Misbehaviour hangs({.rank = 1, .hangs = true});
  OnDevices(2, {.timeout = absl::Milliseconds(300)}, [](Device& device) {
    GatherTen(device);
    EXPECT_EQ(device.exchange->status().ok(), device.exchange->rank() == 0);
    EXPECT_EQ(cudaStreamSynchronize(device.stream), cudaSuccess);
  });
}

TEST(NcclExchangeTest, WhoeverIsSilentIsLostAfterADeadline) {
  const Misbehaviour hangs({.rank = 1, .hangs = true});
  OnDevices(2, {.timeout = absl::Milliseconds(300), .silent_rank = [] { return 0; }},
            [](Device& device) {
              GatherTen(device);
              if (device.exchange->rank() == 0) return;
              EXPECT_EQ(device.exchange->status().message(),
                        "rank 0 was lost: the devices have not exchanged their parts within 300ms");
            });
}

TEST(NcclExchangeTest, DifferentSizesAreFound) {
  OnDevices(2, {.timeout = absl::Milliseconds(500)}, [](Device& device) {
    const int64_t own = device.exchange->rank() == 0 ? 10 : 11;
    device.exchange->StartDeviceGather(device.memory, std::vector<int64_t>(2, own), device.stream);
    device.exchange->FinishDeviceGather();
    EXPECT_EQ(device.exchange->status().code(), absl::StatusCode::kUnavailable);
    EXPECT_NE(device.exchange->status().message().find("bytes, expected"), std::string_view::npos)
        << device.exchange->status();
  });
}

TEST(NcclExchangeTest, ADeviceThatFailsIsALoss) {
  const auto query = [](void*) -> Result<bool> { return absl::InternalError("it is on fire"); };
  OnDevices(
      2, {.timeout = absl::Seconds(60)},
      [](Device& device) {
        GatherTen(device);
        EXPECT_EQ(device.exchange->status(), absl::InternalError("the device: it is on fire"));
      },
      /*connects=*/true, query);
}

// Connecting ends on all ranks if it fails on one, and only that one has an error.
TEST(NcclExchangeTest, ConnectingFailsEverywhere) {
  for (const bool at_once : {true, false}) {
    const Misbehaviour fails(
        {.rank = 1, .refuses_to_connect = at_once, .fails_to_connect = !at_once});
    OnDevices(
        3, {.timeout = absl::Seconds(60)},
        [&](Device& device) {
          const absl::Status status = device.exchange->ConnectDevices();
          if (device.exchange->rank() != 1) {
            EXPECT_EQ(status, absl::OkStatus());
          } else if (at_once) {
            EXPECT_EQ(status, absl::UnavailableError("NCCL: connecting: unhandled cuda error"));
          } else {
            EXPECT_EQ(status, absl::UnavailableError("NCCL: connecting: unhandled system error (a "
                                                     "test lets it fail)"));
          }
          EXPECT_EQ(device.exchange->status(), absl::OkStatus());
        },
        /*connects=*/false);
  }
}

TEST(NcclExchangeTest, ConnectingHasADeadline) {
  const Misbehaviour hangs({.rank = 1, .never_connects = true});
  OnDevices(
      2, {.timeout = absl::Milliseconds(300)},
      [](Device& device) {
        const absl::Status status = device.exchange->ConnectDevices();
        if (device.exchange->rank() == 1) {
          EXPECT_EQ(status,
                    absl::UnavailableError("NCCL: the devices have not connected within 300ms"));
        }
      },
      /*connects=*/false);
}

}  // namespace
}  // namespace moeserve

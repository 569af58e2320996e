// Streams, events, copies and graphs of the emulated device, and the classes that own their
// handles.

#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/launch.h"
#include "tests/cuda/emulator_test_support.h"

namespace moeserve::cuda {
namespace {

__global__ void AddKernel(int* data, int n, const int* amount) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] += *amount;
}

void Add(int* data, int n, const int* amount, cudaStream_t stream) {
  Launch(AddKernel, {.grid = dim3((n + 31) / 32), .block = dim3(32), .stream = stream}, data, n,
         amount);
}

TEST(EmulatorRuntime, WorkOfAStreamHappensWhenItIsWaitedFor) {
  Stream stream = Stream::Create().value();
  PinnedMemory host = PinnedMemory::Allocate(4 * sizeof(int)).value();
  DeviceArray<int> data(std::vector<int>{1, 2, 3, 4}), amount(std::vector<int>{10});
  int* h = host.as<int>();
  for (int i = 0; i < 4; ++i) h[i] = -7;
  Add(data.data(), 4, amount.data(), stream.get());
  ASSERT_EQ(cudaMemcpyAsync(h, data.data(), 16, cudaMemcpyDeviceToHost, stream.get()), cudaSuccess);
  EXPECT_EQ(h[0], -7);
  ASSERT_TRUE(stream.Synchronize().ok());
  EXPECT_EQ(std::vector<int>(h, h + 4), (std::vector<int>{11, 12, 13, 14}));
}

TEST(EmulatorRuntime, EventsOrderStreams) {
  Stream first = Stream::Create().value(), second = Stream::Create().value();
  Event event = Event::Create(true).value(), end = Event::Create(true).value();
  DeviceArray<int> data(std::vector<int>{1}), amount(std::vector<int>{5});
  Add(data.data(), 1, amount.data(), first.get());
  ASSERT_TRUE(event.Record(first.get()).ok());
  Add(data.data(), 1, amount.data(), first.get());
  ASSERT_TRUE(event.MakeWait(second.get()).ok());
  PinnedMemory host = PinnedMemory::Allocate(sizeof(int)).value();
  ASSERT_EQ(cudaMemcpyAsync(host.data(), data.data(), 4, cudaMemcpyDeviceToHost, second.get()),
            cudaSuccess);
  ASSERT_TRUE(end.Record(second.get()).ok());
  ASSERT_TRUE(end.Synchronize().ok());
  // The wait must exclude work that the first stream does after the event.
  EXPECT_EQ(*host.as<int>(), 6);
  EXPECT_GE(end.MillisecondsSince(event).value(), 0.0f);
  ASSERT_TRUE(first.Synchronize().ok());
  EXPECT_EQ(data.Read()[0], 11);
  int polls = 0;
  Add(data.data(), 1, amount.data(), first.get());
  ASSERT_TRUE(event.Record(first.get()).ok());
  while (cudaEventQuery(event.get()) == cudaErrorNotReady) ++polls;
  EXPECT_GT(polls, 0);
}

TEST(EmulatorRuntime, FreshMemoryIsPoisonedAndCopiesAreChecked) {
  DeviceArray<int> a(8), b(8);
  for (const int v : a.Read()) EXPECT_EQ(v, -1);
  int host[16];
  EXPECT_EQ(cudaMemcpy(host, a.data(), 36, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host, a.data(), 32, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host, a.data(), 32, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  ASSERT_EQ(cudaMemset(b.data(), 0, 32), cudaSuccess);
  // Copies columns 1 and 2 of rows with 4 columns.
  ASSERT_EQ(cudaMemcpy2DAsync(b.data() + 1, 16, a.data(), 8, 8, 2, cudaMemcpyDeviceToDevice),
            cudaSuccess);
  EXPECT_EQ(b.Read(), (std::vector<int>{0, -1, -1, 0, 0, -1, -1, 0}));
  const Status status = DeviceMemory::Allocate(size_t{1} << 50).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("out of memory"), std::string_view::npos) << status;
}

TEST(EmulatorRuntime, GraphsReplayTheirWorkOnPresentData) {
  Stream stream = Stream::Create().value(), side = Stream::Create().value();
  Event fork = Event::Create(false).value(), join = Event::Create(false).value();
  DeviceArray<int> data(std::vector<int>(40, 0)), other(std::vector<int>{0}), amount(1);
  PinnedMemory host = PinnedMemory::Allocate(sizeof(int)).value();
  GraphExec graph = GraphExec::Capture(stream.get(), [&]() -> Status {
                      MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(
                          amount.data(), host.data(), 4, cudaMemcpyHostToDevice, stream.get()));
                      MOESERVE_RETURN_IF_ERROR(fork.Record(stream.get()));
                      MOESERVE_RETURN_IF_ERROR(fork.MakeWait(side.get()));
                      Add(other.data(), 1, amount.data(), side.get());
                      MOESERVE_RETURN_IF_ERROR(join.Record(side.get()));
                      Add(data.data(), 40, amount.data(), stream.get());
                      return join.MakeWait(stream.get());
                    }).value();
  EXPECT_EQ(data.Read()[39], 0);  // captured work does not run
  int sum = 0;
  for (const int amount_now : {3, 4, 5}) {
    *host.as<int>() = amount_now;
    ASSERT_TRUE(graph.Launch(stream.get()).ok());
    ASSERT_TRUE(stream.Synchronize().ok());
    sum += amount_now;
    EXPECT_EQ(data.Read(), std::vector<int>(40, sum));
    EXPECT_EQ(other.Read()[0], sum);
  }
}

TEST(EmulatorRuntime, CapturesRefuseWhatTheyCannotHold) {
  Stream stream = Stream::Create().value(), side = Stream::Create().value();
  Event event = Event::Create(false).value();
  DeviceArray<int> data(std::vector<int>{0}), amount(std::vector<int>{1});
  const auto capture = [&](auto&& enqueue) {
    return GraphExec::Capture(stream.get(), [&]() -> Status {
      enqueue();
      return absl::OkStatus();
    });
  };
  const auto refused = [&](cudaError_t expected, auto&& call) {
    const Status status = capture([&] { EXPECT_EQ(call(), expected); }).status();
    EXPECT_NE(status.message().find("cudaErrorStreamCaptureInvalidated"), std::string_view::npos)
        << status;
    static_cast<void>(cudaGetLastError());
  };
  void* pointer = nullptr;
  int host = 0;
  refused(cudaErrorStreamCaptureUnsupported, [&] { return cudaMalloc(&pointer, 4); });
  refused(cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamSynchronize(stream.get()); });
  refused(cudaErrorStreamCaptureUnsupported, [&] { return cudaDeviceSynchronize(); });
  refused(cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamQuery(stream.get()); });
  refused(cudaErrorStreamCaptureImplicit,
          [&] { return cudaMemcpy(&host, data.data(), 4, cudaMemcpyDeviceToHost); });
  ASSERT_TRUE(event.Record(side.get()).ok());
  refused(cudaErrorStreamCaptureIsolation,
          [&] { return cudaStreamWaitEvent(stream.get(), event.get()); });
  // A side stream that does not join the capturing stream again is an error.
  const Status unjoined = capture([&] {
                            EXPECT_TRUE(event.Record(stream.get()).ok());
                            EXPECT_TRUE(event.MakeWait(side.get()).ok());
                            Add(data.data(), 1, amount.data(), side.get());
                          }).status();
  EXPECT_NE(unjoined.message().find("Unjoined"), std::string_view::npos) << unjoined;
  // Afterwards, all streams must work again.
  Add(data.data(), 1, amount.data(), side.get());
  ASSERT_TRUE(side.Synchronize().ok());
  EXPECT_EQ(data.Read()[0], 1);
}

__global__ void SharedSizeKernel(int* out, int n) {
  int* shared = DynamicShared<int>();
  shared[n - 1] = n;
  *out = shared[n - 1];
}

TEST(EmulatorRuntime, LaunchRaisesTheLimitOfSharedMemory) {
  DeviceArray<int> out(1);
  const int n = (100 << 10) / 4;
  const cudaLaunchConfig_t config{.gridDim = dim3(1),
                                  .blockDim = dim3(1),
                                  .dynamicSmemBytes = 100 << 10,
                                  .stream = nullptr,
                                  .attrs = nullptr,
                                  .numAttrs = 0};
  EXPECT_EQ(cudaLaunchKernelEx(&config, SharedSizeKernel, out.data(), n), cudaErrorInvalidValue);
  Launch(SharedSizeKernel, {.grid = dim3(1), .block = dim3(1), .shared_bytes = 100 << 10},
         out.data(), n);
  EXPECT_EQ(out.Read()[0], n);
  // an empty grid runs no thread
  Launch(SharedSizeKernel, {.grid = dim3(0), .block = dim3(1)}, nullptr, n);
}

TEST(EmulatorRuntimeDeathTest, LaunchesThatCannotBeStopTheProcess) {
  EXPECT_DEATH(Launch(SharedSizeKernel, {.grid = dim3(1), .block = dim3(2048)}, nullptr, 1),
               "block \\(2048,1,1\\).*invalid configuration");
  EXPECT_DEATH(Launch(SharedSizeKernel,
                      {.grid = dim3(1), .block = dim3(1), .shared_bytes = 300 << 10}, nullptr, 1),
               "invalid argument");
}

}  // namespace
}  // namespace moeserve::cuda

// The shared object libmoeserve_mpi.so, the only part that is linked to MPI.
#include "kernels/exchange/mpi/mpi_object.h"

#include <mpi.h>

#include <algorithm>
#include <string>
#include <vector>

namespace moeserve {
namespace {

// MPI counts the elements of a message in int.
constexpr int64_t kPieceBytes = int64_t{1} << 30;
constexpr int kTag = 1;

class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(MPI_Comm communicator) : communicator_(communicator) {
    MPI_Comm_rank(communicator_, &rank_);
    MPI_Comm_size(communicator_, &ranks_);
    sends_.resize(static_cast<size_t>(ranks_));
    receives_.resize(static_cast<size_t>(ranks_));
  }
  ~MpiTransport() override {
    const bool idle = requests_.empty();
    // After a loss, MPI_Finalize() would wait for the lost rank.
    if (failed_ || !idle) return;
    MPI_Comm_free(&communicator_);
    MPI_Finalize();
  }

  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }

  const char* Send(int rank, const void* data, int64_t bytes) override {
    const auto* from = static_cast<const char*>(data);
    for (int64_t at = 0; at < bytes; at += kPieceBytes) {
      MPI_Request request = MPI_REQUEST_NULL;
      const int error = MPI_Isend(from + at, PieceBytes(bytes - at), MPI_BYTE, rank, kTag,
                                  communicator_, &request);
      if (error != MPI_SUCCESS) return Failure(error);
      requests_.push_back(request);
      counts_.push_back(&sends_[static_cast<size_t>(rank)]);
      ++*counts_.back();
    }
    return nullptr;
  }

  const char* Receive(int rank, void* data, int64_t bytes) override {
    auto* to = static_cast<char*>(data);
    for (int64_t at = 0; at < bytes; at += kPieceBytes) {
      MPI_Request request = MPI_REQUEST_NULL;
      const int error =
          MPI_Irecv(to + at, PieceBytes(bytes - at), MPI_BYTE, rank, kTag, communicator_, &request);
      if (error != MPI_SUCCESS) return Failure(error);
      requests_.push_back(request);
      counts_.push_back(&receives_[static_cast<size_t>(rank)]);
      ++*counts_.back();
    }
    return nullptr;
  }

  const char* Advance() override {
    if (requests_.empty()) return nullptr;
    const auto count = static_cast<int>(requests_.size());
    finished_.resize(requests_.size());
    int finished = 0;
    const int error =
        MPI_Testsome(count, requests_.data(), &finished, finished_.data(), MPI_STATUSES_IGNORE);
    if (error != MPI_SUCCESS) return Failure(error);
    for (int i = 0; i < finished; ++i) {
      --*counts_[static_cast<size_t>(finished_[static_cast<size_t>(i)])];
    }
    // Finished requests have become null.
    size_t kept = 0;
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      requests_[kept] = requests_[i];
      counts_[kept++] = counts_[i];
    }
    requests_.resize(kept);
    counts_.resize(kept);
    return nullptr;
  }

  int unfinished_sends(int rank) const override { return sends_[static_cast<size_t>(rank)]; }
  int unfinished_receives(int rank) const override { return receives_[static_cast<size_t>(rank)]; }

 private:
  static int PieceBytes(int64_t left) { return static_cast<int>(std::min(left, kPieceBytes)); }

  const char* Failure(int error) {
    failed_ = true;
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(error, text, &length);
    reason_.assign(text, static_cast<size_t>(length));
    return reason_.c_str();
  }

  MPI_Comm communicator_;
  int rank_ = 0;
  int ranks_ = 1;
  // The unfinished messages: the request, and where it is counted.
  std::vector<MPI_Request> requests_;
  std::vector<int*> counts_;
  std::vector<int> finished_;  // scratch of Advance()
  // [ranks] the numbers of unfinished messages
  std::vector<int> sends_;
  std::vector<int> receives_;
  bool failed_ = false;
  std::string reason_;
};

}  // namespace
}  // namespace moeserve

extern "C" int moeserve_mpi_transport_version() { return moeserve::kTransportVersion; }

extern "C" moeserve::Transport* moeserve_new_mpi_transport(const char** reason) {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized != 0) {
    *reason = "it is initialized already";
    return nullptr;
  }
  int provided = MPI_THREAD_SINGLE;
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS) {
    *reason = "MPI_Init_thread failed";
    return nullptr;
  }
  if (provided < MPI_THREAD_SERIALIZED) {
    *reason = "it was built without threads";
    return nullptr;
  }
  // Errors are returned, not fatal.
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm communicator = MPI_COMM_NULL;
  if (MPI_Comm_dup(MPI_COMM_WORLD, &communicator) != MPI_SUCCESS) {
    *reason = "MPI_Comm_dup failed";
    return nullptr;
  }
  MPI_Comm_set_errhandler(communicator, MPI_ERRORS_RETURN);
  return new moeserve::MpiTransport(communicator);
}

// Memory for the activations of one step.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"

namespace moeserve {

// A stack allocator for row buffers in device memory. It grows to the largest step so far and keeps
// its memory. The contents of a new buffer are undefined. Used only by the thread that runs the
// model.
class Workspace {
 public:
  explicit Workspace(Backend& backend) : backend_(backend) {}

  // Returns a buffer [rows, cols] with a stride of cols rounded up to 16, so that padded columns
  // stay inside the row.
  RowsView Take(int64_t rows, int64_t cols, DType dtype);
  // Returns a buffer [rows, cols] without padding: the rows are contiguous.
  RowsView TakeDense(int64_t rows, int64_t cols, DType dtype);

  // Keeps the memory of a buffer that has been released, until the scope ends: later buffers do not
  // share it. Memory of others than this object has no effect.
  void Keep(const RowsView& rows);

  // On destruction, releases all buffers taken since construction.
  class Scope {
   public:
    explicit Scope(Workspace& w) : workspace_(w), chunk_(w.chunk_), used_(w.used_) {}
    ~Scope() {
      workspace_.chunk_ = chunk_;
      workspace_.used_ = used_;
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Workspace& workspace_;
    size_t chunk_;
    size_t used_;
  };

 private:
  RowsView TakeStrided(int64_t rows, int64_t cols, int64_t stride, DType dtype);

  Backend& backend_;
  std::vector<std::unique_ptr<DeviceBuffer>> chunks_;
  size_t chunk_ = 0;  // index in chunks_ of the allocation that the next buffer is taken from
  size_t used_ = 0;   // bytes taken from that allocation
};

}  // namespace moeserve

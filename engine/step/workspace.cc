#include "engine/step/workspace.h"

#include <algorithm>
#include <string>

#include "base/check.h"

namespace moeserve {
namespace {
constexpr size_t kMinChunk = size_t{4} << 20;
}  // namespace

RowsView Workspace::Take(int64_t rows, int64_t cols, DType dtype) {
  return TakeStrided(rows, cols, (cols + 15) / 16 * 16, dtype);
}

RowsView Workspace::TakeDense(int64_t rows, int64_t cols, DType dtype) {
  return TakeStrided(rows, cols, cols, dtype);
}

void Workspace::Keep(const RowsView& rows) {
  const char* const end = rows.row(rows.rows);
  for (size_t i = chunk_; i < chunks_.size(); ++i) {
    const auto* const begin = static_cast<const char*>(chunks_[i]->data());
    if (rows.data < begin || end > begin + chunks_[i]->bytes()) continue;
    const size_t used = (static_cast<size_t>(end - begin) + 127) / 128 * 128;
    used_ = i == chunk_ ? std::max(used_, used) : used;
    chunk_ = i;
    return;
  }
}

RowsView Workspace::TakeStrided(int64_t rows, int64_t cols, int64_t stride, DType dtype) {
  const size_t bytes = (static_cast<size_t>(rows * stride) * SizeOf(dtype) + 127) / 128 * 128;
  while (chunk_ < chunks_.size() && used_ + bytes > chunks_[chunk_]->bytes()) {
    ++chunk_;
    used_ = 0;
  }
  if (chunk_ == chunks_.size()) {
    const size_t last = chunks_.empty() ? kMinChunk : chunks_.back()->bytes() * 2;
    auto chunk = backend_.Allocate(std::max({bytes, last, kMinChunk}));
    // A failure is not expected during a step: on the host the operating system overcommits memory,
    // and on a device Model::Reserve() has allocated the memory at the start.
    if (!chunk.ok()) {
      internal::CheckFailed(__FILE__, __LINE__, "memory for a step's activations",
                            std::string(chunk.status().message()).c_str());
    }
    chunks_.push_back(std::move(chunk).value());
    used_ = 0;
  }
  RowsView view{static_cast<char*>(chunks_[chunk_]->data()) + used_, dtype, rows, cols, stride};
  used_ += bytes;
  return view;
}

}  // namespace moeserve

#include "model_loaders/files/safetensors_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "nlohmann/json.hpp"

namespace moeserve {
namespace {

constexpr uint64_t kAlignment = 64;

absl::Status WriteFault(const std::string& file, int error) {
  return absl::UnavailableError(
      Concat(Printable(file), ": cannot write: ", std::generic_category().message(error)));
}

}  // namespace

Result<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::filesystem::path& path, std::vector<TensorEntry> tensors) {
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter);
  writer->file_name_ = path.filename().string();
  // An ordered object lists the tensors in the order of their data instead of alphabetically.
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  header["__metadata__"] = {{"format", "pt"}};
  int64_t offset = 0;
  for (TensorEntry& entry : tensors) {
    int64_t size = SizeOf(entry.type);
    bool fits = true;
    for (const int64_t dim : entry.shape) fits = fits && !__builtin_mul_overflow(size, dim, &size);
    entry.begin = static_cast<uint64_t>(offset);
    fits = fits && size >= 0 && !__builtin_add_overflow(offset, size, &offset);
    if (!fits) {
      return absl::InvalidArgumentError(Concat(
          Printable(writer->file_name_), ": tensor ", Quoted(entry.name),
          ": expected sizes below 2^63 bytes together, found shape ", ShapeText(entry.shape)));
    }
    entry.end = static_cast<uint64_t>(offset);
    MOESERVE_CHECK(!header.contains(entry.name), "a tensor twice in one file");
    header[entry.name] = {{"dtype", Name(entry.type)},
                          {"shape", entry.shape},
                          {"data_offsets", {entry.begin, entry.end}}};
    writer->next_.push_back(entry.begin);
  }
  std::string text = header.dump();
  const uint64_t used = sizeof(uint64_t) + text.size();
  text.append((kAlignment - used % kAlignment) % kAlignment, ' ');
  if (text.size() > kMaxSafetensorsHeader) {
    return absl::InvalidArgumentError(
        Concat(Printable(writer->file_name_), ": header: expected at most ", kMaxSafetensorsHeader,
               " bytes for all tensors of the model, found ", text.size()));
  }
  writer->tensors_ = std::move(tensors);
  writer->data_begin_ = sizeof(uint64_t) + text.size();
  writer->fd_ = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (writer->fd_ < 0) return WriteFault(writer->file_name_, errno);
  const uint64_t length = text.size();
  char raw[sizeof(length)];
  std::memcpy(raw, &length, sizeof(length));
  MOESERVE_RETURN_IF_ERROR(writer->WriteAt(0, {raw, sizeof(raw)}));
  MOESERVE_RETURN_IF_ERROR(writer->WriteAt(sizeof(raw), text));
  return writer;
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ >= 0) close(fd_);
}

absl::Status SafetensorsWriter::WriteAt(uint64_t offset, std::string_view bytes) {
  constexpr size_t kCopied = size_t{64} << 10;
  while (!bytes.empty()) {
    ssize_t n = pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EFAULT) {
      // The bytes are in a mapped file that was cut short. In the kernel, that raises no signal;
      // the copy raises it, so that the mapping is marked as damaged. The caller checks the
      // mapping.
      const std::string copy(bytes.substr(0, kCopied));
      n = pwrite(fd_, copy.data(), copy.size(), static_cast<off_t>(offset));
    }
    if (n <= 0) return WriteFault(file_name_, n < 0 ? errno : ENOSPC);
    bytes.remove_prefix(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Append(size_t index, std::string_view bytes) {
  uint64_t& next = next_[index];
  MOESERVE_CHECK(bytes.size() <= tensors_[index].end - next, "more bytes than the tensor has");
  MOESERVE_RETURN_IF_ERROR(WriteAt(data_begin_ + next, bytes));
  next += bytes.size();
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    MOESERVE_CHECK(next_[i] == tensors_[i].end, "a tensor without all of its bytes");
  }
  const bool synced = fsync(fd_) == 0;
  const int sync_error = errno;
  const bool closed = close(std::exchange(fd_, -1)) == 0;
  if (!synced) return WriteFault(file_name_, sync_error);
  return closed ? absl::OkStatus() : WriteFault(file_name_, errno);
}

}  // namespace moeserve

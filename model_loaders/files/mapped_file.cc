#include "model_loaders/files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <system_error>

#include "base/descriptor.h"
#include "base/error_text.h"
#include "model_loaders/files/file_kind.h"

namespace moeserve {
namespace {

absl::Status SystemError(int error, const std::filesystem::path& path, std::string_view action) {
  const std::string message = Concat(Printable(path.filename().string(), PATH_MAX), ": cannot ",
                                     action, ": ", std::generic_category().message(error));
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(message);
    default:
      return absl::UnavailableError(message);
  }
}

// Without O_NONBLOCK, opening a pipe that has no writer would block.
int OpenForReading(const std::filesystem::path& path) {
  return open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
}

// The memory of smaller parts is not worth a system call.
constexpr uint64_t kSmallPart = uint64_t{64} << 10;

// Owns a file and, when it is destroyed, gives up the memory of a part of its mapping.
struct PartOfFile {
  std::shared_ptr<const MappedFile> file;
  std::string_view pages;

  PartOfFile(std::shared_ptr<const MappedFile> f, std::string_view p)
      : file(std::move(f)), pages(p) {}
  ~PartOfFile() {
    // The pages are clean, so nothing is lost. A failure only costs memory.
    madvise(const_cast<char*>(pages.data()), pages.size(), MADV_DONTNEED);
  }
  PartOfFile(const PartOfFile&) = delete;
  PartOfFile& operator=(const PartOfFile&) = delete;
};

int64_t Nanoseconds(const timespec& t) { return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec; }

Result<FileStamp> StampOfRegularFile(int fd, const std::filesystem::path& path) {
  struct stat info {};
  if (fstat(fd, &info) != 0) return SystemError(errno, path, "read its size");
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(Concat(Printable(path.filename().string(), PATH_MAX),
                                             ": expected a regular file, found a ",
                                             S_ISDIR(info.st_mode) ? "directory" : "special file"));
  }
  return FileStamp{static_cast<uint64_t>(info.st_size), Nanoseconds(info.st_mtim),
                   Nanoseconds(info.st_ctim)};
}

}  // namespace

Result<std::shared_ptr<const MappedFile>> MappedFile::Open(const std::filesystem::path& path) {
  const Descriptor fd(OpenForReading(path));
  if (fd.get() < 0) return SystemError(errno, path, "open");
  MOESERVE_ASSIGN_OR_RETURN(const FileStamp stamp, StampOfRegularFile(fd.get(), path));
  std::unique_ptr<const GuardedMapping> mapping;
  if (stamp.size > 0) {  // mmap refuses length 0
    mapping = GuardedMapping::Map(fd.get(), stamp.size, path);
    if (mapping == nullptr) return SystemError(errno, path, "map into memory");
  }
  return std::shared_ptr<const MappedFile>(new MappedFile(std::move(mapping), stamp));
}

std::shared_ptr<const void> MappedFile::ReadOnce(std::shared_ptr<const MappedFile> file,
                                                 std::string_view part) {
  if (part.size() < kSmallPart) return file;
  static const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const auto begin = static_cast<uint64_t>(part.data() - file->bytes().data());
  const uint64_t end = begin + part.size();
  // Whole pages only: their neighbours may be in use.
  const uint64_t first = (begin + page - 1) / page * page;
  const uint64_t last = end / page * page;
  const std::string_view pages = file->bytes().substr(first, last - first);
  return std::make_shared<const PartOfFile>(std::move(file), pages);
}

Result<std::string> ReadTextFile(const std::filesystem::path& path, uint64_t max_bytes) {
  const Descriptor fd(OpenForReading(path));
  if (fd.get() < 0) return SystemError(errno, path, "open");
  MOESERVE_ASSIGN_OR_RETURN(const FileStamp stamp, StampOfRegularFile(fd.get(), path));
  const uint64_t size = stamp.size;
  if (size > max_bytes) {
    return absl::InvalidArgumentError(Concat(Printable(path.filename().string(), PATH_MAX),
                                             ": expected at most ", max_bytes, " bytes, found ",
                                             size));
  }
  std::string text(size, '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = read(fd.get(), text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return SystemError(errno, path, "read");
    if (n == 0) break;  // the file has been truncated meanwhile
    done += static_cast<size_t>(n);
  }
  text.resize(done);
  MOESERVE_RETURN_IF_ERROR(CheckFileKind(path.filename().string(), text));
  return text;
}

bool Exists(const std::filesystem::path& path) {
  struct stat info {};
  return lstat(path.c_str(), &info) == 0;
}

}  // namespace moeserve

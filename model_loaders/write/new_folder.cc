#include "model_loaders/write/new_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <system_error>

#include "base/error_text.h"
#include "model_loaders/files/mapped_file.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

std::string Shown(const fs::path& path) { return Printable(path.string(), PATH_MAX); }

absl::Status SystemFault(const fs::path& path, std::string_view action, int error) {
  return absl::UnavailableError(
      Concat(Shown(path), ": cannot ", action, ": ", std::generic_category().message(error)));
}

absl::Status Sync(const fs::path& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return SystemFault(path, "open", errno);
  const bool done = fsync(fd) == 0;
  const int error = errno;
  close(fd);
  return done ? absl::OkStatus() : SystemFault(path, "write to the disk", error);
}

}  // namespace

Result<std::unique_ptr<UnfinishedFolder>> UnfinishedFolder::Create(const fs::path& destination) {
  std::unique_ptr<UnfinishedFolder> folder(new UnfinishedFolder);
  std::error_code error;
  fs::path target = fs::absolute(destination, error).lexically_normal();
  if (!target.has_filename()) target = target.parent_path();
  if (Exists(target)) {
    const bool is_folder = fs::is_directory(target, error);
    if (!is_folder || !fs::is_empty(target, error) || error) {
      return absl::InvalidArgumentError(Concat(Shown(destination),
                                               ": expected no such folder or an empty one, found ",
                                               is_folder ? "one with files" : "a file"));
    }
    target = fs::canonical(target, error);  // if `destination` is a link, its target is replaced
    if (error) return SystemFault(destination, "open", error.value());
  }
  folder->target_ = target;
  std::string pattern =
      (target.parent_path() / Concat('.', target.filename().string(), ".partial-XXXXXX")).string();
  if (mkdtemp(pattern.data()) == nullptr) {
    return SystemFault(target.parent_path(), "make a folder in it", errno);
  }
  folder->path_ = pattern;
  // mkdtemp() grants access to the owner only. Give the folder the access rights that the user's
  // umask allows.
  const mode_t mask = umask(0);
  umask(mask);
  if (chmod(pattern.c_str(), 0777 & ~mask) != 0) {
    return SystemFault(pattern, "set its access rights", errno);
  }
  return folder;
}

UnfinishedFolder::~UnfinishedFolder() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

absl::Status UnfinishedFolder::Finish() {
  MOESERVE_RETURN_IF_ERROR(Sync(path_));
  if (std::rename(path_.c_str(), target_.c_str()) != 0) {
    return SystemFault(target_, "give the new folder its name", errno);
  }
  path_.clear();
  return Sync(target_.parent_path());
}

absl::Status WriteNewFile(const fs::path& path, std::string_view text) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) return SystemFault(path, "write", errno);
  int error = 0;
  while (!text.empty() && error == 0) {
    const ssize_t n = write(fd, text.data(), text.size());
    if (n >= 0) {
      text.remove_prefix(static_cast<size_t>(n));
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (error == 0 && fsync(fd) != 0) error = errno;
  if (close(fd) != 0 && error == 0) error = errno;
  return error == 0 ? absl::OkStatus() : SystemFault(path, "write", error);
}

absl::Status CopyToNewFile(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::copy_file(from, to, error);
  if (error) return SystemFault(from, "copy", error.value());
  return Sync(to);
}

}  // namespace moeserve

#include "model_loaders/files/file_kind.h"

#include <algorithm>
#include <climits>
#include <string>
#include <system_error>

#include "base/error_text.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

struct Magic {
  std::string_view bytes;
  std::string_view what;
  OwnFormat own;
};

constexpr std::string_view kUnpack = "; unpack it and name the files in it";
constexpr Magic kMagics[] = {
    {{"PK\x03\x04", 4}, "a zip archive", OwnFormat::kZip},
    {{"PK\x05\x06", 4}, "a zip archive", OwnFormat::kZip},
    {{"\x1f\x8b\x08", 3}, "a gzip archive", OwnFormat::kOther},
    {{"\x28\xb5\x2f\xfd", 4}, "a zstd archive", OwnFormat::kOther},
    {{"\xfd"
      "7zXZ\0",
      6},
     "an xz archive",
     OwnFormat::kOther},
    {{"BZh", 3}, "a bzip2 archive", OwnFormat::kOther},
    {{"7z\xbc\xaf\x27\x1c", 6}, "a 7z archive", OwnFormat::kOther},
};

// Whether `head` begins with a tar header: POSIX.1-2001, pax, "ustar Header Block". The checksum
// decides, because the oldest form has no magic, and where the others have it any text may say so.
bool IsTar(std::string_view head) {
  constexpr size_t kBlock = 512;
  constexpr size_t kSum = 148;
  constexpr size_t kSumBytes = 8;
  if (head.size() < kBlock) return false;
  unsigned expected = 0;
  for (size_t i = 0; i < kBlock; ++i) {
    const bool in_sum = i >= kSum && i < kSum + kSumBytes;
    expected += in_sum ? ' ' : static_cast<unsigned char>(head[i]);
  }
  std::string_view digits = head.substr(kSum, kSumBytes);
  digits.remove_prefix(std::min(digits.find_first_not_of(' '), digits.size()));
  constexpr size_t kFewestDigits = 4;  // the name and the size of a file have a larger sum than 511
  if (digits.find_first_not_of("01234567") < kFewestDigits) return false;
  unsigned found = 0;
  for (const char digit : digits) {
    if (digit < '0' || digit > '7') break;
    found = found * 8 + static_cast<unsigned>(digit - '0');
  }
  return found == expected;
}

bool StartsWithIgnoringCase(std::string_view text, std::string_view begin) {
  return text.size() >= begin.size() &&
         std::equal(begin.begin(), begin.end(), text.begin(), [](char b, char t) {
           return b == (t >= 'A' && t <= 'Z' ? static_cast<char>(t | 0x20) : t);
         });
}

bool IsHtml(std::string_view head) {
  if (head.starts_with("\xef\xbb\xbf")) head.remove_prefix(3);
  const size_t begin = head.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return false;
  head.remove_prefix(begin);
  return StartsWithIgnoringCase(head, "<!doctype html") || StartsWithIgnoringCase(head, "<html");
}

bool IsIn(const fs::path& file, const fs::path& folder) {
  const auto [end, at] = std::mismatch(folder.begin(), folder.end(), file.begin(), file.end());
  return end == folder.end() && at != file.end();
}

// Returns the folder of blobs that belongs to a snapshot of Hugging Face's cache; empty if
// `directory`, a canonical path, is not in one.
fs::path BlobsOf(const fs::path& directory) {
  for (fs::path at = directory; at.has_relative_path(); at = at.parent_path()) {
    const fs::path snapshots = at.parent_path();
    const fs::path repository = snapshots.parent_path();
    if (snapshots.filename() == "snapshots" &&
        repository.filename().string().starts_with("models--")) {
      return repository / "blobs";
    }
  }
  return {};
}

}  // namespace

absl::Status CheckFileKind(std::string_view name, std::string_view head, OwnFormat own) {
  const auto found = [&](std::string_view what, std::string_view advice) {
    return absl::InvalidArgumentError(
        Concat(Printable(name), ": expected the file itself, found ", what, advice));
  };
  if (head.starts_with("version https://git-lfs.") || head.starts_with("version https://hawser.")) {
    return found("a Git LFS pointer to it", "; run \"git lfs pull\" in its folder");
  }
  if (head.starts_with("/annex/objects/")) {
    return found("a git-annex pointer to it", "; run \"git annex get\" in its folder");
  }
  if (!name.ends_with(".jinja") && IsHtml(head)) {
    return found("an HTML page",
                 ", probably an error or login page of a web site; download the file again");
  }
  if (head.starts_with("GGUF")) {
    if (own == OwnFormat::kGguf) return absl::OkStatus();
    return found("a GGUF file", "; give it a name that ends with .gguf and name it with --model");
  }
  for (const Magic& magic : kMagics) {
    if (own == magic.own && own != OwnFormat::kOther) continue;
    if (head.starts_with(magic.bytes)) return found(magic.what, kUnpack);
  }
  if (IsTar(head)) return found("a tar archive", kUnpack);
  return absl::OkStatus();
}

absl::Status CheckInsideModel(const fs::path& directory, const fs::path& path) {
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  if (error) return absl::OkStatus();  // opening it reports the error
  const fs::path folder = fs::canonical(directory, error);
  if (error || IsIn(real, folder)) return absl::OkStatus();
  const fs::path blobs = BlobsOf(folder);
  if (!blobs.empty() && IsIn(real, fs::weakly_canonical(blobs, error))) return absl::OkStatus();
  return absl::PermissionDeniedError(
      Concat(Printable(path.filename().string()),
             ": expected a file in the model's folder, found a link to ",
             Printable(real.string(), PATH_MAX),
             "; only links into the folder, and those of Hugging Face's cache, are followed"));
}

}  // namespace moeserve

#include "engine/weights/packed_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>
#include <system_error>
#include <utility>

#include "base/descriptor.h"
#include "base/guarded_mapping.h"
#include "base/sha256.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little, "files hold integers as memory does");

constexpr char kMagic[8] = {'m', 'o', 'e', 'p', 'a', 'c', 'k', '\n'};
constexpr uint32_t kVersion = 1;
constexpr size_t kPage = 4096;  // the payload begins at a multiple of this many bytes

struct Prefix {
  char magic[8];
  uint32_t version;
  uint32_t weight_dtype;
  uint64_t payload_bytes;
  uint64_t payload_checksum;
  uint32_t key_bytes;
  uint32_t zero;
};
static_assert(sizeof(Prefix) == 40);

std::string SystemMessage(int error) { return std::generic_category().message(error); }

std::string HexDigest(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (const char c : Sha256(text)) {
    hex += kDigits[static_cast<unsigned char>(c) >> 4];
    hex += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return hex;
}

std::string NumberList(const std::vector<int>& numbers) {
  std::string text;
  for (const int n : numbers) text += ' ' + std::to_string(n);
  return text + '\n';
}

size_t HeaderBytes(size_t key_bytes) {
  return (sizeof(Prefix) + key_bytes + sizeof(uint64_t) + kPage - 1) / kPage * kPage;
}

std::string Header(const std::string& key, DType weight_dtype, uint64_t payload_bytes,
                   uint64_t payload_checksum) {
  Prefix prefix{};
  std::memcpy(prefix.magic, kMagic, sizeof kMagic);
  prefix.version = kVersion;
  prefix.weight_dtype = static_cast<uint32_t>(weight_dtype);
  prefix.payload_bytes = payload_bytes;
  prefix.payload_checksum = payload_checksum;
  prefix.key_bytes = static_cast<uint32_t>(key.size());
  std::string header(HeaderBytes(key.size()), '\0');
  std::memcpy(header.data(), &prefix, sizeof prefix);
  std::memcpy(header.data() + sizeof prefix, key.data(), key.size());
  const size_t covered = header.size() - sizeof(uint64_t);
  const uint64_t checksum = PackedChecksum({header.data(), covered});
  std::memcpy(header.data() + covered, &checksum, sizeof checksum);
  return header;
}

// Returns whether the header of `file` is valid, its checksum included. The key may be another
// bank's.
bool HasIntactHeader(std::string_view file) {
  Prefix prefix;
  std::memcpy(&prefix, file.data(), sizeof prefix);
  const size_t size = HeaderBytes(prefix.key_bytes);
  if (std::memcmp(prefix.magic, kMagic, sizeof kMagic) != 0 || size > file.size()) return false;
  const size_t covered = size - sizeof(uint64_t);
  uint64_t checksum;
  std::memcpy(&checksum, file.data() + covered, sizeof checksum);
  return checksum == PackedChecksum({file.data(), covered});
}

// Returns the weights' stored type that a file's prefix names, or nullopt if this run cannot use
// that type.
std::optional<DType> WeightDType(const Prefix& prefix, const PackedBankKey& key) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    if (prefix.weight_dtype != static_cast<uint32_t>(type)) continue;
    const bool bf16_only =
        key.shape.quantization != Quantization::kNone || key.compute == DType::kBF16;
    if (type == DType::kBF16 || !bf16_only) return type;
  }
  return std::nullopt;
}

// Writes all bytes. Returns 0 or errno; ECANCELED if `stopped` returns true.
int WriteAll(int fd, const char* data, size_t size, const std::function<bool()>& stopped) {
  constexpr size_t kPart = size_t{16} << 20;
  while (size > 0) {
    if (stopped()) return ECANCELED;
    const ssize_t n = write(fd, data, size < kPart ? size : kPart);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    data += n;
    size -= static_cast<size_t>(n);
  }
  return 0;
}

// Returns whether `least_free` bytes of the file system are free after `bytes` more are written. If
// that is unknown, the writing will show.
bool LeavesFree(const fs::path& folder, uint64_t bytes, uint64_t least_free) {
  if (least_free == 0) return true;
  std::error_code error;
  const fs::space_info space = fs::space(folder, error);
  return error || (space.available >= bytes && space.available - bytes >= least_free);
}

bool IsSameFile(int fd, const fs::path& path) {
  struct stat open_file {
  }, named{};
  return fstat(fd, &open_file) == 0 && lstat(path.c_str(), &named) == 0 &&
         S_ISREG(open_file.st_mode) && open_file.st_dev == named.st_dev &&
         open_file.st_ino == named.st_ino;
}

// Writes `header` and `payload` to a temporary file, then renames the temporary file to `path`. A
// writer locks the temporary file first. If a process dies while writing, the temporary file is
// left behind, and the next writer overwrites it. Returns false if another process holds the lock.
// Otherwise returns true, with `error` 0 or errno.
bool Replace(const fs::path& path, std::string_view header, std::span<const char> payload,
             const std::function<bool()>& stopped, int& error) {
  error = 0;
  const fs::path temporary = path.string() + ".new";
  const Descriptor fd(
      open(temporary.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
  if (fd.get() < 0) {
    error = errno;
    return true;
  }
  if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return false;
    error = errno;
    return true;
  }
  // Another writer may have renamed the temporary file between our open() and our lock.
  if (!IsSameFile(fd.get(), temporary)) return false;
  if (ftruncate(fd.get(), 0) != 0) error = errno;
  if (error == 0) error = WriteAll(fd.get(), header.data(), header.size(), stopped);
  if (error == 0) error = WriteAll(fd.get(), payload.data(), payload.size(), stopped);
  if (error == 0 && fsync(fd.get()) != 0) error = errno;
  if (error == 0 && rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) unlink(temporary.c_str());
  return true;
}

}  // namespace

uint64_t PackedChecksum(std::span<const char> bytes) {
  // Odd, so that the multiplication is invertible.
  constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15;
  constexpr size_t kLanes = 8;
  const auto step = [](uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * kMultiplier;
    return sum ^ sum >> 32;
  };
  uint64_t lanes[kLanes];
  for (size_t l = 0; l < kLanes; ++l) lanes[l] = l + 1;
  const char* p = bytes.data();
  size_t left = bytes.size();
  for (; left >= sizeof lanes; left -= sizeof lanes, p += sizeof lanes) {
    uint64_t words[kLanes];
    std::memcpy(words, p, sizeof words);
    for (size_t l = 0; l < kLanes; ++l) lanes[l] = step(lanes[l], words[l]);
  }
  uint64_t sum = bytes.size();
  for (; left > 0;) {
    uint64_t word = 0;
    const size_t n = left < sizeof word ? left : sizeof word;
    std::memcpy(&word, p, n);
    sum = step(sum, word);
    p += n;
    left -= n;
  }
  for (const uint64_t lane : lanes) sum = step(sum, lane);
  return sum;
}

PackedCache::PackedCache(PackedCacheOptions options, Backend& backend)
    : options_(std::move(options)), state_digest_(HexDigest(options_.state)), backend_(backend) {}

Result<std::unique_ptr<PackedCache>> PackedCache::Open(PackedCacheOptions options,
                                                       Backend& backend) {
  if (backend.packed_layout().empty()) {
    return absl::UnimplementedError("packed cache: expected the device cpu, found " +
                                    std::string(backend.name()));
  }
  std::unique_ptr<PackedCache> cache(new PackedCache(std::move(options), backend));
  const fs::path& folder = cache->options_.folder;
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    cache->Warn(folder, "cannot make the folder: " + SystemMessage(errno));
    cache->writing_ = false;
    cache->open_failed_ = true;
  }
  return cache;
}

std::unique_ptr<LinearBank> PackedCache::Find(const PackedBankKey& key) {
  const fs::path path = PathOf(key);
  // Without O_NONBLOCK, opening a named pipe would block.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) {
    const int error = errno;
    if (error != ENOENT && !std::exchange(open_failed_, true)) {
      Warn(path, "cannot open: " + SystemMessage(error));
    }
    return nullptr;
  }
  std::string problem;
  std::unique_ptr<LinearBank> bank = Read(key, path, file.get(), problem);
  if (bank != nullptr) {
    ++found_;
    futimens(file.get(), nullptr);  // fails if the file belongs to another user
  }
  if (!problem.empty()) Warn(path, problem + "; weights are packed anew");
  return bank;
}

std::unique_ptr<LinearBank> PackedCache::Read(const PackedBankKey& key, const fs::path& path,
                                              int file, std::string& problem) {
  struct stat info {};
  if (fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
    problem = "expected a regular file";
    return nullptr;
  }
  const auto size = static_cast<uint64_t>(info.st_size);
  const std::string text = KeyText(key);
  const size_t header_bytes = HeaderBytes(text.size());
  if (size < header_bytes) {
    problem = "expected at least " + std::to_string(header_bytes) + " bytes, found " +
              std::to_string(size);
    return nullptr;
  }
  std::shared_ptr<const GuardedMapping> owner = GuardedMapping::Map(file, size, path);
  if (owner == nullptr) {
    problem = "cannot map: " + SystemMessage(errno);
    return nullptr;
  }
  const char* const data = owner->data();
  const std::string_view header(data, header_bytes);
  Prefix prefix;
  std::memcpy(&prefix, data, sizeof prefix);
  LinearBankShape shape = key.shape;
  const std::optional<DType> type = WeightDType(prefix, key);
  if (type.has_value()) shape.weight_dtype = *type;
  const auto expected = static_cast<uint64_t>(backend_.PackedBankBytes(shape));
  if (!type.has_value() || header != Header(text, *type, expected, prefix.payload_checksum)) {
    // A valid file for another state of the checkpoint is ignored without a warning.
    if (!HasIntactHeader({header.data(), size}))
      problem = "its header is damaged or not of a packed bank";
    return nullptr;
  }
  if (size != header_bytes + expected) {
    problem = "expected " + std::to_string(header_bytes + expected) + " bytes, found " +
              std::to_string(size);
    return nullptr;
  }
  madvise(const_cast<char*>(data), size, MADV_WILLNEED);
  const std::span<const char> payload(data + header_bytes, expected);
  if (PackedChecksum(payload) != prefix.payload_checksum) {
    problem = "its content is damaged: the checksum differs";
    return nullptr;
  }
  auto bank = backend_.NewPackedBank(std::move(shape), {payload, std::move(owner)});
  if (!bank.ok()) {
    problem = std::string(bank.status().message());
    return nullptr;
  }
  return *std::move(bank);
}

void PackedCache::Store(const PackedBankKey& key, const LinearBank& bank) {
  if (options_.defer) {
    deferred_.emplace_back(key, &bank);
  } else {
    Write(key, bank, [] { return false; });
  }
}

void PackedCache::WriteDeferred(const std::function<bool()>& stopped) {
  for (const auto& [key, bank] : deferred_) {
    if (!writing_ || stopped()) break;
    Write(key, *bank, stopped);
  }
  deferred_.clear();
}

void PackedCache::RemoveUnused(const fs::path& folder, std::chrono::hours age) {
  std::error_code ignored;
  const auto oldest = fs::file_time_type::clock::now() - age;
  for (fs::directory_iterator file(folder, ignored), end; !ignored && file != end;
       file.increment(ignored)) {
    const std::string name = file->path().filename();
    if (!name.ends_with(".packed") && !name.ends_with(".packed.new")) continue;
    std::error_code error;
    const auto used = fs::last_write_time(file->path(), error);
    if (!error && used < oldest) fs::remove(file->path(), error);
  }
}

void PackedCache::Write(const PackedBankKey& key, const LinearBank& bank,
                        const std::function<bool()>& stopped) {
  const std::span<const char> payload = bank.packed_bytes();
  if (!writing_ || payload.empty()) return;
  const fs::path path = PathOf(key);
  if (!LeavesFree(options_.folder, payload.size(), options_.least_free)) {
    writing_ = false;
    Warn(options_.folder, "the disk is almost full; nothing more is written");
    return;
  }
  const std::string header =
      Header(KeyText(key), bank.shape().weight_dtype, payload.size(), PackedChecksum(payload));
  int error = 0;
  if (!Replace(path, header, payload, stopped, error) || error == ECANCELED) return;
  if (error == 0) {
    ++stored_;
    return;
  }
  writing_ = false;
  Warn(path, "cannot write: " + SystemMessage(error) + "; nothing more is written");
}

fs::path PackedCache::PathOf(const PackedBankKey& key) const {
  std::string text = options_.place + '\n' + std::string(Name(key.compute)) + '\n' +
                     std::string(Name(key.shape.quantization)) + '\n';
  for (const std::string& tensor : key.tensors) text += tensor + '\n';
  return options_.folder / (key.tensors.front() + '.' + HexDigest(text).substr(0, 32) + ".packed");
}

std::string PackedCache::KeyText(const PackedBankKey& key) const {
  std::string names;
  for (const std::string& tensor : key.tensors) names += tensor + '\n';
  return "layout " + std::string(backend_.packed_layout()) +              //
         "\nstate " + state_digest_ +                                     //
         "\ntensors " + HexDigest(names) +                                //
         "\nfirst " + key.tensors.front() +                               //
         "\ncompute " + std::string(Name(key.compute)) +                  //
         "\nquantization " + std::string(Name(key.shape.quantization)) +  //
         "\ngated " + (key.shape.gated ? "yes" : "no") +                  //
         "\nbias " + (key.shape.bias ? "yes" : "no") +                    //
         "\nin" + NumberList(key.shape.in_features) +                     //
         "out" + NumberList(key.shape.out_features) +                     //
         "place " + options_.place + '\n';
}

void PackedCache::Warn(const fs::path& path, const std::string& problem) const {
  if (options_.warn) options_.warn("packed cache: " + path.string() + ": " + problem);
}

}  // namespace moeserve

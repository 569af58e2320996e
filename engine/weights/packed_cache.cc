#include "engine/weights/packed_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <system_error>
#include <utility>

#include "base/descriptor.h"
#include "base/guarded_mapping.h"
#include "base/sha256.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

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

// Returns the weights' stored type that a file names, or nullopt if this run cannot use
// that type.
std::optional<DType> WeightDType(uint32_t stored, const PackedBankKey& key) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    if (stored != static_cast<uint32_t>(type)) continue;
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

// The bytes of a file, and zeros that follow each of them.
struct FilePart {
  std::span<const char> bytes;
  size_t zeros = 0;
};

// Writes the parts to a temporary file, then renames the temporary file to `path`. A
// writer locks the temporary file first. If a process dies while writing, the temporary file is
// left behind, and the next writer overwrites it. Returns false if another process holds the lock.
// Otherwise returns true, with `error` 0 or errno.
bool Replace(const fs::path& path, std::span<const FilePart> parts,
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
  for (const FilePart& part : parts) {
    if (error == 0) error = WriteAll(fd.get(), part.bytes.data(), part.bytes.size(), stopped);
    const std::string zeros(part.zeros, '\0');
    if (error == 0) error = WriteAll(fd.get(), zeros.data(), zeros.size(), stopped);
  }
  if (error == 0 && fsync(fd.get()) != 0) error = errno;
  if (error == 0 && rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) unlink(temporary.c_str());
  return true;
}

}  // namespace

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

CachedBank PackedCache::Find(const PackedBankKey& key, bool verify, const std::vector<bool>& here) {
  const fs::path path = PathOf(key);
  // Without O_NONBLOCK, opening a named pipe would block.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) {
    const int error = errno;
    if (error != ENOENT && !std::exchange(open_failed_, true)) {
      Warn(path, "cannot open: " + SystemMessage(error));
    }
    return {};
  }
  std::string problem;
  LinearBankShape shape = key.shape;
  CachedBank found;
  if (auto experts = Read(key, path, file.get(), shape, problem)) {
    found = BankOf(std::move(shape), std::move(experts), verify, here, problem);
  }
  if (found.bank != nullptr) {
    ++found_;
    futimens(file.get(), nullptr);  // fails if the file belongs to another user
  }
  if (!problem.empty()) Warn(path, problem + "; weights are packed anew");
  return found;
}

std::shared_ptr<PackedExperts> PackedCache::Read(const PackedBankKey& key, const fs::path& path,
                                                 int file, LinearBankShape& shape,
                                                 std::string& problem) const {
  struct stat info {};
  if (fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
    problem = "expected a regular file";
    return nullptr;
  }
  const auto size = static_cast<uint64_t>(info.st_size);
  const std::string text = KeyText(key);
  const size_t experts = shape.out_features.size();
  if (size < PackedHeaderBytes(0, 0)) {
    problem = "expected at least " + std::to_string(PackedHeaderBytes(experts, text.size())) +
              " bytes, found " + std::to_string(size);
    return nullptr;
  }
  std::shared_ptr<const GuardedMapping> owner = GuardedMapping::Map(file, size, path);
  if (owner == nullptr) {
    problem = "cannot map: " + SystemMessage(errno);
    return nullptr;
  }
  const std::string_view bytes(owner->data(), size);
  // The system must not read experts ahead of the header.
  madvise(const_cast<char*>(owner->data()), size, MADV_RANDOM);
  PackedPrefix prefix = ReadPackedPrefix(bytes, experts);
  const std::optional<DType> type = WeightDType(prefix.weight_dtype, key);
  if (type.has_value()) shape.weight_dtype = *type;
  std::vector<PackedPart> parts = PartsOf(shape);
  for (size_t e = 0; e < prefix.parts.size(); ++e) parts[e].checksum = prefix.parts[e].checksum;
  std::string header;
  if (type.has_value()) header = PackedHeader(text, *type, parts);
  if (header.empty() || bytes.substr(0, header.size()) != header) {
    // A valid file for another state of the checkpoint is ignored without a warning.
    if (CheckPackedHeader(bytes) == PackedHeaderState::kDamaged)
      problem = "its header is damaged or not of a packed bank";
    return nullptr;
  }
  const uint64_t payload = parts.back().offset + parts.back().bytes;
  if (size != header.size() + payload) {
    problem = "expected " + std::to_string(header.size() + payload) + " bytes, found " +
              std::to_string(size);
    return nullptr;
  }
  madvise(const_cast<char*>(owner->data()), size, MADV_NORMAL);
  const std::span<const char> span(owner->data() + header.size(), payload);
  return std::make_shared<PackedExperts>(std::move(owner), span, std::move(parts), path,
                                         key.tensors.front());
}

CachedBank PackedCache::BankOf(LinearBankShape shape, std::shared_ptr<PackedExperts> experts,
                               bool verify, const std::vector<bool>& here, std::string& problem) {
  PackedBytes packed{.experts = {}, .owner = experts->owner()};
  for (int e = 0; e < experts->count(); ++e) {
    if (here.empty() || here[static_cast<size_t>(e)]) {
      packed.experts.push_back(experts->bytes(e));
    } else {
      packed.experts.emplace_back();
      shape.out_features[static_cast<size_t>(e)] = 0;
    }
  }
  if (verify) {
    madvise(const_cast<char*>(experts->owner()->data()), experts->owner()->size(), MADV_WILLNEED);
    for (int e = 0; e < experts->count(); ++e) {
      if (packed.experts[static_cast<size_t>(e)].empty() || experts->Matches(e)) continue;
      problem = "its content is damaged: the checksum differs";
      return {};
    }
  }
  auto bank = backend_.NewPackedBank(std::move(shape), std::move(packed));
  if (!bank.ok()) {
    problem = std::string(bank.status().message());
    return {};
  }
  return {*std::move(bank), std::move(experts)};
}

std::vector<PackedPart> PackedCache::PartsOf(const LinearBankShape& shape) const {
  std::vector<uint64_t> bytes;
  for (int e = 0; e < static_cast<int>(shape.out_features.size()); ++e) {
    bytes.push_back(static_cast<uint64_t>(backend_.PackedExpertBytes(shape, e)));
  }
  return PackedParts(bytes);
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
  if (!writing_) return;
  std::vector<PackedPart> parts = PartsOf(bank.shape());
  const uint64_t payload = parts.back().offset + parts.back().bytes;
  if (payload == 0) return;
  const fs::path path = PathOf(key);
  if (!LeavesFree(options_.folder, payload, options_.least_free)) {
    writing_ = false;
    Warn(options_.folder, "the disk is almost full; nothing more is written");
    return;
  }
  std::vector<FilePart> file(1);  // the header, which follows from the rest
  for (size_t e = 0; e < parts.size(); ++e) {
    if (stopped()) return;
    const std::span<const char> bytes = bank.packed_bytes(static_cast<int>(e));
    parts[e].checksum = PackedChecksum(bytes);
    const uint64_t end = parts[e].offset + parts[e].bytes;
    file.push_back({bytes, e + 1 < parts.size() ? parts[e + 1].offset - end : 0});
  }
  const std::string header = PackedHeader(KeyText(key), bank.shape().weight_dtype, parts);
  file[0].bytes = header;
  int error = 0;
  if (!Replace(path, file, stopped, error) || error == ECANCELED) return;
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

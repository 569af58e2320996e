#include "engine/tiers/packed_file.h"

#include <bit>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/error_text.h"

namespace moeserve {
namespace {

static_assert(std::endian::native == std::endian::little, "files hold integers as memory does");

constexpr char kMagic[8] = {'m', 'o', 'e', 'p', 'a', 'c', 'k', '\n'};
constexpr uint32_t kVersion = 2;
constexpr uint32_t kOldVersion = 1;
constexpr uint64_t kPage = 4096;  // the payload begins at a multiple of this many bytes
constexpr uint64_t kLine = 64;
// Beginning at a page costs an expert of this size 3 % on average.
constexpr uint64_t kOwnPages = uint64_t{64} << 10;

struct Prefix {
  char magic[8];
  uint32_t version;
  uint32_t weight_dtype;
  uint64_t payload_bytes;
  uint32_t experts;
  uint32_t key_bytes;
};
static_assert(sizeof(Prefix) == 32);
static_assert(sizeof(PackedPart) == 24);

uint64_t RoundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

std::vector<PackedPart> PackedParts(std::span<const uint64_t> bytes) {
  std::vector<PackedPart> parts;
  uint64_t end = 0;
  for (const uint64_t size : bytes) {
    const uint64_t begin = RoundUp(end, size >= kOwnPages ? kPage : kLine);
    parts.push_back({.offset = begin, .bytes = size});
    end = begin + size;
  }
  return parts;
}

size_t PackedHeaderBytes(size_t experts, size_t key_bytes) {
  return RoundUp(sizeof(Prefix) + experts * sizeof(PackedPart) + key_bytes + sizeof(uint64_t),
                 kPage);
}

std::string PackedHeader(const std::string& key, DType weight_dtype,
                         std::span<const PackedPart> parts) {
  Prefix prefix{};
  std::memcpy(prefix.magic, kMagic, sizeof kMagic);
  prefix.version = kVersion;
  prefix.weight_dtype = static_cast<uint32_t>(weight_dtype);
  prefix.payload_bytes = parts.back().offset + parts.back().bytes;
  prefix.experts = static_cast<uint32_t>(parts.size());
  prefix.key_bytes = static_cast<uint32_t>(key.size());
  std::string header(PackedHeaderBytes(parts.size(), key.size()), '\0');
  char* next = header.data();
  std::memcpy(next, &prefix, sizeof prefix);
  next += sizeof prefix;
  std::memcpy(next, parts.data(), parts.size_bytes());
  next += parts.size_bytes();
  std::memcpy(next, key.data(), key.size());
  const size_t covered = header.size() - sizeof(uint64_t);
  const uint64_t checksum = PackedChecksum({header.data(), covered});
  std::memcpy(header.data() + covered, &checksum, sizeof checksum);
  return header;
}

PackedPrefix ReadPackedPrefix(std::string_view file, size_t experts) {
  Prefix prefix;
  std::memcpy(&prefix, file.data(), sizeof prefix);
  PackedPrefix read{.weight_dtype = prefix.weight_dtype, .parts = {}};
  if (file.size() < PackedHeaderBytes(experts, 0)) return read;
  read.parts.resize(experts);
  std::memcpy(read.parts.data(), file.data() + sizeof prefix, experts * sizeof(PackedPart));
  return read;
}

PackedHeaderState CheckPackedHeader(std::string_view file) {
  Prefix prefix;
  std::memcpy(&prefix, file.data(), sizeof prefix);
  if (std::memcmp(prefix.magic, kMagic, sizeof kMagic) != 0) return PackedHeaderState::kDamaged;
  if (prefix.version == kOldVersion) return PackedHeaderState::kOld;
  const size_t size = PackedHeaderBytes(prefix.experts, prefix.key_bytes);
  if (size > file.size()) return PackedHeaderState::kDamaged;
  const size_t covered = size - sizeof(uint64_t);
  uint64_t checksum;
  std::memcpy(&checksum, file.data() + covered, sizeof checksum);
  return checksum == PackedChecksum({file.data(), covered}) ? PackedHeaderState::kIntact
                                                            : PackedHeaderState::kDamaged;
}

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

PackedExperts::PackedExperts(std::shared_ptr<const GuardedMapping> owner,
                             std::span<const char> payload, std::vector<PackedPart> parts,
                             std::filesystem::path path, std::string bank)
    : owner_(std::move(owner)),
      payload_(payload),
      parts_(std::move(parts)),
      verified_(new std::atomic<bool>[parts_.size()]()),
      path_(std::move(path)),
      bank_(std::move(bank)) {}

bool PackedExperts::Matches(int expert) {
  std::atomic<bool>& verified = verified_[static_cast<size_t>(expert)];
  if (verified.load()) return true;
  const bool matches =
      PackedChecksum(bytes(expert)) == parts_[static_cast<size_t>(expert)].checksum;
  if (matches) verified.store(true);
  return matches;
}

absl::Status PackedExperts::Verify(int expert) {
  if (Matches(expert)) return absl::OkStatus();
  // A file that lost its end says more than a checksum.
  if (absl::Status cut = owner_->Check(); !cut.ok()) return cut;
  Remove();
  return absl::InternalError(Concat("packed cache: expert ", expert, " of the bank ", bank_,
                                    " in the file ", Printable(path_.filename().string(), 255),
                                    " is damaged: the checksum differs; the next start packs the "
                                    "bank anew"));
}

void PackedExperts::Remove() const {
  if (!owner_->IsFileAt(path_)) return;
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

}  // namespace moeserve

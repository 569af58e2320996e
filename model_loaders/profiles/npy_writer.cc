#include "model_loaders/profiles/npy_writer.h"

#include <array>
#include <bit>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"

namespace moeserve {
namespace {

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

// Capacity for the longest header, so that the header can be replaced in place.
constexpr size_t kHeaderBytes = 128;

absl::Status Fault(const std::string& name, int error) {
  return absl::UnavailableError(Concat("cannot write ", Quoted(name), ": ",
                                       std::error_code(error, std::generic_category()).message()));
}

}  // namespace

std::string NpyHeader(std::string_view type, std::span<const int64_t> shape) {
  // The header has the shape as Python prints a tuple: (7,) and (2, 3).
  std::string dimensions = shape.empty() ? "" : Concat(shape[0], ",");
  for (size_t i = 1; i < shape.size(); ++i) dimensions += Concat(i > 1 ? ", " : " ", shape[i]);
  std::string dictionary =
      Concat("{'descr': '", type, "', 'fortran_order': False, 'shape': (", dimensions, "), }");
  // 10 bytes of magic, version and length precede the dictionary, and a newline follows it.
  MOESERVE_CHECK(dictionary.size() <= kHeaderBytes - 11, "a shape that the header has room for");
  dictionary.resize(kHeaderBytes - 11, ' ');
  const size_t length = kHeaderBytes - 10;
  std::string out("\x93NUMPY\x01\x00", 8);
  out += static_cast<char>(length & 0xff);
  out += static_cast<char>(length >> 8);
  return out + dictionary + "\n";
}

std::string NpyWriter::Header() const {
  const auto values = static_cast<int64_t>(bytes_ / element_bytes_);
  if (row_size_ == 0) return NpyHeader(type_, std::array<int64_t, 1>{values});
  return NpyHeader(type_, std::array<int64_t, 2>{values / row_size_, row_size_});
}

Result<std::unique_ptr<NpyWriter>> NpyWriter::Create(const std::filesystem::path& path,
                                                     std::string_view type, int64_t row_size) {
  std::unique_ptr<NpyWriter> writer(new NpyWriter);
  writer->name_ = path.filename().string();
  writer->type_ = std::string(type);
  writer->element_bytes_ = static_cast<size_t>(type.back() - '0');
  writer->row_size_ = row_size;
  writer->file_.reset(std::fopen(path.c_str(), "wb"));
  if (writer->file_ == nullptr) return Fault(writer->name_, errno);
  const std::string header = writer->Header();
  if (std::fwrite(header.data(), 1, header.size(), writer->file_.get()) != header.size()) {
    return Fault(writer->name_, errno);
  }
  return writer;
}

void NpyWriter::AppendBytes(const void* data, size_t size) {
  if (error_ != 0 || size == 0) return;
  if (std::fwrite(data, 1, size, file_.get()) != size) error_ = errno != 0 ? errno : EIO;
  bytes_ += size;
}

absl::Status NpyWriter::Finish() {
  const std::string header = Header();
  if (error_ == 0 && (std::fseek(file_.get(), 0, SEEK_SET) != 0 ||
                      std::fwrite(header.data(), 1, header.size(), file_.get()) != header.size())) {
    error_ = errno;
  }
  if (std::fclose(file_.release()) != 0 && error_ == 0) error_ = errno;
  return error_ == 0 ? absl::OkStatus() : Fault(name_, error_);
}

}  // namespace moeserve

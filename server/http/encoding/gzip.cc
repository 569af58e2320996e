#include "server/http/encoding/gzip.h"

#include <zlib.h>

#include <algorithm>
#include <new>

#include "base/check.h"

namespace moeserve::server::http {
namespace {

// In zlib's terms: a window of 32 KiB, with the header and the trailer of gzip.
constexpr int kGzipWindow = 15 + 16;
constexpr int kDefaultMemoryLevel = 8;

// A text of more than kFreeBytes may be kMaxRatio times as large as its compressed form. Texts that
// people and programs write are below 20.
constexpr size_t kFreeBytes = 1 << 20;
constexpr uint64_t kMaxRatio = 256;

// zlib takes pointers to bytes that it only reads as not const.
Bytef* Input(std::string_view text) {
  return const_cast<Bytef*>(reinterpret_cast<const Bytef*>(text.data()));
}

Bytef* Output(std::string& text, size_t at) { return reinterpret_cast<Bytef*>(text.data()) + at; }

}  // namespace

struct GzipInflater::Stream {
  z_stream z = {};
  Stream() {
    if (inflateInit2(&z, kGzipWindow) != Z_OK) throw std::bad_alloc();
  }
  ~Stream() { inflateEnd(&z); }
};

GzipInflater::GzipInflater(size_t max_bytes)
    : stream_(std::make_unique<Stream>()), max_bytes_(max_bytes) {}
GzipInflater::~GzipInflater() = default;

Inflated GzipInflater::Inflate(std::string_view& input, size_t most, std::string& out) {
  z_stream& z = stream_->z;
  const size_t before = out.size();
  out.resize(before + most);
  size_t made = 0;
  Inflated result = Inflated::kAll;
  while (true) {
    if (complete_) {
      if (input.empty()) break;
      inflateReset(&z);  // a further member
      complete_ = false;
    }
    z.next_in = Input(input);
    z.avail_in = static_cast<uInt>(input.size());
    z.next_out = Output(out, before + made);
    z.avail_out = static_cast<uInt>(most - made);
    const int status = inflate(&z, Z_NO_FLUSH);
    const size_t used = input.size() - z.avail_in;
    input.remove_prefix(used);
    taken_ += used;
    made = most - z.avail_out;
    if (status == Z_STREAM_END) {
      complete_ = true;
      continue;
    }
    // Z_BUF_ERROR only says that there is no more input or no more room.
    if (status != Z_OK && status != Z_BUF_ERROR) {
      result = Inflated::kBad;
    } else if (z.avail_out == 0) {
      result = Inflated::kPart;
    } else if (!input.empty()) {
      result = Inflated::kBad;
    }
    break;
  }
  out.resize(before + made);
  made_ += made;
  if (made_ > max_bytes_ || (made_ > kFreeBytes && made_ / kMaxRatio > taken_)) {
    return Inflated::kTooLarge;
  }
  return result;
}

struct GzipDeflater::Stream {
  z_stream z = {};
  Stream() {
    const int status = deflateInit2(&z, Z_BEST_SPEED, Z_DEFLATED, kGzipWindow, kDefaultMemoryLevel,
                                    Z_DEFAULT_STRATEGY);
    if (status != Z_OK) throw std::bad_alloc();
  }
  ~Stream() { deflateEnd(&z); }
};

GzipDeflater::GzipDeflater() : stream_(std::make_unique<Stream>()) {}
GzipDeflater::~GzipDeflater() = default;

void GzipDeflater::Deflate(std::string_view input, bool last, std::string& out) {
  z_stream& z = stream_->z;
  z.next_in = Input(input);
  z.avail_in = static_cast<uInt>(input.size());
  const int flush = last ? Z_FINISH : Z_NO_FLUSH;
  bool more = true;
  while (more) {
    const size_t before = out.size();
    const size_t room = std::max<size_t>(1024, input.size() / 4);
    out.resize(before + room);
    z.next_out = Output(out, before);
    z.avail_out = static_cast<uInt>(room);
    const int status = deflate(&z, flush);
    MOESERVE_CHECK(status != Z_STREAM_ERROR, "the stream is in order");
    out.resize(before + room - z.avail_out);
    more = last ? status != Z_STREAM_END : z.avail_out == 0;
  }
}

}  // namespace moeserve::server::http

#include "base/sha256.h"

#include <openssl/evp.h>

#include "base/check.h"

namespace moeserve {

std::string Sha256(std::string_view bytes) {
  std::string digest(32, '\0');
  unsigned int size = 0;
  const int done =
      EVP_Digest(bytes.data(), bytes.size(), reinterpret_cast<unsigned char*>(digest.data()), &size,
                 EVP_sha256(), nullptr);
  MOESERVE_CHECK(done == 1 && size == digest.size(), "SHA-256 of the linked OpenSSL");
  return digest;
}

}  // namespace moeserve

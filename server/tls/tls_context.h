// Makes OpenSSL's contexts for the two listeners from files.
#pragma once

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "base/status.h"

namespace boost::asio::ssl {
class context;
}

namespace moeserve::server {

struct TlsOptions {
  std::string certificate;  // file: the server's certificate, then intermediate ones, in PEM
  std::string key;          // file: the private key in PEM, not encrypted
  std::string client_ca;    // file: who may sign client certificates, in PEM; empty: nobody
  bool only_1_3 = false;    // false: TLS 1.2, too

  bool enabled() const { return !certificate.empty(); }
};

struct TlsContexts {
  std::shared_ptr<boost::asio::ssl::context> http;  // asks for client certificates
  std::shared_ptr<boost::asio::ssl::context> grpc;  // requires client certificates
  absl::Time not_before;                            // of the server's certificate
  absl::Time not_after;
};

// Reads the files. InvalidArgument, naming the file, if one cannot be read, is larger than 1 MiB or
// not PEM, if the key is encrypted, or if it does not belong to the certificate. An expired
// certificate is no error.
Result<TlsContexts> LoadTls(const TlsOptions& options);

}  // namespace moeserve::server

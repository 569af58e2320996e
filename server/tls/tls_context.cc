#include "server/tls/tls_context.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <boost/asio/ssl/context.hpp>
#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "model_loaders/files/mapped_file.h"

namespace moeserve::server {
namespace {

namespace ssl = boost::asio::ssl;

constexpr size_t kMaxFileBytes = 1 << 20;
constexpr char kCiphers[] =
    "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384:"
    "ECDHE-RSA-AES256-GCM-SHA384:ECDHE-ECDSA-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305";
constexpr unsigned char kSessionContext[] = "moeserve";

template <typename T, void (*Free)(T*)>
struct Deleter {
  void operator()(T* object) const { Free(object); }
};
using Certificate = std::unique_ptr<X509, Deleter<X509, X509_free>>;
using PrivateKey = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY, EVP_PKEY_free>>;
struct FreeBio {
  void operator()(BIO* bio) const { BIO_free(bio); }
};
using Bio = std::unique_ptr<BIO, FreeBio>;

absl::Status Bad(const std::string& file, std::string_view what) {
  ERR_clear_error();
  return absl::InvalidArgumentError(Concat(file, ": ", what));
}

Result<std::string> ReadSmallFile(const std::string& file) {
  Result<std::string> text = ReadTextFile(file, kMaxFileBytes);
  if (text.ok()) return text;
  const std::string folder = std::filesystem::path(file).parent_path().string();
  return Prefixed(folder.empty() ? "" : Concat(folder, '/'), text.status());
}

Bio Reader(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// Reads all certificates of a file, of which there is at least one.
Result<std::vector<Certificate>> ReadCertificates(const std::string& file) {
  MOESERVE_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(file));
  const Bio bio = Reader(text);
  std::vector<Certificate> out;
  while (X509* certificate = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) {
    out.emplace_back(certificate);
  }
  const bool ended = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  if (!ended || out.empty()) {
    return Bad(file, Concat("expected certificates in PEM, found ", out.size(),
                            ended ? "" : " before bytes that are none"));
  }
  ERR_clear_error();
  return out;
}

int RefusePassword(char*, int, int, void* asked) {
  *static_cast<bool*>(asked) = true;
  return -1;
}

Result<PrivateKey> ReadKey(const std::string& file) {
  MOESERVE_ASSIGN_OR_RETURN(std::string text, ReadSmallFile(file));
  bool encrypted = false;
  PrivateKey key(PEM_read_bio_PrivateKey(Reader(text).get(), nullptr, &RefusePassword, &encrypted));
  OPENSSL_cleanse(text.data(), text.size());
  if (encrypted) return Bad(file, "the private key is encrypted; expected one without a password");
  if (key == nullptr) return Bad(file, "expected a private key in PEM");
  return key;
}

Result<absl::Time> ToTime(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InvalidArgumentError("no time");
  return absl::FromTM(parts, absl::UTCTimeZone());
}

// Chooses the protocol that the client offers; `name` is one in ALPN's form.
int Choose(std::string_view name, bool required, const unsigned char** out, unsigned char* size,
           const unsigned char* offered, unsigned int offered_size) {
  unsigned char* found = nullptr;
  const int result =
      SSL_select_next_proto(&found, size, reinterpret_cast<const unsigned char*>(name.data()),
                            static_cast<unsigned int>(name.size()), offered, offered_size);
  if (result != OPENSSL_NPN_NEGOTIATED) {
    return required ? SSL_TLSEXT_ERR_ALERT_FATAL : SSL_TLSEXT_ERR_NOACK;
  }
  *out = found;
  return SSL_TLSEXT_ERR_OK;
}

int ChooseHttp(SSL*, const unsigned char** out, unsigned char* size, const unsigned char* offered,
               unsigned int offered_size, void*) {
  return Choose("\x08http/1.1", false, out, size, offered, offered_size);
}

int ChooseHttp2(SSL*, const unsigned char** out, unsigned char* size, const unsigned char* offered,
                unsigned int offered_size, void*) {
  return Choose("\x02h2", true, out, size, offered, offered_size);
}

absl::Status SetFiles(const TlsOptions& options, const std::vector<Certificate>& chain,
                      EVP_PKEY* key, SSL_CTX* context) {
  if (SSL_CTX_use_certificate(context, chain.front().get()) != 1) {
    return Bad(options.certificate, "OpenSSL refuses the certificate, for example its key's size");
  }
  for (size_t i = 1; i < chain.size(); ++i) {
    if (SSL_CTX_add1_chain_cert(context, chain[i].get()) != 1) {
      return Bad(options.certificate, "OpenSSL refuses an intermediate certificate");
    }
  }
  if (X509_check_private_key(chain.front().get(), key) != 1) {
    return Bad(options.key,
               Concat("the key does not belong to the certificate in ", options.certificate));
  }
  if (SSL_CTX_use_PrivateKey(context, key) != 1) {
    return Bad(options.key, "OpenSSL refuses the private key");
  }
  return absl::OkStatus();
}

absl::Status SetClientCa(const TlsOptions& options, const std::vector<Certificate>& authorities,
                         bool required, SSL_CTX* context) {
  X509_STORE* const store = SSL_CTX_get_cert_store(context);
  for (const Certificate& authority : authorities) {
    if (X509_STORE_add_cert(store, authority.get()) != 1 ||
        SSL_CTX_add_client_CA(context, authority.get()) != 1) {
      return Bad(options.client_ca, "OpenSSL refuses a certificate of this file");
    }
  }
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | (required ? SSL_VERIFY_FAIL_IF_NO_PEER_CERT : 0),
                     nullptr);
  return absl::OkStatus();
}

}  // namespace

Result<TlsContexts> LoadTls(const TlsOptions& options) {
  MOESERVE_ASSIGN_OR_RETURN(const auto chain, ReadCertificates(options.certificate));
  MOESERVE_ASSIGN_OR_RETURN(const PrivateKey key, ReadKey(options.key));
  std::vector<Certificate> authorities;
  if (!options.client_ca.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(authorities, ReadCertificates(options.client_ca));
  }
  TlsContexts out;
  const auto make = [&](bool grpc) -> Result<std::shared_ptr<ssl::context>> {
    auto context = std::make_shared<ssl::context>(ssl::context::tls_server);
    SSL_CTX* const native = context->native_handle();
    SSL_CTX_set_min_proto_version(native, options.only_1_3 ? TLS1_3_VERSION : TLS1_2_VERSION);
    SSL_CTX_set_cipher_list(native, kCiphers);
    SSL_CTX_set_options(native, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
    SSL_CTX_set_mode(native, SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_session_cache_mode(native, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_session_id_context(native, kSessionContext, sizeof(kSessionContext) - 1);
    SSL_CTX_set_alpn_select_cb(native, grpc ? &ChooseHttp2 : &ChooseHttp, nullptr);
    MOESERVE_RETURN_IF_ERROR(SetFiles(options, chain, key.get(), native));
    if (!authorities.empty()) {
      MOESERVE_RETURN_IF_ERROR(SetClientCa(options, authorities, grpc, native));
    }
    return context;
  };
  MOESERVE_ASSIGN_OR_RETURN(out.http, make(false));
  MOESERVE_ASSIGN_OR_RETURN(out.grpc, make(true));
  const auto not_before = ToTime(X509_get0_notBefore(chain.front().get()));
  const auto not_after = ToTime(X509_get0_notAfter(chain.front().get()));
  if (!not_before.ok() || !not_after.ok()) {
    return Bad(options.certificate, "the certificate's time of validity is malformed");
  }
  out.not_before = *not_before;
  out.not_after = *not_after;
  return out;
}

}  // namespace moeserve::server

#include "server/tls/tls_store.h"

#include <filesystem>
#include <utility>

#include "absl/time/clock.h"
#include "base/error_text.h"
#include "server/logging/logging.h"

namespace moeserve::server {
namespace {

void WarnAboutTimes(const TlsOptions& options, const TlsContexts& contexts) {
  const absl::Time now = absl::Now();
  if (now >= contexts.not_before && now < contexts.not_after) return;
  LogWarning("tls", Concat("the certificate in ", options.certificate,
                           now < contexts.not_before ? " is not valid yet" : " has expired"));
}

std::vector<std::filesystem::path> FilesOf(const TlsOptions& options) {
  return {options.certificate, options.key, options.client_ca};
}

}  // namespace

Result<std::unique_ptr<TlsStore>> TlsStore::Start(const TlsOptions& options) {
  std::vector<FileVersion> versions = LookAtFiles(FilesOf(options));
  MOESERVE_ASSIGN_OR_RETURN(TlsContexts contexts, LoadTls(options));
  WarnAboutTimes(options, contexts);
  return std::unique_ptr<TlsStore>(new TlsStore(options, std::move(contexts), std::move(versions)));
}

TlsStore::TlsStore(TlsOptions options, TlsContexts contexts, std::vector<FileVersion> loaded)
    : options_(std::move(options)),
      contexts_(std::move(contexts)),
      watcher_(
          FilesOf(options_), std::move(loaded), [this] { return Reload(); },
          [this](const absl::Status& status) { CountReload(status); }) {}

ConnectionTls TlsStore::http() const {
  MutexLock lock(mutex_);
  return {contexts_.http, memory_};
}

ConnectionTls TlsStore::grpc() const {
  MutexLock lock(mutex_);
  return {contexts_.grpc, memory_};
}

absl::Status TlsStore::Reload() {
  MOESERVE_ASSIGN_OR_RETURN(TlsContexts contexts, LoadTls(options_));
  WarnAboutTimes(options_, contexts);
  LogInfo("tls", Concat("reloaded the certificate; it is valid until ",
                        absl::FormatTime(contexts.not_after, absl::UTCTimeZone())));
  MutexLock lock(mutex_);
  contexts_ = std::move(contexts);
  return absl::OkStatus();
}

void TlsStore::CountReload(const absl::Status& status) {
  ++(status.ok() ? reloads_ : failed_reloads_);
  if (status.ok()) return;
  LogError("tls", Concat("the certificate before stays in use: ",
                         Printable(std::string(status.message()), 1000)));
}

void TlsStore::WriteMetrics(PrometheusText& text) const {
  absl::Time not_after;
  {
    MutexLock lock(mutex_);
    not_after = contexts_.not_after;
  }
  text.Single("tls_certificate_expiry_timestamp_seconds", "gauge",
              "When the server's certificate expires.",
              static_cast<double>(absl::ToUnixSeconds(not_after)));
  const auto counts = [&](const char* name, const char* help, const char* label,
                          std::initializer_list<std::pair<const char*, uint64_t>> values) {
    text.Family(name, "counter", help);
    for (const auto& [value, count] : values) {
      text.Sample({{label, value}}, count);
    }
  };
  counts("tls_reloads_total", "Reads of the certificate's files after the start.", "result",
         {{"ok", reloads_.load()}, {"error", failed_reloads_.load()}});
  counts("tls_handshake_failures_total", "TLS handshakes that failed or took too long.",
         "interface", {{"http", failed_http_.load()}, {"grpc", failed_grpc_.load()}});
}

}  // namespace moeserve::server

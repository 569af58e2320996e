#include "server/keys/key_store.h"

#include <openssl/crypto.h>

#include <map>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/text_values.h"

namespace moeserve::server {
namespace {

bool StartsWithBearer(std::string_view text) {
  constexpr std::string_view kScheme = "bearer ";
  if (text.size() < kScheme.size()) return false;
  for (size_t i = 0; i < kScheme.size(); ++i) {
    const char c = text[i] >= 'A' && text[i] <= 'Z' ? static_cast<char>(text[i] + 32) : text[i];
    if (c != kScheme[i]) return false;
  }
  return true;
}

absl::Status Unauthenticated(const char* message) {
  return MakeError(absl::StatusCode::kUnauthenticated, "invalid_api_key", message);
}

}  // namespace

KeyStore::KeyStore(std::vector<KeySpec> keys) : required_(!keys.empty()) {
  table_ = MakeTable(std::move(keys), {});
}

std::shared_ptr<const KeyStore::Table> KeyStore::table() const {
  MutexLock lock(mutex_);
  return table_;
}

std::shared_ptr<const KeyStore::Table> KeyStore::MakeTable(std::vector<KeySpec> keys,
                                                           const Table& before) {
  std::map<std::string_view, const ApiKey*> by_name;
  std::map<std::string_view, const ApiKey*> by_digest;
  for (const auto& key : before) {
    by_name.emplace(key->name(), key.get());
    by_digest.emplace(key->spec().digest, key.get());
  }
  auto table = std::make_shared<Table>();
  for (KeySpec& spec : keys) {
    const ApiKey* old = nullptr;
    if (spec.name.empty()) {
      // The number of a line changes when lines before it are removed, so the digest identifies
      // the key, and the key keeps its first name.
      const auto it = by_digest.find(spec.digest);
      if (it != by_digest.end()) old = it->second;
      spec.name = old != nullptr ? old->name() : Concat("key-", next_text_name_++);
    } else if (const auto it = by_name.find(spec.name); it != by_name.end()) {
      old = it->second;
    }
    auto usage = old != nullptr ? old->usage() : std::make_shared<KeyUsage>(next_serial_++);
    table->push_back(std::make_shared<const ApiKey>(std::move(spec), std::move(usage)));
  }
  return table;
}

Result<std::shared_ptr<const ApiKey>> KeyStore::Authenticate(std::string_view authorization,
                                                             absl::Time now) const {
  if (!required_) return std::shared_ptr<const ApiKey>();
  if (!StartsWithBearer(authorization)) {
    ++unknown_;
    return Unauthenticated("an API key is required (Bearer)");
  }
  const std::string given = KeyDigest(Trimmed(authorization.substr(7), " \t\r"));
  const std::shared_ptr<const Table> table = this->table();
  // Every digest is compared, and the index is selected without a branch.
  size_t found = table->size();
  for (size_t i = 0; i < table->size(); ++i) {
    const std::string& digest = (*table)[i]->spec().digest;
    const size_t equal = CRYPTO_memcmp(digest.data(), given.data(), given.size()) == 0 ? 1 : 0;
    found ^= (found ^ i) & (size_t{0} - equal);
  }
  if (found == table->size()) {
    ++unknown_;
    return Unauthenticated("the API key is not valid");
  }
  const std::shared_ptr<const ApiKey>& key = (*table)[found];
  if (key->spec().expires && now >= *key->spec().expires) {
    key->Count(KeyRefusal::kExpired);
    return Unauthenticated("the API key has expired");
  }
  return key;
}

void KeyStore::Replace(std::vector<KeySpec> keys) {
  MOESERVE_CHECK(required_ && !keys.empty(), "a server with keys always has keys");
  MutexLock replacing(replace_mutex_);
  std::shared_ptr<const Table> table = MakeTable(std::move(keys), *this->table());
  MutexLock lock(mutex_);
  table_ = std::move(table);
}

void KeyStore::WriteMetrics(PrometheusText& text) const {
  if (!required_) return;
  const std::shared_ptr<const Table> table = this->table();
  text.Single("keys", "gauge", "API keys in force.", static_cast<double>(table->size()));
  text.Family("key_reloads_total", "counter",
              "Reloads of the key file; failed: the old keys stay.");
  text.Sample({{"result", "ok"}}, reloads_ok_.load());
  text.Sample({{"result", "failed"}}, reloads_failed_.load());
  text.Single("key_unknown_total", "counter", "Requests without a key, or with an unknown one.",
              static_cast<double>(unknown_.load()));
  struct Row {
    const char* name;
    const char* help;
    std::atomic<uint64_t> KeyUsage::*value;
  };
  const Row rows[] = {
      {"key_requests_total", "Requests that a key was allowed to send.", &KeyUsage::requests},
      {"key_prompt_tokens_total", "Prompt tokens of the accepted requests of a key.",
       &KeyUsage::prompt_tokens},
      {"key_generation_tokens_total", "Tokens generated for a key.", &KeyUsage::generated_tokens},
  };
  for (const Row& row : rows) {
    text.Family(row.name, "counter", row.help);
    for (const auto& key : *table)
      text.Sample({{"key", key->name()}}, (*key->usage().*row.value).load());
  }
  text.Family("key_refusals_total", "counter", "Refused requests of a key, by reason.");
  for (const auto& key : *table) {
    for (size_t i = 0; i < kKeyRefusalNames.size(); ++i) {
      text.Sample({{"key", key->name()}, {"reason", kKeyRefusalNames[i]}},
                  key->usage()->refusals[i].load());
    }
  }
  text.Family("key_requests_running", "gauge", "Requests of a key that run the model.");
  for (const auto& key : *table) {
    int64_t running = 0;
    {
      MutexLock lock(key->usage()->mutex);
      running = key->usage()->running;
    }
    text.Sample({{"key", key->name()}}, static_cast<double>(running));
  }
}

std::vector<KeySpec> PlainKeys(const std::vector<std::string>& keys) {
  std::vector<KeySpec> specs;
  for (const std::string& key : keys) {
    KeySpec spec;
    spec.digest = KeyDigest(key);
    specs.push_back(std::move(spec));
  }
  return specs;
}

}  // namespace moeserve::server

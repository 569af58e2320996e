#include "server/commands/ranks/open_exchange.h"

#include <limits.h>
#include <unistd.h>

#include <utility>

#include "base/error_text.h"
#include "engine/weights/expert_placement.h"
#include "kernels/exchange/mpi_transport.h"
#include "kernels/exchange/nccl/nccl_exchange.h"
#include "kernels/exchange/tcp/meeting.h"
#include "kernels/exchange/tcp/tcp_transport.h"
#include "kernels/registry.h"
#include "model_loaders/files/mapped_file.h"
#include "server/base/text_values.h"

namespace moeserve::server {
namespace {

// Of random characters; shorter keys can be guessed from what is sent.
constexpr size_t kLeastKeyBytes = 16;
constexpr size_t kMostKeyBytes = 1024;

// Returns the text of the file without white space at its ends.
Result<std::string> ReadRankKey(const std::string& file) {
  if (file.empty()) {
    return absl::InvalidArgumentError(
        "--rank-key-file: expected a file with a key that all processes have, found none");
  }
  auto text = ReadTextFile(file, 2 * kMostKeyBytes);
  if (!text.ok()) return Prefixed("--rank-key-file: ", text.status());
  std::string key(Trimmed(*text, " \t\r\n"));
  if (key.size() < kLeastKeyBytes || key.size() > kMostKeyBytes) {
    return absl::InvalidArgumentError(Concat("--rank-key-file: expected a key of ", kLeastKeyBytes,
                                             " to ", kMostKeyBytes, " characters, found ",
                                             key.size()));
  }
  return key;
}

Result<MeetingOptions> ReadMeeting(const RankOptions& options) {
  const std::string ranks = Concat("--ranks ", options.transport, ": ");
  if (options.of < 1 || options.of > kMaxRanks) {
    return absl::InvalidArgumentError(Concat(ranks, "--of: expected the number of processes, 1 to ",
                                             kMaxRanks, ", found ", options.of));
  }
  if (options.rank < 0 || options.rank >= options.of) {
    return absl::InvalidArgumentError(
        Concat(ranks, "--rank: expected the number of this process, 0 to ", options.of - 1,
               ", found ", options.rank < 0 ? "none" : std::to_string(options.rank)));
  }
  auto address = ParseHostPort(options.link);
  if (!address.ok()) return Prefixed(ranks + "--rank-link: ", address.status());
  if (address->port == 0) {
    return absl::InvalidArgumentError(ranks +
                                      "--rank-link: expected the port at which rank 0 listens, "
                                      "found 0");
  }
  MOESERVE_ASSIGN_OR_RETURN(std::string key, ReadRankKey(options.key_file));
  return MeetingOptions{.rank = options.rank,
                        .ranks = options.of,
                        .host = address->host,
                        .port = address->port,
                        .key = std::move(key),
                        .name = HostName(),
                        .timeout = absl::Seconds(options.start_seconds)};
}

Result<OpenedExchange> OpenMpi(const RankOptions& options,
                               const MessageExchange::Options& exchange) {
  if (options.rank >= 0 || options.of != 0 || !options.key_file.empty()) {
    return absl::InvalidArgumentError(
        "--ranks mpi: expected none of --rank, --of and --rank-key-file, which are for --ranks tcp "
        "and nccl");
  }
  auto transport = OpenMpiTransport(MpiTransportPath());
  if (!transport.ok()) return Prefixed("--ranks mpi: ", transport.status());
  return OpenedExchange{
      .exchange = std::make_unique<MessageExchange>(*std::move(transport), exchange),
      .link_host = options.link};
}

}  // namespace

std::string HostName() {
  char name[HOST_NAME_MAX + 1] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? std::string(name) : "unknown";
}

Result<OpenedExchange> OpenExchange(const RankOptions& options, const std::string& device) {
  const MessageExchange::Options limits{.timeout = absl::Seconds(options.start_seconds)};
  if (options.transport == "mpi") return OpenMpi(options, limits);
  MOESERVE_ASSIGN_OR_RETURN(const MeetingOptions meeting, ReadMeeting(options));
  OpenedExchange out{.link_host = meeting.host};
  // Before the meeting, but told after it: others would wait for a rank that does not come.
  std::unique_ptr<NcclLibrary> nccl;
  const StreamQuery query = StreamQueryOf(device);
  if (options.transport == "nccl" && query == nullptr) {
    out.status = absl::InvalidArgumentError(
        Concat("--ranks nccl: expected --device cuda, found ", device, ", which has --ranks tcp"));
  } else if (options.transport == "nccl") {
    auto opened = OpenNccl();
    if (opened.ok()) {
      nccl = *std::move(opened);
      out.facts.emplace_back("NCCL", nccl->version());
    } else {
      out.status = Prefixed("--ranks nccl: ", opened.status());
    }
  }
  auto peers = MeetRanks(meeting);
  if (!peers.ok()) return Prefixed(Concat("--ranks ", options.transport, ": "), peers.status());
  auto transport = TcpTransport(meeting.rank, *std::move(peers));
  out.exchange = nccl == nullptr ? std::make_unique<MessageExchange>(std::move(transport), limits)
                                 : nccl->NewExchange(std::move(transport), limits, query);
  return out;
}

}  // namespace moeserve::server

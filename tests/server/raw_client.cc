#include "tests/server/raw_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <thread>

namespace moeserve::server::testing {

RawClient::RawClient(int port, int receive_buffer) {
  fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (receive_buffer > 0) {
    setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) Close();
}

RawClient::~RawClient() { Close(); }

void RawClient::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void RawClient::CloseSending() { shutdown(fd_, SHUT_WR); }

void RawClient::Reset() {
  const linger hard{1, 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
  Close();
}

bool RawClient::Send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

bool RawClient::ReadSome(std::chrono::steady_clock::time_point deadline, size_t most) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      deadline - std::chrono::steady_clock::now());
  pollfd poller{fd_, POLLIN, 0};
  if (left.count() <= 0 || poll(&poller, 1, static_cast<int>(left.count())) <= 0) return false;
  char chunk[65536];
  const ssize_t count = recv(fd_, chunk, std::min(most, sizeof(chunk)), 0);
  if (count <= 0) return false;
  buffer_.append(chunk, static_cast<size_t>(count));
  return true;
}

bool RawClient::ReadUntil(std::string_view text, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (buffer_.find(text) == std::string::npos) {
    if (!ReadSome(deadline)) return false;
  }
  return true;
}

bool RawClient::ReadSlowlyUntil(std::string_view text, size_t step,
                                std::chrono::milliseconds pause) {
  while (!buffer_.ends_with(text)) {
    if (!ReadSome(std::chrono::steady_clock::now() + std::chrono::seconds(5), step)) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

bool RawClient::IsClosed(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (ReadSome(deadline)) {
  }
  return std::chrono::steady_clock::now() < deadline;
}

RawResponse RawClient::ReadResponse(bool head) {
  RawResponse response;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  size_t end;
  while ((end = buffer_.find("\r\n\r\n")) == std::string::npos) {
    if (!ReadSome(deadline)) return response;
  }
  std::string_view lines = std::string_view(buffer_).substr(0, end + 2);
  response.status = std::atoi(std::string(lines.substr(9, 3)).c_str());
  lines.remove_prefix(lines.find("\r\n") + 2);
  while (!lines.empty()) {
    const std::string_view line = lines.substr(0, lines.find("\r\n"));
    lines.remove_prefix(line.size() + 2);
    const size_t colon = line.find(": ");
    std::string name(line.substr(0, colon));
    for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    response.headers[name] = std::string(line.substr(colon + 2));
  }
  buffer_.erase(0, end + 4);
  if (head || response.status == 204 || response.status / 100 == 1) {
    response.complete = true;
    return response;
  }
  if (response.headers.contains("transfer-encoding")) {
    while (true) {
      size_t line;
      while ((line = buffer_.find("\r\n")) == std::string::npos) {
        if (!ReadSome(deadline)) return response;
      }
      const size_t size = std::strtoul(buffer_.c_str(), nullptr, 16);
      while (buffer_.size() < line + 4 + size) {
        if (!ReadSome(deadline)) return response;
      }
      response.body += buffer_.substr(line + 2, size);
      buffer_.erase(0, line + 4 + size);
      if (size == 0) break;
    }
    response.complete = true;
  } else if (response.headers.contains("content-length")) {
    const size_t size = std::stoul(response.headers["content-length"]);
    while (buffer_.size() < size) {
      if (!ReadSome(deadline)) return response;
    }
    response.body = buffer_.substr(0, size);
    buffer_.erase(0, size);
    response.complete = true;
  } else {
    while (ReadSome(deadline)) {
    }
    response.body = std::move(buffer_);
    buffer_.clear();
    response.complete = true;
  }
  return response;
}

std::string Post(std::string_view path, std::string_view body, std::string_view extra_headers) {
  std::string out = "POST ";
  out.append(path);
  out += " HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n";
  out.append(extra_headers);
  out += "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n";
  out.append(body);
  return out;
}

std::string Get(std::string_view path, std::string_view extra_headers) {
  std::string out = "GET ";
  out.append(path);
  out += " HTTP/1.1\r\nHost: test\r\n";
  out.append(extra_headers);
  out += "\r\n";
  return out;
}

}  // namespace moeserve::server::testing

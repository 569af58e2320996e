#include "tests/server/load_test/scripted_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace moeserve::server::testing {

std::string Peer::ReadRequest() {
  while (true) {
    const size_t head = buffer_.find("\r\n\r\n");
    if (head != std::string::npos) {
      const size_t length_at = buffer_.find("Content-Length: ");
      size_t total = head + 4;
      if (length_at < head) total += std::strtoul(buffer_.c_str() + length_at + 16, nullptr, 10);
      if (buffer_.size() >= total) {
        std::string request = buffer_.substr(0, total);
        buffer_.erase(0, total);
        return request;
      }
    }
    char chunk[16384];
    const ssize_t count = recv(fd_, chunk, sizeof(chunk), 0);
    if (count <= 0) return "";
    buffer_.append(chunk, static_cast<size_t>(count));
  }
}

bool Peer::Send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

void Peer::SendSlowly(std::string_view bytes, size_t size) {
  for (size_t at = 0; at < bytes.size(); at += size) {
    Send(bytes.substr(at, size));
    std::this_thread::sleep_for(std::chrono::microseconds(300));
  }
}

void Peer::Reset() {
  const linger hard{1, 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
}

void Peer::WaitForEnd() {
  char byte;
  while (recv(fd_, &byte, 1, 0) > 0) {
  }
}

void Peer::SendStream(std::string_view body) { Send(kStreamHead + Chunk(body) + kLastChunk); }

ScriptedServer::ScriptedServer(Handler handler, std::string metrics)
    : handler_(std::move(handler)), metrics_(std::move(metrics)) {
  listener_ = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener_, 1024) != 0 ||
      getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    std::abort();
  }
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { Accept(); });
}

ScriptedServer::~ScriptedServer() {
  shutdown(listener_, SHUT_RDWR);
  acceptor_.join();
  Disconnect();
  for (std::thread& thread : threads_) thread.join();
  close(listener_);
}

void ScriptedServer::Disconnect() {
  MutexLock lock(mutex_);
  for (const int fd : open_) shutdown(fd, SHUT_RDWR);
}

void ScriptedServer::Accept() {
  while (true) {
    const int fd = accept(listener_, nullptr, nullptr);
    if (fd < 0) return;
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    ++connections_;
    MutexLock lock(mutex_);
    open_.push_back(fd);
    threads_.emplace_back([this, fd] { Serve(fd); });
  }
}

void ScriptedServer::Serve(int fd) {
  Peer peer(fd);
  while (true) {
    const std::string request = peer.ReadRequest();
    if (request.empty()) break;
    if (request.starts_with("GET ")) {
      const bool models = request.starts_with("GET /v1/models ");
      const std::string body = models ? R"({"data":[{"id":"scripted"}]})" : metrics_;
      const bool found = models || !metrics_.empty();
      peer.Send(std::string(found ? "HTTP/1.1 200 OK" : "HTTP/1.1 404 Not Found") +
                "\r\nContent-Length: " + std::to_string(found ? body.size() : 0) + "\r\n\r\n" +
                (found ? body : ""));
      continue;
    }
    if (!handler_(peer, request)) break;
  }
  MutexLock lock(mutex_);
  std::erase(open_, fd);
  close(fd);
}

std::string Chunk(std::string_view data) {
  char size[24];
  std::snprintf(size, sizeof(size), "%zx\r\n", data.size());
  return size + std::string(data) + "\r\n";
}

std::string CompletionEvents(int tokens) {
  std::string events;
  for (int i = 0; i < tokens; ++i) {
    events += R"(data: {"choices":[{"index":0,"text":"x","finish_reason":)";
    events += i + 1 == tokens ? R"("length")" : "null";
    events += "}]}\n\n";
  }
  return events + R"(data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":)" +
         std::to_string(tokens) + "}}\n\ndata: [DONE]\n\n";
}

}  // namespace moeserve::server::testing

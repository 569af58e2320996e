#include "tests/cuda_emulator/async_copy.h"

#include <cstring>

namespace moeserve::emulator {

uint32_t SharedAddress(const void* pointer, Location location) {
  const auto offset = static_cast<const char*>(pointer) - static_cast<const char*>(SharedBase());
  if (offset < 0 || offset > static_cast<ptrdiff_t>(SharedBytes())) {
    Fail(location, "a pointer into shared memory is %td bytes off its begin (it has %zu bytes)",
         offset, SharedBytes());
  }
  return static_cast<uint32_t>(offset);
}

void* SharedPointer(uint32_t address, size_t bytes, Location location) {
  if (address + bytes > SharedBytes()) {
    Fail(location, "bytes [%u, %zu) of shared memory are used, it has %zu", address,
         address + bytes, SharedBytes());
  }
  return static_cast<char*>(SharedBase()) + address;
}

void CpAsync(void* shared, const void* global, int bytes, int source_bytes, Location location) {
  const uint32_t address = SharedAddress(shared, location);
  SharedPointer(address, static_cast<size_t>(bytes), location);
  const auto size = static_cast<uintptr_t>(bytes);
  if (address % size != 0 || (reinterpret_cast<uintptr_t>(global) % size != 0)) {
    Fail(location, "cp.async of %d bytes: an address is not aligned", bytes);
  }
  if (source_bytes < 0 || source_bytes > bytes) {
    Fail(location, "cp.async of %d bytes from %d", bytes, source_bytes);
  }
  current->open_copies.push_back([=] {
    std::memcpy(shared, global, static_cast<size_t>(source_bytes));
    std::memset(static_cast<char*>(shared) + source_bytes, 0,
                static_cast<size_t>(bytes - source_bytes));
  });
}

void CpAsyncCommit() {
  current->copy_groups.push_back({std::move(current->open_copies)});
  current->open_copies.clear();
}

void CpAsyncWait(int pending) {
  auto& groups = current->copy_groups;
  while (groups.size() > static_cast<size_t>(pending)) {
    for (const auto& copy : groups.front().work) copy();
    groups.pop_front();
  }
}

}  // namespace moeserve::emulator

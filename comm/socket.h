#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "comm/deadline.h"

/// Sockets as the tcp transport uses them: never blocking, every wait with a deadline.

namespace tessera::comm {

/// Owns a file descriptor.
class File {
 public:
  explicit File(int number = -1) : number_(number) {}
  ~File() { close(); }
  File(File&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  File& operator=(File&& other) noexcept {
    if (this != &other) close(), number_ = std::exchange(other.number_, -1);
    return *this;
  }
  int number() const { return number_; }
  bool open() const { return number_ >= 0; }
  void close();

 private:
  int number_;
};

/// A socket that listens; port 0: one that is free. `everywhere`: on all addresses of the machine, not only
/// on its loopback. Throws, naming the port, if it is taken.
File listen_on(int port, bool everywhere);
/// Prepares an inherited listening socket. Throws if the file descriptor is not a listening socket.
File adopt_listener(int number);
int port_of(const File& listener);
/// A new connection, or a closed File if none is waiting.
File accept_from(const File& listener);
/// Connects, and tries again while the port is closed, until the deadline: then throws. `alarm`: a file
/// descriptor that becomes readable to give up at once (the result is closed), or -1.
File connect_to(const std::string& host, int port, const Deadline& deadline, int alarm);
/// The address at the other end, as a number; "" if it has gone.
std::string address_of_peer(const File& connection);
bool is_loopback(const std::string& address);

/// Reads without waiting. Returns the bytes read, 0 if none are available, -1 at end of stream.
long read_some(const File& from, std::span<std::byte> into);
/// Writes without waiting. Returns the bytes written, 0 if the buffer is full, -1 if the peer has closed.
long write_some(const File& to, std::span<const std::byte> bytes);
/// Read or write everything; false at end of stream, at the deadline or on the alarm.
bool read_all(const File& from, std::span<std::byte> into, const Deadline& deadline, int alarm);
bool write_all(const File& to, std::span<const std::byte> bytes, const Deadline& deadline, int alarm);

/// A file that becomes readable when it is signalled (eventfd). Throws if there is none left.
File open_event();
void signal_event(const File& event) noexcept;

std::string host_name();

}  // namespace tessera::comm

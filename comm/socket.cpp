#include "comm/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "runtime/error.h"
#include "runtime/interrupt.h"

namespace tessera::comm {
namespace {

constexpr int kBetweenTries = 50;  // milliseconds between two attempts to connect

void prepare(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

/// Waits for `events`; false at the deadline or the alarm.
bool await(int file, short events, const Deadline& deadline, int alarm) {
  while (true) {
    pollfd files[2] = {{file, events, 0}, {alarm, POLLIN, 0}};
    const int ready = ::poll(files, alarm < 0 ? 1 : 2, deadline.milliseconds());
    if (alarm >= 0 && files[1].revents != 0) return false;
    if (ready > 0) return true;
    if (ready == 0 || errno != EINTR) return false;
    check_interrupt();
  }
}

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  check(code == 0 || code == EAI_AGAIN || code == EAI_NONAME, "comm: ", host, ": ", ::gai_strerror(code));
  return {code == 0 ? found : nullptr, &::freeaddrinfo};
}

}  // namespace

void File::close() {
  if (number_ >= 0) ::close(std::exchange(number_, -1));
}

File listen_on(int port, bool everywhere) {
  check(port >= 0 && port < 65536, "comm: port ", port, "; expected 0 to 65535");
  // One socket for IPv6 and IPv4 where the machine has IPv6.
  int error = 0;
  for (const int family : {everywhere ? AF_INET6 : AF_INET, AF_INET}) {
    File listener(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    error = errno;
    if (!listener.open()) continue;
    const int on = 1, off = 0;
    ::setsockopt(listener.number(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    sockaddr_in6 six{};
    sockaddr_in four{};
    if (family == AF_INET6) ::setsockopt(listener.number(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    six.sin6_family = AF_INET6, six.sin6_port = htons(uint16_t(port)), six.sin6_addr = in6addr_any;
    four.sin_family = AF_INET, four.sin_port = htons(uint16_t(port));
    four.sin_addr.s_addr = htonl(everywhere ? INADDR_ANY : INADDR_LOOPBACK);
    const auto* const address =
        family == AF_INET6 ? reinterpret_cast<sockaddr*>(&six) : reinterpret_cast<sockaddr*>(&four);
    if (::bind(listener.number(), address, family == AF_INET6 ? sizeof(six) : sizeof(four)) == 0 &&
        ::listen(listener.number(), 1024) == 0)
      return listener;
    error = errno;
    if (error == EADDRINUSE) break;
  }
  check(error != EADDRINUSE, "comm: port ", port,
        " is taken by another program; choose another one (MASTER_PORT, or launch --master HOST:PORT)");
  fail_at(Site::here(), "comm: cannot listen on port ", port, ": ", std::strerror(error));
}

File adopt_listener(int number) {
  int listens = 0;
  socklen_t size = sizeof(listens);
  check(::getsockopt(number, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens != 0,
        "comm: file descriptor ", number, " is no listening socket; start the job with `tessera launch`");
  File listener(number);
  ::fcntl(number, F_SETFD, FD_CLOEXEC);
  ::fcntl(number, F_SETFL, ::fcntl(number, F_GETFL) | O_NONBLOCK);
  return listener;
}

int port_of(const File& listener) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  check(::getsockname(listener.number(), reinterpret_cast<sockaddr*>(&address), &size) == 0,
        "comm: getsockname: ", std::strerror(errno));
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

File accept_from(const File& listener) {
  File connection(::accept4(listener.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (connection.open()) prepare(connection.number());
  return connection;
}

File connect_to(const std::string& host, int port, const Deadline& deadline, int alarm) {
  int error = 0;
  while (true) {
    const Addresses addresses = resolve(host, port);
    for (const addrinfo* at = addresses.get(); at; at = at->ai_next) {
      File connection(::socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      if (!connection.open()) continue;
      error = ::connect(connection.number(), at->ai_addr, at->ai_addrlen) == 0 ? 0 : errno;
      if (error == EINPROGRESS && await(connection.number(), POLLOUT, deadline, alarm)) {
        socklen_t size = sizeof(error);
        ::getsockopt(connection.number(), SOL_SOCKET, SO_ERROR, &error, &size);
      }
      if (error != 0) continue;
      prepare(connection.number());
      return connection;
    }
    pollfd files[1] = {{alarm, POLLIN, 0}};
    const int ready = ::poll(files, alarm < 0 ? 0 : 1, deadline.milliseconds(kBetweenTries));
    if (ready > 0) return File();
    check_interrupt();
    check(!deadline.passed(), "comm: no connection to ", host, ":", port, " within ", deadline.seconds(),
          " s: ", error != 0 ? std::strerror(error) : "the name is unknown",
          "; has rank 0 started there, and does the network let it through?");
  }
}

std::string address_of_peer(const File& connection) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  char text[NI_MAXHOST] = {};
  if (::getpeername(connection.number(), reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      ::getnameinfo(reinterpret_cast<sockaddr*>(&address), size, text, sizeof(text), nullptr, 0,
                    NI_NUMERICHOST) != 0)
    return {};
  return text;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address.starts_with("::ffff:127.") || address == "::1" ||
         address == "localhost";
}

long read_some(const File& from, std::span<std::byte> into) {
  while (true) {
    const ssize_t got = ::recv(from.number(), into.data(), into.size(), 0);
    if (got > 0) return got;
    if (got == 0) return -1;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) return -1;
  }
}

long write_some(const File& to, std::span<const std::byte> bytes) {
  while (true) {
    const ssize_t put = ::send(to.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (put >= 0) return put;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) return -1;
  }
}

bool read_all(const File& from, std::span<std::byte> into, const Deadline& deadline, int alarm) {
  while (!into.empty()) {
    const long got = read_some(from, into);
    if (got < 0) return false;
    into = into.subspan(size_t(got));
    if (got == 0 && !await(from.number(), POLLIN, deadline, alarm)) return false;
  }
  return true;
}

bool write_all(const File& to, std::span<const std::byte> bytes, const Deadline& deadline, int alarm) {
  while (!bytes.empty()) {
    const long put = write_some(to, bytes);
    if (put < 0) return false;
    bytes = bytes.subspan(size_t(put));
    if (put == 0 && !await(to.number(), POLLOUT, deadline, alarm)) return false;
  }
  return true;
}

File open_event() {
  File event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  check(event.open(), "comm: eventfd: ", std::strerror(errno));
  return event;
}

void signal_event(const File& event) noexcept {
  const uint64_t one = 1;
  while (::write(event.number(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

}  // namespace tessera::comm

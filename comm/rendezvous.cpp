#include "comm/rendezvous.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <list>
#include <optional>
#include <utility>

#include "comm/status.h"
#include "comm/transport.h"
#include "runtime/interrupt.h"

namespace tessera::comm {
namespace {

enum class Purpose : uint32_t { notices = 1, data = 2, checks = 3 };

/// The first message on every connection: identifies the process.
struct Hello {
  static constexpr uint64_t kMagic = 0x6f6c'6c65'6872'7374u;
  uint64_t magic = kMagic;
  uint32_t version = 2;
  Purpose purpose = Purpose::notices;
  int32_t rank = 0, size = 0, pid = 0, port = 0;
  char token[256] = {}, host[256] = {}, what[1024] = {};
};

/// The answer of rank 0; followed by the table of members unless it is a refusal.
struct Welcome {
  static constexpr uint64_t kMagic = 0x656d'6f63'6c65'7774u;
  uint64_t magic = kMagic;
  int32_t accepted = 0, members = 0;
  char reason[1024] = {};
};

struct WireMember {
  char host[256] = {}, address[256] = {};
  int32_t pid = 0, port = 0;
};

template <class T>
std::span<std::byte> bytes_of(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

/// The text of a field that another process wrote.
template <size_t N>
std::string text_of(const char (&field)[N]) {
  return std::string(field, ::strnlen(field, N));
}

std::string who(const Hello& hello) {
  return "pid " + std::to_string(hello.pid) + " on " + text_of(hello.host);
}

void refuse(const File& connection, const std::string& reason) {
  Welcome answer;
  copy_text(answer.reason, sizeof(answer.reason), reason);
  write_all(connection, bytes_of(answer), Deadline(1), -1);  // if it still listens
}

/// A connection whose process has identified itself.
struct IdentifiedPeer {
  File connection;
  Hello hello;
};

/// Accepts connections, and keeps those that have not identified themselves yet until they do or are dropped.
class ConnectionAcceptor {
 public:
  ConnectionAcceptor(const File& listener, const RendezvousOptions& options)
      : listener_(listener), options_(options) {}

  /// Waits for the next process of this job to connect. Returns nothing at the deadline, and also if a
  /// watched file descriptor becomes readable or is closed: then `woke` is its index.
  std::optional<IdentifiedPeer> next(const Deadline& deadline, const std::vector<int>& watched,
                                     size_t& woke) {
    while (true) {
      std::vector<pollfd> files{{listener_.number(), POLLIN, 0}};
      for (const int file : watched) files.push_back({file, POLLIN, 0});
      for (const PendingConnection& pending : pending_)
        files.push_back({pending.connection.number(), POLLIN, 0});
      const int ready = ::poll(files.data(), files.size(), deadline.milliseconds());
      if (ready < 0 && errno == EINTR) {
        check_interrupt();
        continue;
      }
      if (ready <= 0) return std::nullopt;
      for (size_t i = 0; i < watched.size(); ++i)
        if (files[1 + i].revents != 0) return woke = i, std::nullopt;
      if (std::optional<IdentifiedPeer> peer = read_pending()) return peer;
      if (files[0].revents != 0) accept_connections();
    }
  }

 private:
  struct PendingConnection {
    File connection;
    Hello hello;
    size_t got = 0;
  };

  void accept_connections() {
    constexpr size_t kMaxPending = 4096;
    while (true) {
      File connection = accept_from(listener_);
      if (!connection.open()) return;
      if (pending_.size() >= kMaxPending) pending_.pop_front();
      pending_.push_back({.connection = std::move(connection)});
    }
  }

  std::optional<IdentifiedPeer> read_pending() {
    for (auto at = pending_.begin(); at != pending_.end();) {
      const long got = read_some(at->connection, bytes_of(at->hello).subspan(at->got));
      at->got += got > 0 ? size_t(got) : 0;
      // A connection of another program is recognised by its first bytes, and dropped.
      const bool other = at->got >= sizeof(uint64_t) && at->hello.magic != Hello::kMagic;
      if (got < 0 || other) {
        at = pending_.erase(at);
      } else if (at->got < sizeof(Hello)) {
        ++at;
      } else {
        IdentifiedPeer peer{std::move(at->connection), at->hello};
        at = pending_.erase(at);
        if (belongs(peer)) return peer;
      }
    }
    return std::nullopt;
  }

  bool belongs(const IdentifiedPeer& peer) {
    const Hello& hello = peer.hello;
    if (hello.version == Hello().version && text_of(hello.token) == options_.token) return true;
    const std::string reason =
        hello.version != Hello().version
            ? "the job's processes speak another version of the protocol; run the same program on all ranks"
            : "the token of the job is another one; " +
                  (options_.origin.empty() ? "is this process of another job, or is the port another job's?"
                                           : options_.origin);
    refuse(peer.connection, reason);
    if (options_.rank == 0 && !std::exchange(told_refused_, true))
      std::fprintf(stderr, "tessera: rank 0 refused %s, which says that it is rank %d of %d: %s\n",
                   who(hello).c_str(), hello.rank, hello.size, reason.c_str());
    return false;
  }

  const File& listener_;
  const RendezvousOptions& options_;
  std::list<PendingConnection> pending_;
  bool told_refused_ = false;
};

Hello hello_of(const RendezvousOptions& options, Purpose purpose, int port) {
  Hello hello;
  hello.purpose = purpose;
  hello.rank = options.rank, hello.size = options.size;
  hello.pid = int(::getpid()), hello.port = port;
  copy_text(hello.token, sizeof(hello.token), options.token);
  copy_text(hello.host, sizeof(hello.host), host_name());
  copy_text(hello.what, sizeof(hello.what), options.what);
  return hello;
}

/// Rank 0's side of the rendezvous: either all ranks join, or all are told why not.
class RendezvousServer {
 public:
  RendezvousServer(const RendezvousOptions& options, const File& listener, Connections& connections)
      : options_(options), acceptor_(listener, options), connections_(connections) {}

  void gather(const Deadline& deadline, int own_port) {
    const Hello own = hello_of(options_, Purpose::notices, own_port);
    hellos_.resize(size_t(options_.size));
    hellos_[0] = own;
    connections_.members[0] = {text_of(own.host), options_.host, own.pid, own_port};
    for (int missing = options_.size - 1; missing > 0; --missing) join(next(deadline));
    welcome_all(deadline);
  }

  ConnectionAcceptor& acceptor() { return acceptor_; }

 private:
  /// Tells all ranks why the job cannot start. Ranks that connect later would find no listener and retry
  /// until their deadline, so rank 0 waits a few seconds for the ones still missing.
  [[noreturn]] void give_up(int rank, const std::string& reason, int missing_count,
                            Site site = Site::here()) {
    for (const File& connection : connections_.notices)
      if (connection.open()) refuse(connection, reason);
    for (const Deadline patience(kPatience); missing_count > 0; --missing_count) {
      size_t woke = 0;
      const std::optional<IdentifiedPeer> late = acceptor_.next(patience, {}, woke);
      if (!late) break;
      refuse(late->connection, reason);
    }
    fail_for(rank, reason, site);
  }

  /// Number of ranks that have not joined yet.
  int missing_count() const {
    return int(std::ranges::count_if(hellos_, [](const auto& hello) { return !hello.has_value(); }));
  }

  IdentifiedPeer next(const Deadline& deadline) {
    std::vector<int> watched, ranks;
    for (int r = 1; r < options_.size; ++r)
      if (connections_.notices[size_t(r)].open())
        watched.push_back(connections_.notices[size_t(r)].number()), ranks.push_back(r);
    size_t woke = watched.size();
    std::optional<IdentifiedPeer> peer =
        acceptor_.next(reported_missing_ ? deadline : report_deadline_, watched, woke);
    if (!peer && woke == watched.size() && !reported_missing_ && !deadline.passed()) {
      report_missing(deadline);
      peer = acceptor_.next(deadline, watched, woke);
    }
    if (peer) return std::move(*peer);
    if (woke < watched.size()) {
      const int gone = ranks[woke];
      connections_.notices[size_t(gone)].close();
      give_up(gone,
              "rank " + std::to_string(gone) + " (" + who(*hellos_[size_t(gone)]) +
                  ") ended before all ranks had come",
              missing_count());
    }
    MessageStream text;
    text << "not all ranks came within " << deadline.seconds() << " s: missing " << missing();
    give_up(-1, text.str(), 0);
  }

  /// "1, 3 of 4": the ranks that have not come yet.
  std::string missing() const {
    MessageStream text;
    for (int r = 1, n = 0; r < options_.size; ++r)
      if (!hellos_[size_t(r)] && n++ < 8) text << (n > 1 ? ", " : "") << r;
    text << " of " << options_.size;
    return text.str();
  }

  void report_missing(const Deadline& deadline) {
    reported_missing_ = true;
    std::fprintf(stderr, "tessera: rank 0 waits for rank %s at %s:%d, for at most %g s\n", missing().c_str(),
                 options_.host.c_str(), options_.port, deadline.seconds());
  }

  void join(IdentifiedPeer peer) {
    const Hello& hello = peer.hello;
    const auto refuse_all = [&](const std::string& reason) {
      refuse(peer.connection, reason);
      give_up(-1, reason, missing_count() - 1);
    };
    const std::string rank = std::to_string(hello.rank);
    if (hello.size != options_.size)
      refuse_all("rank " + rank + " (" + who(hello) + ") counts " + std::to_string(hello.size) +
                 " ranks, rank 0 counts " + std::to_string(options_.size));
    if (hello.rank < 0 || hello.rank >= options_.size || hello.purpose != Purpose::notices)
      refuse_all(who(hello) + " says that it is rank " + rank + " of " + std::to_string(options_.size));
    if (std::optional<Hello>& there = hellos_[size_t(hello.rank)])
      refuse_all("two processes are rank " + rank + ": " + who(*there) + ", and " + who(hello));
    if (text_of(hello.what) != options_.what)
      refuse_all("rank " + rank + " (" + who(hello) + ") runs \"" + text_of(hello.what) + "\", rank 0 \"" +
                 options_.what + "\"");
    std::string address = address_of_peer(peer.connection);
    // A rank with a loopback address is on rank 0's machine; on other machines that address would be wrong.
    if (is_loopback(address)) address = options_.host;
    connections_.members[size_t(hello.rank)] = {text_of(hello.host), address, hello.pid, hello.port};
    hellos_[size_t(hello.rank)] = hello;
    connections_.notices[size_t(hello.rank)] = std::move(peer.connection);
  }

  void welcome_all(const Deadline& deadline) {
    Welcome answer;
    answer.accepted = 1, answer.members = options_.size;
    std::vector<WireMember> table;
    for (const Member& member : connections_.members) {
      WireMember& entry = table.emplace_back();
      copy_text(entry.host, sizeof(entry.host), member.host);
      copy_text(entry.address, sizeof(entry.address), member.address);
      entry.pid = member.pid, entry.port = member.port;
    }
    for (int r = 1; r < options_.size; ++r) {
      const File& connection = connections_.notices[size_t(r)];
      if (write_all(connection, bytes_of(answer), deadline, -1) &&
          write_all(connection, std::as_bytes(std::span(table)), deadline, -1))
        continue;
      connections_.notices[size_t(r)].close();
      give_up(
          r,
          "rank " + std::to_string(r) + " (" + who(*hellos_[size_t(r)]) + ") ended before all ranks had come",
          0);
    }
  }

  static constexpr double kPatience = 5;  // seconds
  const RendezvousOptions& options_;
  const Deadline report_deadline_{options_.seconds > 0 ? std::min(options_.report_after, options_.seconds)
                                                       : options_.report_after};
  bool reported_missing_ = false;
  ConnectionAcceptor acceptor_;
  Connections& connections_;
  std::vector<std::optional<Hello>> hellos_;  // by rank
};

/// The other ranks' side.
void join_server(const RendezvousOptions& options, int own_port, const Deadline& deadline,
                 Connections& connections) {
  const std::string where = options.host + ":" + std::to_string(options.port);
  File connection = connect_to(options.host, options.port, deadline, -1);
  Hello hello = hello_of(options, Purpose::notices, own_port);
  Welcome answer;
  const bool answered = write_all(connection, bytes_of(hello), deadline, -1) &&
                        read_all(connection, bytes_of(answer), deadline, -1);
  if (!answered)
    fail_for(deadline.passed() ? -1 : 0,
             deadline.passed()
                 ? "rank 0 at " + where + " did not answer within " +
                       std::to_string(int(deadline.seconds())) + " s: not all ranks have come"
                 : "rank 0 at " + where + " ended before all ranks had come, or it is no rank of this job");
  check(answer.magic == Welcome::kMagic, "comm: at ", where, " another program answers; choose another port");
  if (answer.accepted == 0) fail_for(-1, text_of(answer.reason));
  check(answer.members == options.size, "comm: ", where, " has ", answer.members, " ranks");
  std::vector<WireMember> table(size_t(options.size));
  if (!read_all(connection, std::as_writable_bytes(std::span(table)), deadline, -1))
    fail_for(0, "rank 0 at " + where + " ended before all ranks had come");
  for (int r = 0; r < options.size; ++r) {
    const WireMember& entry = table[size_t(r)];
    connections.members[size_t(r)] = {text_of(entry.host), text_of(entry.address), entry.pid, entry.port};
  }
  connections.notices.push_back(std::move(connection));
}

/// A rank ended, or reported a failure, while the ranks connected to each other: rank 0 tells the others; all
/// throw. `suspect`: the rank to blame if nothing is known.
[[noreturn]] void throw_lost(const RendezvousOptions& options, Connections& connections, int suspect) {
  constexpr double kPatience = 3;  // seconds, for the notice that says more
  const Member& member = connections.members[size_t(suspect)];
  Notice notice;
  notice.rank = suspect;
  const auto blame = [&] {
    copy_text(notice.text, sizeof(notice.text),
              "rank " + std::to_string(suspect) + " (pid " + std::to_string(member.pid) + " on " +
                  member.host + ") ended while the ranks connected");
  };
  Notice received;
  const File& from = connections.notices[options.rank == 0 ? size_t(suspect) : 0];
  if (from.open() && read_all(from, bytes_of(received), Deadline(kPatience), -1) &&
      received.magic == Notice::kMagic && received.what == Notice::What::failed)
    notice = received;
  else
    blame();
  if (options.rank == 0)
    for (const File& file : connections.notices)
      if (file.open()) write_all(file, bytes_of(notice), Deadline(1), -1);
  fail_for(notice.rank, text_of(notice.text));
}

/// Connections for data and for checks: connects to all lower ranks, accepts all higher ones.
void connect_data(const RendezvousOptions& options, ConnectionAcceptor& acceptor, const Deadline& deadline,
                  Connections& connections) {
  for (int r = 0; r < options.rank; ++r) {
    const Member& member = connections.members[size_t(r)];
    const int alarm = connections.notices[0].number();
    for (const Purpose purpose : {Purpose::data, Purpose::checks}) {
      File connection = connect_to(member.address, member.port, deadline, alarm);
      Hello hello = hello_of(options, purpose, 0);
      if (!connection.open() || !write_all(connection, bytes_of(hello), deadline, alarm))
        throw_lost(options, connections, r);
      (purpose == Purpose::data ? connections.data : connections.checks)[size_t(r)] = std::move(connection);
    }
  }
  std::vector<int> watched, ranks;
  for (size_t i = 0; i < connections.notices.size(); ++i)
    if (connections.notices[i].open())
      watched.push_back(connections.notices[i].number()), ranks.push_back(int(i));
  for (int missing = 2 * (options.size - 1 - options.rank); missing > 0; --missing) {
    size_t woke = watched.size();
    std::optional<IdentifiedPeer> peer = acceptor.next(deadline, watched, woke);
    if (!peer && woke < watched.size()) throw_lost(options, connections, ranks[woke]);
    check(peer.has_value(), "comm: rank ", options.rank, ": ", (missing + 1) / 2,
          " ranks did not connect to it within ", deadline.seconds(),
          " s; may the machines of the job reach each other on any port?");
    const int r = peer->hello.rank;
    std::vector<File>* const of_purpose = peer->hello.purpose == Purpose::data     ? &connections.data
                                          : peer->hello.purpose == Purpose::checks ? &connections.checks
                                                                                   : nullptr;
    const bool fits = of_purpose && r > options.rank && r < options.size &&
                      peer->hello.size == options.size && !(*of_purpose)[size_t(r)].open();
    if (!fits)
      ++missing;  // not a rank that is expected here: dropped, still missing
    else
      (*of_purpose)[size_t(r)] = std::move(peer->connection);
  }
}

}  // namespace

Connections rendezvous(const RendezvousOptions& options) {
  check(options.size >= 1 && options.rank >= 0 && options.rank < options.size, "comm: rank ", options.rank,
        " of ", options.size, " ranks");
  check(options.token.size() < sizeof(Hello::token), "comm: the job's token has ", options.token.size(),
        " bytes; at most ", sizeof(Hello::token) - 1);
  RendezvousOptions own = options;
  own.what.resize(std::min(own.what.size(), sizeof(Hello::what) - 1));
  const Deadline deadline(options.seconds);
  const bool everywhere = !is_loopback(options.host);
  Connections connections;
  connections.members.resize(size_t(options.size));
  connections.data.resize(size_t(options.size));
  connections.checks.resize(size_t(options.size));
  if (options.rank == 0) {
    const File listener =
        options.listener >= 0 ? adopt_listener(options.listener) : listen_on(options.port, everywhere);
    connections.notices.resize(size_t(options.size));
    RendezvousServer host(own, listener, connections);
    host.gather(deadline, port_of(listener));
    connect_data(own, host.acceptor(), deadline, connections);
  } else {
    const File listener = listen_on(0, everywhere);
    ConnectionAcceptor acceptor(listener, own);
    join_server(own, port_of(listener), deadline, connections);
    connect_data(own, acceptor, deadline, connections);
  }
  return connections;
}

}  // namespace tessera::comm

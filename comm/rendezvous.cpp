#include "comm/rendezvous.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <list>
#include <optional>
#include <sstream>
#include <utility>

#include "comm/status.h"
#include "comm/transport.h"
#include "runtime/interrupt.h"

namespace tessera::comm {
namespace {

enum class Purpose : uint32_t { notices = 1, data = 2 };

/// What a process says of itself, first on every connection.
struct Hello {
  static constexpr uint64_t kMagic = 0x6f6c'6c65'6872'7374u;
  uint64_t magic = kMagic;
  uint32_t version = 1;
  Purpose purpose = Purpose::notices;
  int32_t rank = 0, size = 0, pid = 0, port = 0;
  char token[256] = {}, host[256] = {}, what[1024] = {};
};

/// The answer of rank 0, before the members if it is not a refusal.
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

/// A connection that has said who it is.
struct Caller {
  File connection;
  Hello hello;
};

/// Takes connections, those that say nothing or something else at the same time as those of the job.
class Reception {
 public:
  Reception(const File& listener, const Meeting& meeting) : listener_(listener), meeting_(meeting) {}

  /// Waits for the next caller of this job, or until a watched file descriptor becomes readable or is closed:
  /// then `woke` is its index, and there is none. Throws at the deadline.
  std::optional<Caller> next(const Deadline& deadline, const std::vector<int>& watched, size_t& woke) {
    while (true) {
      std::vector<pollfd> files{{listener_.number(), POLLIN, 0}};
      for (const int file : watched) files.push_back({file, POLLIN, 0});
      for (const Unknown& unknown : unknown_) files.push_back({unknown.connection.number(), POLLIN, 0});
      const int ready = ::poll(files.data(), files.size(), deadline.milliseconds());
      if (ready < 0 && errno == EINTR) {
        check_interrupt();
        continue;
      }
      if (ready <= 0) return std::nullopt;
      for (size_t i = 0; i < watched.size(); ++i)
        if (files[1 + i].revents != 0) return woke = i, std::nullopt;
      if (std::optional<Caller> caller = listen_to_unknown()) return caller;
      if (files[0].revents != 0) take_connection();
    }
  }

 private:
  struct Unknown {
    File connection;
    Hello hello;
    size_t got = 0;
  };

  void take_connection() {
    constexpr size_t kMostUnknown = 4096;
    while (true) {
      File connection = accept_from(listener_);
      if (!connection.open()) return;
      if (unknown_.size() >= kMostUnknown) unknown_.pop_front();
      unknown_.push_back({.connection = std::move(connection)});
    }
  }

  std::optional<Caller> listen_to_unknown() {
    for (auto at = unknown_.begin(); at != unknown_.end();) {
      const long got = read_some(at->connection, bytes_of(at->hello).subspan(at->got));
      at->got += got > 0 ? size_t(got) : 0;
      // Another program is known by its first bytes, and dropped.
      const bool other = at->got >= sizeof(uint64_t) && at->hello.magic != Hello::kMagic;
      if (got < 0 || other) {
        at = unknown_.erase(at);
      } else if (at->got < sizeof(Hello)) {
        ++at;
      } else {
        Caller caller{std::move(at->connection), at->hello};
        at = unknown_.erase(at);
        if (belongs(caller)) return caller;
      }
    }
    return std::nullopt;
  }

  bool belongs(const Caller& caller) {
    const Hello& hello = caller.hello;
    if (hello.version == Hello().version && text_of(hello.token) == meeting_.token) return true;
    const std::string reason =
        hello.version != Hello().version
            ? "the job's processes speak another version of the protocol; run the same program on all ranks"
            : "the token of the job is another one; " +
                  (meeting_.origin.empty() ? "is this process of another job, or is the port another job's?"
                                           : meeting_.origin);
    refuse(caller.connection, reason);
    if (meeting_.rank == 0 && !std::exchange(told_refused_, true))
      std::fprintf(stderr, "tessera: rank 0 refused %s, which says that it is rank %d of %d: %s\n",
                   who(hello).c_str(), hello.rank, hello.size, reason.c_str());
    return false;
  }

  const File& listener_;
  const Meeting& meeting_;
  std::list<Unknown> unknown_;
  bool told_refused_ = false;
};

Hello hello_of(const Meeting& meeting, Purpose purpose, int port) {
  Hello hello;
  hello.purpose = purpose;
  hello.rank = meeting.rank, hello.size = meeting.size;
  hello.pid = int(::getpid()), hello.port = port;
  copy_text(hello.token, sizeof(hello.token), meeting.token);
  copy_text(hello.host, sizeof(hello.host), host_name());
  copy_text(hello.what, sizeof(hello.what), meeting.what);
  return hello;
}

/// Rank 0's side of the first part: all ranks come, or all are told why not.
class Host {
 public:
  Host(const Meeting& meeting, const File& listener, Connections& connections)
      : meeting_(meeting), reception_(listener, meeting), connections_(connections) {}

  void gather(const Deadline& deadline, int own_port) {
    const Hello own = hello_of(meeting_, Purpose::notices, own_port);
    hellos_.resize(size_t(meeting_.size));
    hellos_[0] = own;
    connections_.members[0] = {text_of(own.host), meeting_.host, own.pid, own_port};
    for (int missing = meeting_.size - 1; missing > 0; --missing) join(next(deadline));
    welcome_all(deadline);
  }

  Reception& reception() { return reception_; }

 private:
  /// Tells all ranks why there is no job. Those that are still on their way would find no listener, and
  /// try again until their deadline: rank 0 stays a little for the `coming` of them.
  [[noreturn]] void give_up(int rank, const std::string& reason, int coming, Site site = Site::here()) {
    for (const File& connection : connections_.notices)
      if (connection.open()) refuse(connection, reason);
    for (const Deadline patience(kPatience); coming > 0; --coming) {
      size_t woke = 0;
      const std::optional<Caller> late = reception_.next(patience, {}, woke);
      if (!late) break;
      refuse(late->connection, reason);
    }
    fail_for(rank, reason, site);
  }

  /// Ranks that have not come yet.
  int coming() const {
    return int(std::ranges::count_if(hellos_, [](const auto& hello) { return !hello.has_value(); }));
  }

  Caller next(const Deadline& deadline) {
    std::vector<int> watched, ranks;
    for (int r = 1; r < meeting_.size; ++r)
      if (connections_.notices[size_t(r)].open())
        watched.push_back(connections_.notices[size_t(r)].number()), ranks.push_back(r);
    size_t woke = watched.size();
    std::optional<Caller> caller = reception_.next(told_ ? deadline : quiet_, watched, woke);
    if (!caller && woke == watched.size() && !told_ && !deadline.passed()) {
      tell_missing(deadline);
      caller = reception_.next(deadline, watched, woke);
    }
    if (caller) return std::move(*caller);
    if (woke < watched.size()) {
      const int gone = ranks[woke];
      connections_.notices[size_t(gone)].close();
      give_up(gone,
              "rank " + std::to_string(gone) + " (" + who(*hellos_[size_t(gone)]) +
                  ") ended before all ranks had come",
              coming());
    }
    std::ostringstream text;
    text << "not all ranks came within " << deadline.seconds() << " s: missing " << missing();
    give_up(-1, text.str(), 0);
  }

  /// "1, 3 of 4": the ranks that have not come yet.
  std::string missing() const {
    std::ostringstream text;
    for (int r = 1, n = 0; r < meeting_.size; ++r)
      if (!hellos_[size_t(r)] && n++ < 8) text << (n > 1 ? ", " : "") << r;
    text << " of " << meeting_.size;
    return text.str();
  }

  void tell_missing(const Deadline& deadline) {
    told_ = true;
    std::fprintf(stderr, "tessera: rank 0 waits for rank %s at %s:%d, for at most %g s\n", missing().c_str(),
                 meeting_.host.c_str(), meeting_.port, deadline.seconds());
  }

  void join(Caller caller) {
    const Hello& hello = caller.hello;
    const auto refuse_all = [&](const std::string& reason) {
      refuse(caller.connection, reason);
      give_up(-1, reason, coming() - 1);
    };
    const std::string rank = std::to_string(hello.rank);
    if (hello.size != meeting_.size)
      refuse_all("rank " + rank + " (" + who(hello) + ") counts " + std::to_string(hello.size) +
                 " ranks, rank 0 counts " + std::to_string(meeting_.size));
    if (hello.rank < 0 || hello.rank >= meeting_.size || hello.purpose != Purpose::notices)
      refuse_all(who(hello) + " says that it is rank " + rank + " of " + std::to_string(meeting_.size));
    if (std::optional<Hello>& there = hellos_[size_t(hello.rank)])
      refuse_all("two processes are rank " + rank + ": " + who(*there) + ", and " + who(hello));
    if (text_of(hello.what) != meeting_.what)
      refuse_all("rank " + rank + " (" + who(hello) + ") runs \"" + text_of(hello.what) + "\", rank 0 \"" +
                 meeting_.what + "\"");
    std::string address = address_of_peer(caller.connection);
    // A rank next to rank 0 is where rank 0 is: elsewhere its loopback address would mean another machine.
    if (is_loopback(address)) address = meeting_.host;
    connections_.members[size_t(hello.rank)] = {text_of(hello.host), address, hello.pid, hello.port};
    hellos_[size_t(hello.rank)] = hello;
    connections_.notices[size_t(hello.rank)] = std::move(caller.connection);
  }

  void welcome_all(const Deadline& deadline) {
    Welcome answer;
    answer.accepted = 1, answer.members = meeting_.size;
    std::vector<WireMember> table;
    for (const Member& member : connections_.members) {
      WireMember& entry = table.emplace_back();
      copy_text(entry.host, sizeof(entry.host), member.host);
      copy_text(entry.address, sizeof(entry.address), member.address);
      entry.pid = member.pid, entry.port = member.port;
    }
    for (int r = 1; r < meeting_.size; ++r) {
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
  const Meeting& meeting_;
  const Deadline quiet_{meeting_.seconds > 0 ? std::min(meeting_.quiet, meeting_.seconds) : meeting_.quiet};
  bool told_ = false;
  Reception reception_;
  Connections& connections_;
  std::vector<std::optional<Hello>> hellos_;  // by rank
};

/// The other ranks' side.
void join_host(const Meeting& meeting, int own_port, const Deadline& deadline, Connections& connections) {
  const std::string where = meeting.host + ":" + std::to_string(meeting.port);
  File connection = connect_to(meeting.host, meeting.port, deadline, -1);
  Hello hello = hello_of(meeting, Purpose::notices, own_port);
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
  check(answer.members == meeting.size, "comm: ", where, " has ", answer.members, " ranks");
  std::vector<WireMember> table(size_t(meeting.size));
  if (!read_all(connection, std::as_writable_bytes(std::span(table)), deadline, -1))
    fail_for(0, "rank 0 at " + where + " ended before all ranks had come");
  for (int r = 0; r < meeting.size; ++r) {
    const WireMember& entry = table[size_t(r)];
    connections.members[size_t(r)] = {text_of(entry.host), text_of(entry.address), entry.pid, entry.port};
  }
  connections.notices.push_back(std::move(connection));
}

/// A rank ended, or said that it failed, while the ranks connected: tells the others, if this is rank 0, and
/// throws. `suspect`: the rank to blame if nothing is known.
[[noreturn]] void throw_lost(const Meeting& meeting, Connections& connections, int suspect) {
  constexpr double kPatience = 3;  // seconds, for the notice that says more
  const Member& member = connections.members[size_t(suspect)];
  Notice notice;
  notice.rank = suspect;
  const auto blame = [&] {
    copy_text(notice.text, sizeof(notice.text),
              "rank " + std::to_string(suspect) + " (pid " + std::to_string(member.pid) + " on " +
                  member.host + ") ended while the ranks connected");
  };
  Notice told;
  const File& from = connections.notices[meeting.rank == 0 ? size_t(suspect) : 0];
  if (from.open() && read_all(from, bytes_of(told), Deadline(kPatience), -1) &&
      told.magic == Notice::kMagic && told.what == Notice::What::failed)
    notice = told;
  else
    blame();
  if (meeting.rank == 0)
    for (const File& file : connections.notices)
      if (file.open()) write_all(file, bytes_of(notice), Deadline(1), -1);
  fail_for(notice.rank, text_of(notice.text));
}

/// The connections for messages: to all lower ranks, from all higher ones.
void connect_data(const Meeting& meeting, Reception& reception, const Deadline& deadline,
                  Connections& connections) {
  for (int r = 0; r < meeting.rank; ++r) {
    const Member& member = connections.members[size_t(r)];
    const int alarm = connections.notices[0].number();
    File connection = connect_to(member.address, member.port, deadline, alarm);
    Hello hello = hello_of(meeting, Purpose::data, 0);
    if (!connection.open() || !write_all(connection, bytes_of(hello), deadline, alarm))
      throw_lost(meeting, connections, r);
    connections.data[size_t(r)] = std::move(connection);
  }
  std::vector<int> watched, ranks;
  for (size_t i = 0; i < connections.notices.size(); ++i)
    if (connections.notices[i].open())
      watched.push_back(connections.notices[i].number()), ranks.push_back(int(i));
  for (int missing = meeting.size - 1 - meeting.rank; missing > 0; --missing) {
    size_t woke = watched.size();
    std::optional<Caller> caller = reception.next(deadline, watched, woke);
    if (!caller && woke < watched.size()) throw_lost(meeting, connections, ranks[woke]);
    check(caller.has_value(), "comm: rank ", meeting.rank, ": ", missing,
          " ranks did not connect to it within ", deadline.seconds(),
          " s; may the machines of the job reach each other on any port?");
    const int r = caller->hello.rank;
    const bool fits = caller->hello.purpose == Purpose::data && r > meeting.rank && r < meeting.size &&
                      caller->hello.size == meeting.size && !connections.data[size_t(r)].open();
    if (!fits)
      ++missing;  // not a rank that is expected here: dropped
    else
      connections.data[size_t(r)] = std::move(caller->connection);
  }
}

}  // namespace

Connections meet(const Meeting& meeting) {
  check(meeting.size >= 1 && meeting.rank >= 0 && meeting.rank < meeting.size, "comm: rank ", meeting.rank,
        " of ", meeting.size, " ranks");
  check(meeting.token.size() < sizeof(Hello::token), "comm: the job's token has ", meeting.token.size(),
        " bytes; at most ", sizeof(Hello::token) - 1);
  Meeting own = meeting;
  own.what.resize(std::min(own.what.size(), sizeof(Hello::what) - 1));
  const Deadline deadline(meeting.seconds);
  const bool everywhere = !is_loopback(meeting.host);
  Connections connections;
  connections.members.resize(size_t(meeting.size));
  connections.data.resize(size_t(meeting.size));
  if (meeting.rank == 0) {
    const File listener =
        meeting.listener >= 0 ? adopt_listener(meeting.listener) : listen_on(meeting.port, everywhere);
    connections.notices.resize(size_t(meeting.size));
    Host host(own, listener, connections);
    host.gather(deadline, port_of(listener));
    connect_data(own, host.reception(), deadline, connections);
  } else {
    const File listener = listen_on(0, everywhere);
    Reception reception(listener, own);
    join_host(own, port_of(listener), deadline, connections);
    connect_data(own, reception, deadline, connections);
  }
  return connections;
}

}  // namespace tessera::comm

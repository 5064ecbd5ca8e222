#include "comm/tcp.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>

#include "comm/deadline.h"
#include "comm/links.h"
#include "comm/status.h"

namespace tessera::comm {
namespace {

struct Failure {
  int rank;  // which failed first; -1: the ranks disagree
  std::string text;
};

template <class T>
std::span<std::byte> bytes_of(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

/// Sees to it that a failure of one rank becomes known to all. Every rank has a connection to rank 0 on which
/// nothing but notices travels, and a thread that listens to it; rank 0 passes on the first notice it gets. A
/// rank whose connection ends without a notice was killed. That connections for messages end, too, tells
/// less: a rank that stops because of another one closes them just so.
class Watch {
 public:
  Watch(const Meeting& meeting, std::vector<Member> members, std::vector<File> notices,
        std::function<void(const std::string&)> lost, double grace)
      : rank_(meeting.rank),
        size_(meeting.size),
        members_(std::move(members)),
        notices_(std::move(notices)),
        lost_(std::move(lost)),
        grace_(grace),
        alarm_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        exceptions_(std::uncaught_exceptions()) {
    check(alarm_.open() && stop_.open(), "comm: eventfd: ", std::strerror(errno));
    thread_ = std::jthread([this] { listen(); });
  }

  ~Watch() {
    if (std::uncaught_exceptions() > exceptions_) fail({rank_, named(rank_) + " ended with an exception"});
    if (!failure()) {
      Notice leave;
      leave.what = Notice::What::left, leave.rank = rank_;
      send_to_all(leave);
    }
    ring(stop_);
    thread_.join();
  }

  /// Readable once there is a failure.
  int alarm() const { return alarm_.number(); }
  std::optional<Failure> failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  /// The rank as messages name it: "rank 2 (pid 4711 on node7)".
  std::string named(int rank) const {
    const Member& member = members_[size_t(rank)];
    return "rank " + std::to_string(rank) + " (pid " + std::to_string(member.pid) + " on " + member.host +
           ")";
  }

  /// Makes it the job's failure, unless there is one already.
  void fail(Failure failure) {
    if (!note(failure)) return;
    Notice notice;
    notice.rank = failure.rank;
    copy_text(notice.text, sizeof(notice.text), failure.text);
    send_to_all(notice);
  }

  /// The program knows of the failure: an exception says so.
  void told() {
    const std::lock_guard lock(mutex_);
    told_ = true;
    changed_.notify_all();
  }

 private:
  static void ring(const File& bell) {
    const uint64_t one = 1;
    while (::write(bell.number(), &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }

  /// False if there was a failure before.
  bool note(const Failure& failure) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return false;
      failure_ = failure;
    }
    ring(alarm_);
    return true;
  }

  void send_to_all(Notice& notice) {
    const std::lock_guard lock(sending_);
    for (const File& file : notices_)
      if (file.open()) write_all(file, bytes_of(notice), Deadline(1), -1);
  }

  void listen() {
    std::vector<Incoming> incoming;
    for (size_t i = 0; i < notices_.size(); ++i)
      if (notices_[i].open()) incoming.push_back({.rank = rank_ == 0 ? int(i) : 0, .file = &notices_[i]});
    while (true) {
      std::vector<pollfd> files{{stop_.number(), POLLIN, 0}, {alarm_.number(), POLLIN, 0}};
      for (const Incoming& from : incoming) files.push_back({from.file->number(), POLLIN, 0});
      if (::poll(files.data(), files.size(), -1) < 0 && errno != EINTR) return;
      if (files[0].revents != 0) return;
      if (files[1].revents != 0) return await_told();
      for (size_t i = incoming.size(); i-- > 0;)
        if (files[2 + i].revents != 0 && !read(incoming[i])) incoming.erase(incoming.begin() + long(i));
    }
  }

  struct Incoming {
    int rank;
    const File* file;
    Notice notice = {};
    size_t got = 0;
  };

  /// False once nothing more will come.
  bool read(Incoming& from) {
    const long got = read_some(*from.file, bytes_of(from.notice).subspan(from.got));
    if (got < 0) {
      fail({from.rank, named(from.rank) + " ended without a word: it was killed, or left the program"});
      return false;
    }
    from.got += size_t(got);
    if (from.got < sizeof(Notice)) return true;
    from.got = 0;
    const Notice& notice = from.notice;
    if (notice.magic == Notice::kMagic && notice.what == Notice::What::left) return false;
    const bool sound = notice.magic == Notice::kMagic && notice.rank >= -1 && notice.rank < size_;
    fail(sound ? Failure{notice.rank, std::string(notice.text, ::strnlen(notice.text, sizeof(notice.text)))}
               : Failure{from.rank, named(from.rank) + " sent an invalid notice"});
    return false;
  }

  /// There is a failure: gives the program time to find out by its next call.
  void await_told() {
    if (!lost_) return;
    std::unique_lock lock(mutex_);
    const Deadline deadline(grace_);
    const auto stopping = [&] {
      pollfd file{stop_.number(), POLLIN, 0};
      return ::poll(&file, 1, 0) > 0;
    };
    while (!told_ && !deadline.passed() && !stopping())
      changed_.wait_for(lock, std::chrono::milliseconds(deadline.milliseconds(100)));
    if (told_ || stopping()) return;
    const std::string text = failure_->text;
    lock.unlock();
    lost_(text);
  }

  const int rank_, size_;
  const std::vector<Member> members_;
  const std::vector<File> notices_;
  const std::function<void(const std::string&)> lost_;
  const double grace_;
  const File alarm_, stop_;
  const int exceptions_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Failure> failure_;
  bool told_ = false;
  std::mutex sending_;
  std::jthread thread_;  // last: it uses all the others
};

/// What precedes every message.
struct Header {
  static constexpr uint64_t kMagic = 0x6567'7373'656d'7374u;
  uint64_t magic = kMagic;
  uint64_t bytes = 0;
  Call call;
};

class TcpLinks : public Links {
 public:
  TcpLinks(const TcpOptions& options, Connections connections)
      : rank_(options.meeting.rank),
        size_(options.meeting.size),
        data_(std::move(connections.data)),
        watch_(options.meeting, std::move(connections.members), std::move(connections.notices), options.lost,
               options.grace) {}

  const char* name() const override { return "tcp"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void fail(const std::string& cause) override {
    watch_.fail({rank_, watch_.named(rank_) + " failed: " + cause});
  }

  void exchange(const Call& call, std::span<const Transfer> transfers, std::span<const int> ranks) override {
    if (watch_.failure()) throw_failure(call);
    const Deadline deadline;
    std::vector<Progress> all(transfers.begin(), transfers.end());
    for (Progress& p : all)
      if (p.transfer.way == Transfer::Way::send) p.header.call = call, p.header.bytes = p.transfer.bytes;
    while (advance(call, all, ranks)) await(call, all, deadline);
  }

 private:
  struct Progress {
    Progress(const Transfer& transfer) : transfer(transfer) {}  // NOLINT: implicit by design
    Transfer transfer;
    Header header;
    size_t done = 0;  // bytes, with the header
    bool whole() const { return done == sizeof(Header) + transfer.bytes; }
  };

  /// Sends and receives what goes without waiting. Returns whether anything is left.
  bool advance(const Call& call, std::vector<Progress>& all, std::span<const int> ranks) {
    bool left = false;
    // Of the messages to one rank, and of those from it, the first that is not whole.
    std::vector<bool> busy(size_t(2 * size_));
    for (Progress& p : all) {
      if (p.whole()) continue;
      const size_t lane = size_t(2 * p.transfer.peer) + (p.transfer.way == Transfer::Way::send ? 1 : 0);
      if (busy[lane]) continue;
      if (p.transfer.way == Transfer::Way::send)
        send_some(call, p);
      else
        receive_some(call, p, ranks);
      if (!p.whole()) busy[lane] = left = true;
    }
    return left;
  }

  void send_some(const Call& call, Progress& p) {
    const File& file = data_[size_t(p.transfer.peer)];
    while (!p.whole()) {
      const bool in_header = p.done < sizeof(Header);
      const auto* const from = in_header
                                   ? reinterpret_cast<const std::byte*>(&p.header) + p.done
                                   : static_cast<const std::byte*>(p.transfer.data) + p.done - sizeof(Header);
      const size_t size = in_header ? sizeof(Header) - p.done : sizeof(Header) + p.transfer.bytes - p.done;
      const long put = write_some(file, {from, size});
      if (put < 0) throw_lost(call, p.transfer.peer);
      if (put == 0) return;
      p.done += size_t(put);
    }
  }

  void receive_some(const Call& call, Progress& p, std::span<const int> ranks) {
    const File& file = data_[size_t(p.transfer.peer)];
    while (!p.whole()) {
      const bool in_header = p.done < sizeof(Header);
      auto* const to = in_header ? reinterpret_cast<std::byte*>(&p.header) + p.done
                                 : static_cast<std::byte*>(p.transfer.data) + p.done - sizeof(Header);
      const size_t size = in_header ? sizeof(Header) - p.done : sizeof(Header) + p.transfer.bytes - p.done;
      const long got = read_some(file, {to, size});
      if (got < 0) throw_lost(call, p.transfer.peer);
      if (got == 0) return;
      p.done += size_t(got);
      if (in_header && p.done == sizeof(Header)) check_header(call, p, ranks);
    }
  }

  void check_header(const Call& call, const Progress& p, std::span<const int> ranks) {
    const int peer = p.transfer.peer;
    const int from = int(std::ranges::find(ranks, peer) - ranks.begin()),
              self = int(std::ranges::find(ranks, rank_) - ranks.begin());
    if (p.header.magic != Header::kMagic)
      watch_.fail({peer, watch_.named(peer) + " sent something that is no message"});
    else if (!call.agrees_with(p.header.call, self, from) || p.header.bytes != p.transfer.bytes)
      watch_.fail({-1, disagreement(call, rank_, p.header.call, peer)});
    else
      return;
    throw_failure(call);
  }

  void await(const Call& call, const std::vector<Progress>& all, const Deadline& deadline) {
    std::vector<pollfd> files{{watch_.alarm(), POLLIN, 0}};
    for (const Progress& p : all)
      if (!p.whole())
        files.push_back({data_[size_t(p.transfer.peer)].number(),
                         short(p.transfer.way == Transfer::Way::send ? POLLOUT : POLLIN), 0});
    const int ready = ::poll(files.data(), files.size(), deadline.milliseconds());
    if (ready < 0 && errno == EINTR) return;
    if (files[0].revents != 0) throw_failure(call);
    if (ready > 0) return;
    const auto missing = std::ranges::find_if(all, [](const Progress& p) { return !p.whole(); });
    std::ostringstream text;
    text << watch_.named(missing->transfer.peer) << " did not take part in " << call.text() << " within "
         << deadline.seconds() << " s (TESSERA_COMM_SECONDS allows more)";
    watch_.fail({missing->transfer.peer, text.str()});
    throw_failure(call);
  }

  /// The connection to a rank has ended: it was killed, or stopped because of another rank's failure, which
  /// the watch learns.
  [[noreturn]] void throw_lost(const Call& call, int peer) {
    constexpr int kPatience = 3000;  // milliseconds; rank 0 is another process, and the machine may be busy
    pollfd alarm{watch_.alarm(), POLLIN, 0};
    const Deadline deadline(kPatience * 1e-3);
    while (::poll(&alarm, 1, deadline.milliseconds()) < 0 && errno == EINTR) {
    }
    if (!watch_.failure())
      watch_.fail({peer, watch_.named(peer) + " left the job before " + call.text() +
                             "; all ranks must make the same calls"});
    throw_failure(call);
  }

  [[noreturn]] void throw_failure(const Call& call) {
    const Failure failure = *watch_.failure();
    watch_.told();
    Status& status = own_status();
    status.blames = failure.rank == rank_ ? -1 : failure.rank;
    std::ostringstream text;
    text << failure.text;
    if (failure.rank >= 0 && failure.rank != rank_) {
      text << "; rank " << rank_ << " was in " << call.text();
      if (const int64_t step = status.step; step >= 0) text << " of step " << step;
    }
    fail_for(failure.rank, text.str());
  }

  const int rank_, size_;
  std::vector<File> data_;
  Watch watch_;
};

}  // namespace

Communicator connect_tcp(const TcpOptions& options) {
  Connections connections = meet(options.meeting);
  if (options.meeting.size == 1) return Communicator();
  const auto transport = make_host_transport(std::make_shared<TcpLinks>(options, std::move(connections)));
  // None leaves before all have connected: that would look like a death to those that still wait.
  const TimeoutScope patience(options.meeting.seconds);
  transport->run(Call(), Tensor(), Tensor());
  return Communicator(transport);
}

}  // namespace tessera::comm

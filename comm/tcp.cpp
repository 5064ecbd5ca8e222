#include "comm/tcp.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>

#include "comm/call_check.h"
#include "comm/deadline.h"
#include "comm/links.h"
#include "comm/status.h"
#include "comm/watch_internal.h"

namespace tessera::comm {
namespace {

/// What precedes every message.
struct Header {
  static constexpr uint64_t kMagic = 0x6567'7373'656d'7374u;
  uint64_t magic = kMagic;
  uint64_t bytes = 0;
  Call call;
};

class TcpLinks : public Links, public CallCheck::Job {
 public:
  TcpLinks(const TcpOptions& options, Connections connections)
      : rank_(options.rendezvous.rank),
        size_(options.rendezvous.size),
        data_(std::move(connections.data)),
        checks_(std::move(connections.checks)),
        watch_(options.rendezvous, std::move(connections.members), std::move(connections.notices),
               options.lost, options.grace) {}

  ~TcpLinks() override { watch_.set_other_wait({}); }

  const char* name() const override { return "tcp"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void fail(const std::string& cause) override {
    watch_.fail({rank_, watch_.describe_rank(rank_) + " failed: " + cause});
  }

  CallCheck& call_check() override {
    if (has_call_check_) return *check_;
    check_ = std::make_unique<CallCheck>(*this);
    watch_.set_other_wait([this]() -> std::optional<Watch::BlockingRank> {
      const std::optional<CallCheck::Late> late = check_->late();
      if (!late) return std::nullopt;
      return Watch::BlockingRank{late->rank, late->call.text()};
    });
    has_call_check_ = true;
    return *check_;
  }

  void exchange(const Call& call, std::span<const Transfer> transfers, std::span<const int> ranks) override {
    if (watch_.failure()) throw_failure(call);
    const Deadline deadline;
    std::vector<Progress> all(transfers.begin(), transfers.end());
    for (Progress& p : all)
      if (p.transfer.direction == Transfer::Direction::send)
        p.header.call = call, p.header.bytes = p.transfer.bytes;
    if (!advance(call, all, ranks)) return;
    Watch::Waiting waiting(watch_, call);
    do await(call, all, deadline, waiting);
    while (advance(call, all, ranks));
  }

 private:
  struct Progress {
    Progress(const Transfer& transfer) : transfer(transfer) {}  // NOLINT: implicit by design
    Transfer transfer;
    Header header;
    size_t done = 0;  // bytes, with the header
    bool whole() const { return done == sizeof(Header) + transfer.bytes; }
  };

  /// Sends and receives without waiting. Returns whether anything is left to do.
  bool advance(const Call& call, std::vector<Progress>& all, std::span<const int> ranks) {
    bool left = false;
    // Per peer and direction, only the first incomplete message may progress.
    std::vector<bool> busy(size_t(2 * size_));
    for (Progress& p : all) {
      if (p.whole()) continue;
      const size_t lane =
          size_t(2 * p.transfer.peer) + (p.transfer.direction == Transfer::Direction::send ? 1 : 0);
      if (busy[lane]) continue;
      if (p.transfer.direction == Transfer::Direction::send)
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
      watch_.fail({peer, watch_.describe_rank(peer) + " sent something that is no message"});
    else if (!call.agrees_with(p.header.call, self, from) || p.header.bytes != p.transfer.bytes)
      watch_.fail({-1, disagreement(call, rank_, p.header.call, peer)});
    else
      return;
    throw_failure(call);
  }

  void await(const Call& call, const std::vector<Progress>& all, const Deadline& deadline,
             Watch::Waiting& waiting) {
    std::vector<pollfd> files{{watch_.alarm(), POLLIN, 0}};
    for (const Progress& p : all)
      if (!p.whole())
        files.push_back({data_[size_t(p.transfer.peer)].number(),
                         short(p.transfer.direction == Transfer::Direction::send ? POLLOUT : POLLIN), 0});
    const auto missing = std::ranges::find_if(all, [](const Progress& p) { return !p.whole(); });
    waiting.set_peer(missing->transfer.peer);
    const int ready = ::poll(files.data(), files.size(), deadline.milliseconds());
    if (ready < 0 && errno == EINTR) return;
    if (files[0].revents != 0) throw_failure(call);
    if (ready > 0) return;
    report_late(watch_.find_blocking_rank(), deadline.seconds());
    throw_failure(call);
  }

  void report_late(const Watch::BlockingRank& blocking, double seconds) {
    MessageStream text;
    text << watch_.describe_rank(blocking.rank) << " did not take part in " << blocking.call << " within "
         << seconds << " s (TESSERA_COMM_SECONDS allows more)";
    watch_.fail({blocking.rank, text.str()});
  }

  /// The connection to a rank was closed: it died, or ended because of another rank's failure, which the
  /// watch will learn.
  [[noreturn]] void throw_lost(const Call& call, int peer) {
    report_left(peer, call);
    throw_failure(call);
  }

  void report_left(int peer, const Call& call) override {
    constexpr int kPatience = 3000;  // milliseconds; rank 0 is another process, and the machine may be busy
    pollfd alarm{watch_.alarm(), POLLIN, 0};
    const Deadline deadline(kPatience * 1e-3);
    while (::poll(&alarm, 1, deadline.milliseconds()) < 0 && errno == EINTR) {
    }
    if (!watch_.failure() && peer != 0 && !watch_.hears_rank_zero())
      watch_.fail({0, watch_.describe_rank(0) + " does not pass on why " + watch_.describe_rank(peer) +
                          " ended: it hangs"});
    if (!watch_.failure())
      watch_.fail({peer, watch_.describe_rank(peer) + " left the job before " + call.text() +
                             "; all ranks must make the same calls"});
  }

  // ---- of CallCheck::Job ----
  const File& connection_for_check(int rank) override { return checks_[size_t(rank)]; }
  int alarm() const override { return watch_.alarm(); }
  void report_disagreement(const std::string& text) override { watch_.fail({-1, text}); }
  void report_late(int rank, const Call& call, double seconds) override {
    report_late(watch_.find_blocking_rank({rank, call.text()}), seconds);
  }

  [[noreturn]] void throw_failure(const Call& call) override {
    const Failure failure = *watch_.failure();
    watch_.failure_reported();
    Status& status = own_status();
    status.caused_by = failure.rank == rank_ ? -1 : failure.rank;
    MessageStream text;
    text << failure.text;
    if (failure.rank >= 0 && failure.rank != rank_) {
      text << "; rank " << rank_ << " was in " << call.text();
      if (const int64_t step = status.step; step >= 0) text << " of step " << step;
    }
    fail_for(failure.rank, text.str());
  }

  const int rank_, size_;
  std::vector<File> data_, checks_;
  Watch watch_;
  std::unique_ptr<CallCheck> check_;  // last: its thread uses the others
};

}  // namespace

Communicator connect_tcp(const TcpOptions& options) {
  Connections connections = rendezvous(options.rendezvous);
  if (options.rendezvous.size == 1) return Communicator();
  const auto transport = make_host_transport(std::make_shared<TcpLinks>(options, std::move(connections)));
  // Barrier: a rank that ended before all have connected would look like a dead one to the ranks that still
  // wait.
  const TimeoutScope patience(options.rendezvous.seconds);
  transport->run(Call(), Tensor(), Tensor());
  return Communicator(transport);
}

}  // namespace tessera::comm

#include "comm/call_check.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <span>
#include <utility>

#include "comm/links.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

// While calls are made, the thread looks for new ones every kBatch, so that post() need not wake it, and
// sends them together. kBusy after the last one it sleeps until it is woken.
constexpr auto kBatch = 100us;
constexpr auto kBusy = 5ms;
constexpr auto kSpin =
    100us;  // a wait polls that long before it sleeps: the other ranks answer in 20 to 60 us
constexpr double kLinger = 1;  // seconds for what is left to send at the end

}  // namespace

CallCheck::CallCheck(Job& job) : job_(job), wake_(open_event()) {
  for (int r = 0; r < job.size(); ++r)
    if (r != job.rank()) peers_.push_back({.rank = r, .file = &job.connection_for_check(r), .incoming = {}});
  const WithoutSignals scope;
  thread_ = std::jthread([this] { serve(); });
}

CallCheck::~CallCheck() {
  stop_ = true;
  signal_event(wake_);
}

// ---- the program's threads ----

void CallCheck::post(const Call& call, double seconds) {
  const auto has_space = [this] { return posted_ - std::min(confirmed_.load(), sent_.load()) < kMost; };
  std::unique_lock lock(posting_);
  while (!failed_ && !has_space()) {
    lock.unlock();
    send_now();
    await(has_space);
    lock.lock();
  }
  if (failed_) job_.throw_failure(call);
  const uint64_t number = posted_;
  calls_[number % kMost] = call;
  deadlines_[number % kMost] = Deadline(seconds);
  posted_ = number + 1;
  if (asleep_.exchange(false)) signal_event(wake_);
}

void CallCheck::send_now() noexcept {
  if (!confirmed() && !failed_) signal_event(wake_);
}

void CallCheck::confirm() {
  if (const uint64_t posted = posted_; confirmed_ < posted) {
    send_now();
    await([&] { return confirmed_ >= posted; });
  }
  if (failed_) throw_failure();
}

std::optional<CallCheck::Late> CallCheck::late() {
  const std::lock_guard lock(posting_);  // no call is overwritten
  const uint64_t number = confirmed_;
  if (number == posted_) return std::nullopt;
  return Late{late_rank_, calls_[number % kMost]};
}

void CallCheck::throw_failure_within(double seconds) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return failed_.load(); });
  }
  if (failed_) throw_failure();
}

void CallCheck::throw_failure() {
  Call last;
  {
    const std::lock_guard lock(posting_);
    if (posted_ > 0) last = calls_[(posted_ - 1) % kMost];
  }
  job_.throw_failure(last);
}

/// Until ready(), or until the job fails.
template <class Ready>
void CallCheck::await(const Ready& ready) {
  for (const auto end = Clock::now() + kSpin; Clock::now() < end; std::this_thread::yield())
    if (ready() || failed_) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ready() || failed_; });
}

void CallCheck::on_failure(const void* owner, std::function<void()> f) {
  const std::lock_guard lock(listening_);
  if (failed_) return f();
  listeners_.emplace(owner, std::move(f));
}

void CallCheck::forget(const void* owner) {
  const std::lock_guard lock(listening_);
  listeners_.erase(owner);
}

// ---- the thread ----

void CallCheck::serve() {
  uint64_t seen = 0;
  auto last_call = Clock::now() - kBusy;
  std::unique_ptr<Deadline> linger;
  while (true) {
    const bool stopping = stop_;  // read first: then no call is posted after `posted`
    const uint64_t posted = posted_;
    if (std::exchange(seen, posted) != posted) last_call = Clock::now();
    bool going_on = exchange(posted);
    publish();
    going_on = going_on && !report_if_late();
    if (stopping) {
      if (!linger) linger = std::make_unique<Deadline>(kLinger);
      if (!going_on || sent_ >= posted || linger->passed()) return;
    }
    const auto busy = last_call + kBusy - Clock::now();
    if (busy > Clock::duration::zero() || stopping || !going_on) {
      if (!wait(kBatch)) return end();
      continue;
    }
    asleep_ = true;
    if (posted_ == posted && !stop_ && !wait(Clock::duration::max())) return end();
    asleep_ = false;
  }
}

/// Sends and receives without waiting; `posted` calls are to be sent and compared. False if the job fails.
bool CallCheck::exchange(uint64_t posted) {
  return std::ranges::all_of(peers_, [&](Peer& peer) { return send(peer, posted) && receive(peer, posted); });
}

bool CallCheck::send(Peer& peer, uint64_t posted) {
  while (peer.sent < posted * sizeof(Call)) {
    const uint64_t number = peer.sent / sizeof(Call), skipped = peer.sent % sizeof(Call);
    const uint64_t count = std::min(posted - number, kMost - number % kMost);  // to the end of calls_
    const auto bytes = std::as_bytes(std::span(calls_).subspan(number % kMost, count)).subspan(skipped);
    const long put = write_some(*peer.file, bytes);
    if (put == 0) return true;
    // A rank that has left is noticed when its calls are missing.
    peer.sent = put < 0 ? posted * sizeof(Call) : peer.sent + uint64_t(put);
  }
  return true;
}

bool CallCheck::receive(Peer& peer, uint64_t posted) {
  while (peer.received < posted) {
    const size_t count = std::min(kReceived, posted - peer.received);
    const auto into = std::as_writable_bytes(std::span(peer.incoming)).first(count * sizeof(Call));
    const long got = read_some(*peer.file, into.subspan(peer.got));
    if (got == 0) return true;
    if (got < 0) {
      job_.report_left(peer.rank, calls_[peer.received % kMost]);
      return false;
    }
    peer.got += size_t(got);
    const size_t whole = peer.got / sizeof(Call);
    for (size_t i = 0; i < whole; ++i, ++peer.received) {
      const Call& ours = calls_[peer.received % kMost];
      const Call& theirs = peer.incoming[i];
      if (ours.agrees_with(theirs, job_.rank(), peer.rank)) continue;
      job_.report_disagreement(disagreement(ours, job_.rank(), theirs, peer.rank));
      return false;
    }
    peer.got -= whole * sizeof(Call);
    std::memmove(peer.incoming.data(), peer.incoming.data() + whole, peer.got);
  }
  return true;
}

void CallCheck::publish() {
  uint64_t received = posted_, sent = posted_;
  for (const Peer& peer : peers_) {
    if (peer.received < received) received = peer.received, late_rank_ = peer.rank;
    sent = std::min(sent, peer.sent / sizeof(Call));
  }
  if (received == confirmed_ && sent == sent_) return;
  {
    const std::lock_guard lock(mutex_);
    confirmed_ = received, sent_ = sent;
  }
  changed_.notify_all();
}

/// The number of the first unconfirmed call with a deadline; posted_ if there is none. Calls before it may
/// have none.
uint64_t CallCheck::first_with_deadline() const {
  uint64_t number = confirmed_;
  while (number < posted_ && deadlines_[number % kMost].seconds() == 0) ++number;
  return number;
}

/// Whether a deadline has passed, and was reported.
bool CallCheck::report_if_late() {
  const uint64_t number = first_with_deadline();
  if (number == posted_ || !deadlines_[number % kMost].passed()) return false;
  // The late rank has not made this one either: it makes them in their order.
  job_.report_late(late_rank_, calls_[number % kMost], deadlines_[number % kMost].seconds());
  return true;
}

/// Until something comes, a call is posted, or for `most`. False if the job has failed.
bool CallCheck::wait(Clock::duration most) {
  const uint64_t posted = posted_;
  std::vector<pollfd> files{{wake_.number(), POLLIN, 0}, {job_.alarm(), POLLIN, 0}};
  for (const Peer& peer : peers_) {
    const bool sends = peer.sent < posted * sizeof(Call), receives = peer.received < posted;
    if (sends || receives)
      files.push_back({peer.file->number(), short((sends ? POLLOUT : 0) | (receives ? POLLIN : 0)), 0});
  }
  std::chrono::nanoseconds left = most == Clock::duration::max() ? -1ns : std::chrono::nanoseconds(most);
  if (const uint64_t number = first_with_deadline(); number < posted && left < 0ns)
    left = std::chrono::milliseconds(deadlines_[number % kMost].milliseconds());
  const timespec limit{.tv_sec = left / 1s, .tv_nsec = (left % 1s).count()};
  ::ppoll(files.data(), files.size(), left < 0ns ? nullptr : &limit, nullptr);
  if (files[1].revents != 0) return false;
  if (uint64_t count = 0; files[0].revents != 0)
    while (::read(wake_.number(), &count, sizeof(count)) < 0 && errno == EINTR) {
    }
  return true;
}

void CallCheck::end() {
  {
    const std::lock_guard lock(mutex_);
    failed_ = true;
  }
  changed_.notify_all();
  const std::lock_guard lock(listening_);
  for (const auto& [owner, f] : listeners_) f();
  listeners_.clear();
}

}  // namespace tessera::comm

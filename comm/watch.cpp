#include "comm/watch_internal.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <span>
#include <type_traits>
#include <utility>

#include "comm/deadline.h"
#include "comm/status.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"

namespace tessera::comm {
namespace {

constexpr double kPatience = 3;  // seconds for an answer; a process that runs needs some microseconds

template <class T>
auto bytes_of(T& value) {
  if constexpr (std::is_const_v<T>)
    return std::as_bytes(std::span(&value, 1));
  else
    return std::as_writable_bytes(std::span(&value, 1));
}

std::string text_of(const Notice& notice) {
  return {notice.text, ::strnlen(notice.text, sizeof(notice.text))};
}

}  // namespace

Watch::Watch(const RendezvousOptions& options, std::vector<Member> members, std::vector<File> notices,
             std::function<void(const std::string&)> lost, double grace)
    : rank_(options.rank),
      size_(options.size),
      members_(std::move(members)),
      notices_(std::move(notices)),
      lost_(std::move(lost)),
      grace_(grace),
      alarm_(open_event()),
      stop_(open_event()),
      exceptions_(std::uncaught_exceptions()) {
  const WithoutSignals scope;
  thread_ = std::jthread([this] { listen(); });
}

Watch::~Watch() {
  if (std::uncaught_exceptions() > exceptions_)
    fail({rank_, describe_rank(rank_) + " ended with an exception"});
  if (!failure()) send_to_all({.what = Notice::What::left, .rank = rank_});
  signal_event(stop_);
  thread_.join();
}

std::optional<Failure> Watch::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::string Watch::describe_rank(int rank) const {
  const Member& member = members_[size_t(rank)];
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(member.pid) + " on " + member.host + ")";
}

void Watch::fail(const Failure& failure) {
  if (!set_failure(failure)) return;
  Notice notice{.what = Notice::What::failed, .rank = failure.rank};
  copy_text(notice.text, sizeof(notice.text), failure.text);
  send_to_all(notice);
}

void Watch::failure_reported() {
  const std::lock_guard lock(mutex_);
  failure_reported_ = true;
  changed_.notify_all();
}

/// False if there was a failure before.
bool Watch::set_failure(const Failure& failure) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return false;
    failure_ = failure;
    changed_.notify_all();
  }
  signal_event(alarm_);
  return true;
}

void Watch::send_to_all(const Notice& notice) {
  const std::lock_guard lock(sending_);
  for (const File& file : notices_)
    if (file.open()) write_all(file, bytes_of(notice), Deadline(1), -1);
}

// ---- which rank the others wait for ----

void Watch::set_waiting(int peer, const Call* call) {
  const std::lock_guard lock(mutex_);
  awaited_ = peer, call_ = call;
}

void Watch::set_other_wait(std::function<std::optional<BlockingRank>()> wait) {
  const std::lock_guard lock(other_waiting_);
  other_wait_ = std::move(wait);
}

Watch::BlockingRank Watch::find_blocking_rank() {
  BlockingRank first;
  {
    const std::lock_guard lock(mutex_);
    first = {awaited_, call_->text()};
  }
  return find_blocking_rank(first);
}

Watch::BlockingRank Watch::find_blocking_rank(const BlockingRank& first) {
  BlockingRank blocking = first;
  // Questions to other ranks are forwarded by rank 0.
  if (blocking.rank != 0 && !hears_rank_zero()) return {0, blocking.call};
  for (int hops = 0; hops < size_; ++hops) {
    const std::optional<Answer> answer = ask(blocking.rank);
    if (!answer || answer->awaited < 0) return blocking;
    blocking = {answer->awaited, answer->call};
    if (blocking.rank == rank_) break;
  }
  return first;  // a cycle: the ranks wait for each other
}

/// Nothing if it does not answer in time, or if the job fails meanwhile.
std::optional<Watch::Answer> Watch::ask(int rank) {
  const std::lock_guard one(asking_);  // the program's thread or that of a CallCheck
  {
    const std::lock_guard lock(mutex_);
    asked_ = rank, answer_.reset();
  }
  forward({.what = Notice::What::question, .rank = rank_, .to = rank});
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(kPatience), [&] { return answer_ || failure_; });
  asked_ = -1;
  return answer_;
}

/// Sends a question or an answer towards rank `to`, directly or by way of rank 0.
void Watch::forward(const Notice& notice) {
  const File& file = notices_[rank_ == 0 ? size_t(notice.to) : 0];
  const std::lock_guard lock(sending_);
  if (file.open()) write_all(file, bytes_of(notice), Deadline(1), -1);
}

// ---- the thread ----

void Watch::listen() {
  std::vector<Incoming> incoming;
  for (size_t i = 0; i < notices_.size(); ++i)
    if (notices_[i].open()) incoming.push_back({.rank = rank_ == 0 ? int(i) : 0, .file = &notices_[i]});
  while (true) {
    std::vector<pollfd> files{{stop_.number(), POLLIN, 0}, {alarm_.number(), POLLIN, 0}};
    for (const Incoming& from : incoming) files.push_back({from.file->number(), POLLIN, 0});
    if (::poll(files.data(), files.size(), -1) < 0 && errno != EINTR) return;
    if (files[0].revents != 0) return;
    if (files[1].revents != 0) return await_failure_reported();
    for (size_t i = incoming.size(); i-- > 0;)
      if (files[2 + i].revents != 0 && !read(incoming[i])) incoming.erase(incoming.begin() + long(i));
  }
}

/// False once nothing more will come.
bool Watch::read(Incoming& from) {
  const long got = read_some(*from.file, bytes_of(from.notice).subspan(from.got));
  if (got < 0) {
    fail({from.rank, describe_rank(from.rank) + " ended without a word: it was killed, or left the program"});
    return false;
  }
  from.got += size_t(got);
  if (from.got < sizeof(Notice)) return true;
  from.got = 0;
  const Notice& notice = from.notice;
  const auto is_rank = [&](int rank) { return rank >= 0 && rank < size_; };
  if (notice.magic == Notice::kMagic) switch (notice.what) {
      case Notice::What::left:
        return false;
      case Notice::What::failed:
        if (notice.rank != -1 && !is_rank(notice.rank)) break;
        fail({notice.rank, text_of(notice)});
        return false;
      case Notice::What::question:
      case Notice::What::answer:
        if (!is_rank(notice.rank) || !is_rank(notice.to) || (notice.to != rank_ && rank_ != 0)) break;
        take(notice);
        return true;
    }
  fail({from.rank, describe_rank(from.rank) + " sent an invalid notice"});
  return false;
}

/// Handles a question or an answer; rank 0 forwards those for other ranks.
void Watch::take(const Notice& notice) {
  if (notice.to != rank_) return forward(notice);
  std::unique_lock lock(mutex_);
  if (notice.what == Notice::What::question) {
    std::optional<BlockingRank> waits;
    if (awaited_ >= 0) waits = {awaited_, call_->text()};
    lock.unlock();
    if (const std::lock_guard other(other_waiting_); !waits && other_wait_) waits = other_wait_();
    Notice answer{.what = Notice::What::answer, .rank = rank_, .to = notice.rank};
    if (waits) answer.awaited = waits->rank, copy_text(answer.text, sizeof(answer.text), waits->call);
    forward(answer);
  } else if (notice.rank == asked_) {
    answer_ = {notice.awaited < size_ ? notice.awaited : -1, text_of(notice)};
    changed_.notify_all();
  }
}

/// After a failure: waits `grace` seconds for the program to notice it in its next call.
void Watch::await_failure_reported() {
  if (!lost_) return;
  std::unique_lock lock(mutex_);
  const Deadline deadline(grace_);
  const auto stopping = [&] {
    pollfd file{stop_.number(), POLLIN, 0};
    return ::poll(&file, 1, 0) > 0;
  };
  while (!failure_reported_ && !deadline.passed() && !stopping())
    changed_.wait_for(lock, std::chrono::milliseconds(deadline.milliseconds(100)));
  if (failure_reported_ || stopping()) return;
  const std::string text = failure_->text;
  lock.unlock();
  lost_(text);
}

}  // namespace tessera::comm

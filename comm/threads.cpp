#include "comm/threads.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "comm/call_check.h"
#include "comm/deadline.h"
#include "comm/links.h"
#include "comm/socket.h"

namespace tessera::comm {
namespace {

/// State shared by the ranks (threads). A sender posts a pointer to its data and waits until the receiver has
/// copied it.
struct SharedMailboxes {
  enum class Progress { posted, copying, taken };
  struct Message {
    Call call;
    const void* data;
    size_t bytes;
    Progress* progress;
  };
  explicit SharedMailboxes(int size)
      : size(size),
        waiting(size_t(size) * size_t(size)),
        alarm(open_event()),
        left(size_t(size)),
        checks(size_t(size) * size_t(size)) {}
  std::deque<Message>& mailbox(int from, int to) { return waiting[size_t(from) * size_t(size) + size_t(to)]; }

  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<Message>> waiting;
  struct Failure {
    int rank;
    std::string text;
  };
  std::optional<Failure> failure;
  const File alarm;        // readable after a failure
  std::vector<bool> left;  // the ranks that make no calls any more

  /// The end of rank `of` of its connection to another rank, which the first of the two makes.
  File& check_end(int of, int to) { return checks[size_t(of) * size_t(size) + size_t(to)]; }
  std::vector<File> checks;
};

class ThreadLinks : public Links, public CallCheck::Job {
 public:
  ThreadLinks(std::shared_ptr<SharedMailboxes> mailboxes, int rank)
      : mailboxes_(std::move(mailboxes)), rank_(rank) {}
  ~ThreadLinks() override {
    check_.reset();
    {
      const std::lock_guard lock(mailboxes_->mutex);
      mailboxes_->left[size_t(rank_)] = true;
      if (has_call_check_)
        for (int r = 0; r < size(); ++r) mailboxes_->check_end(rank_, r).close();
    }
    mailboxes_->changed.notify_all();
  }
  const char* name() const override { return "threads"; }
  int rank() const override { return rank_; }
  int size() const override { return mailboxes_->size; }

  void fail(const std::string& cause) override { fail_with({rank_, cause}); }
  CallCheck& call_check() override {
    if (!has_call_check_) check_ = std::make_unique<CallCheck>(*this);
    has_call_check_ = true;
    return *check_;
  }

  void exchange(const Call& call, std::span<const Transfer> transfers, std::span<const int> ranks) override {
    const Deadline deadline;
    Sent sent(*mailboxes_);
    {
      const std::lock_guard lock(mailboxes_->mutex);
      for (const Transfer& t : transfers)
        if (t.direction == Transfer::Direction::send)
          mailboxes_->mailbox(rank_, t.peer).push_back({call, t.data, t.bytes, sent.add()});
    }
    mailboxes_->changed.notify_all();
    for (const Transfer& t : transfers)
      if (t.direction == Transfer::Direction::receive) receive(call, t, ranks, deadline);
    std::unique_lock lock(mailboxes_->mutex);
    auto next = sent.all.begin();
    for (const Transfer& t : transfers) {
      if (t.direction != Transfer::Direction::send) continue;
      const Progress& one = *next++;
      await(lock, deadline, call, t.peer, [&] { return one == Progress::taken; });
    }
  }

 private:
  using Progress = SharedMailboxes::Progress;

  /// The messages that an exchange has posted. No rank takes another one after a failure, but an exchange
  /// that throws waits for those that are being copied: their receivers read the sender's memory and write
  /// the progress.
  struct Sent {
    explicit Sent(SharedMailboxes& mailboxes) : mailboxes(mailboxes) {}
    ~Sent() {
      std::unique_lock lock(mailboxes.mutex);
      mailboxes.changed.wait(lock, [this] { return std::ranges::count(all, Progress::copying) == 0; });
    }
    Sent(const Sent&) = delete;
    Progress* add() { return &all.emplace_back(Progress::posted); }

    SharedMailboxes& mailboxes;
    std::deque<Progress> all;  // keeps the addresses of its elements
  };

  void receive(const Call& call, const Transfer& t, std::span<const int> ranks, const Deadline& deadline) {
    std::unique_lock lock(mailboxes_->mutex);
    auto& mailbox = mailboxes_->mailbox(t.peer, rank_);
    await(lock, deadline, call, t.peer, [&] { return !mailbox.empty(); });
    const SharedMailboxes::Message message = mailbox.front();
    mailbox.pop_front();
    const int from = int(std::ranges::find(ranks, t.peer) - ranks.begin()),
              self = int(std::ranges::find(ranks, rank_) - ranks.begin());
    if (!call.agrees_with(message.call, self, from) || message.bytes != t.bytes) {
      lock.unlock();
      fail_with({-1, disagreement(call, rank_, message.call, t.peer)});
      throw_failure(call);
    }
    *message.progress = Progress::copying;
    lock.unlock();
    if (t.bytes > 0) std::memcpy(t.data, message.data, t.bytes);
    lock.lock();
    *message.progress = Progress::taken;
    lock.unlock();
    mailboxes_->changed.notify_all();
  }

  /// Waits for a state that the rank `peer` brings about.
  template <class State>
  void await(std::unique_lock<std::mutex>& lock, const Deadline& deadline, const Call& call, int peer,
             State state) {
    while (!mailboxes_->failure && !state()) {
      if (mailboxes_->left[size_t(peer)]) {
        lock.unlock();
        report_left(peer, call);
        lock.lock();
        break;
      }
      if (deadline.passed()) {
        MessageStream text;
        text << "rank " << rank_ << " waited " << deadline.seconds() << " s for the others in "
             << call.text();
        lock.unlock();
        fail_with({-1, text.str()});
        lock.lock();
        break;
      }
      const int most = deadline.milliseconds();
      if (most < 0)
        mailboxes_->changed.wait(lock);
      else
        mailboxes_->changed.wait_for(lock, std::chrono::milliseconds(most));
    }
    if (mailboxes_->failure) {
      lock.unlock();
      throw_failure(call);
    }
  }

  void fail_with(SharedMailboxes::Failure failure) {
    {
      const std::lock_guard lock(mailboxes_->mutex);
      if (!mailboxes_->failure) mailboxes_->failure = std::move(failure);
    }
    mailboxes_->changed.notify_all();
    signal_event(mailboxes_->alarm);
  }

  // ---- of CallCheck::Job ----
  const File& connection_for_check(int rank) override {
    const std::lock_guard lock(mailboxes_->mutex);
    File& own = mailboxes_->check_end(rank_, rank);
    if (own.open()) return own;
    int ends[2];
    check(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
          "comm: socketpair: ", std::strerror(errno));
    own = File(ends[0]), mailboxes_->check_end(rank, rank_) = File(ends[1]);
    return own;
  }
  int alarm() const override { return mailboxes_->alarm.number(); }
  void report_disagreement(const std::string& text) override { fail_with({-1, text}); }
  void report_left(int rank, const Call& call) override {
    fail_with({rank, "it left before " + call.text() + "; all ranks must make the same calls"});
  }
  void report_late(int rank, const Call& call, double seconds) override {
    MessageStream text;
    text << "it did not take part in " << call.text() << " within " << seconds << " s";
    fail_with({rank, text.str()});
  }

  [[noreturn]] void throw_failure(const Call& call) override {
    const std::lock_guard lock(mailboxes_->mutex);
    const SharedMailboxes::Failure& failure = *mailboxes_->failure;
    if (failure.rank < 0) fail_for(-1, failure.text);
    fail_for(failure.rank, "rank " + std::to_string(failure.rank) + " failed: " + failure.text + "; rank " +
                               std::to_string(rank_) + " was in " + call.text());
  }

  std::shared_ptr<SharedMailboxes> mailboxes_;
  int rank_;
  std::unique_ptr<CallCheck> check_;
};

}  // namespace

std::vector<Communicator> thread_communicators(int size) {
  check(size >= 1, "thread_communicators: ", size, " ranks; expected at least 1");
  auto mailboxes = std::make_shared<SharedMailboxes>(size);
  std::vector<Communicator> communicators;
  for (int rank = 0; rank < size; ++rank)
    communicators.emplace_back(make_host_transport(std::make_shared<ThreadLinks>(mailboxes, rank)));
  return communicators;
}

void run_threads(int size, const std::function<void(Communicator&)>& main) {
  std::vector<Communicator> communicators = thread_communicators(size);
  std::mutex mutex;
  std::exception_ptr first;
  {
    std::vector<std::jthread> threads;
    for (Communicator& communicator : communicators)
      threads.emplace_back([&] {
        const auto fails = [&](const std::string& cause) {
          {
            const std::lock_guard lock(mutex);
            if (!first) first = std::current_exception();
          }
          communicator.fail(cause);
        };
        try {
          main(communicator);
        } catch (const std::exception& error) {
          fails(message_of(error));
        } catch (...) {
          fails("it threw something that is no std::exception");
        }
        communicator = Communicator();  // the others notice that this rank makes no calls any more
      });
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace tessera::comm

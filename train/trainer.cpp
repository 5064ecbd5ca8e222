#include "train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <utility>

#include "autograd/tape.h"
#include "comm/deadline.h"
#include "comm/status.h"
#include "io/checkpoint_folder.h"
#include "optim/whole_state.h"
#include "report/facts.h"
#include "runtime/interrupt.h"
#include "runtime/text.h"
#include "train/due.h"
#include "train/skips.h"
#include "train/step.h"
#include "train/step_log.h"

namespace tessera::train {
namespace {

/// Marks the record of a step whose evaluation was still missing when the run was stopped or killed.
constexpr const char* kUnevaluated = "unevaluated";
/// Marks the record of a step at which the run ended because of its skipped steps.
constexpr const char* kDiverged = "diverged";

/// What the trainer still has to decide after a step.
struct Moment {
  int64_t done;  // steps
  Due due;
  bool stop = false;  // by a signal
  bool saved = false;
  Verdict verdict = {};
  StepRecord record = {};
};

const OptimizerRef& prepared(const Job& job, const TrainerOptions& options) {
  const OptimizerRef& optimizer = job.trained_by();
  job.check_keeps_parameters();
  if (optimizer.loss_scale().defined() && (options.loss_scale > 0 || options.loss_scale_interval > 0)) {
    optim::LossScale scale = optimizer.counted()->loss_scale_options();
    if (options.loss_scale > 0) scale.initial = double(options.loss_scale);
    if (options.loss_scale_interval > 0) scale.interval = options.loss_scale_interval;
    optimizer.counted()->set_loss_scale(scale);
  }
  return optimizer;
}

/// Whether the ranks' GPUs are to sum gradients by copies, which they may still lack the means for.
bool asks_for_copies(Device device, const dist::World& world, std::string_view rank_exchange, int64_t zero) {
  return device.is_cuda() && rank_exchange != "communicator" && zero < 2 &&
         world.place().local_size == world.size();
}

/// One call of train(): the parts that a run consists of, and the order in which they are due.
class Trainer {
 public:
  Trainer(Job& job, const RunFolder& run, const TrainerOptions& options, int64_t first_step,
          report::Progress& progress)
      : job_(job),
        run_(run),
        options_(options),
        first_step_(first_step),
        progress_(progress),
        info_(job.info()),
        optimizer_(prepared(job, options)),
        ended_(job.begin(run)),
        step_(job, {.graph = options.graph,
                    .check_finite = options.check_finite,
                    .world = options.world,
                    .global_order = options.global_order,
                    .bucket_mb = options.bucket_mb,
                    .exchange = dist::parse_exchange(options.rank_exchange)}),
        log_(job.device(), info_, options, run, progress),
        skips_(optimizer_),
        folder_(run.checkpoints().string(), int(options.keep)) {
    result_.step = first_step;
    note_skips();
    if (options.world && options.world->size() > 1 && options.world->leads() &&
        asks_for_copies(job.device(), *options.world, options.rank_exchange, options.zero) &&
        step_.exchange() == dist::Exchange::communicator)
      report::tell(
          "tessera: the GPUs cannot sum gradients by copies, so NCCL does (--rank-exchange peer says why)\n");
  }

  TrainResult run() {
    bool over = ended_ || first_step_ >= options_.steps;
    if (first_step_ > 0) over = resume(over);
    for (int64_t step = first_step_; !over && step < options_.steps; ++step) {
      run_step(step);
      over = after_step(step + 1);
    }
    progress_.finish();
    log_.summarise(result_, result_.step - first_step_, seconds_since(begun_) - apart_seconds_);
    return result_;
  }

 private:
  void run_step(int64_t step) {
    if (options_.schedule) optimizer_.set_lr(options_.schedule->at(step));
    comm::own_status().step = step + 1;
    const uint64_t first = uint64_t(step) * uint64_t(info_.micro_batches);
    const DrawnSources drawn;
    step_([&](int micro) {
      const DrawnSources apart;  // batches are functions of their index
      draw_from(first + uint64_t(micro));
      log_.load([&] { job_.batch(first + uint64_t(micro)); });
    });
    if (step == first_step_) job_.check_keeps(drawn.all());
    if (options_.global_order || options_.world) {
      job_.advance(first + uint64_t(info_.micro_batches));
      draw_from(first + uint64_t(info_.micro_batches));
    }
    log_.stepped();
    result_.step = step + 1;
  }

  bool leads() const { return !options_.world || options_.world->leads(); }
  double limit_after_rank_zero() const {
    return options_.world ? options_.world->limit_after_rank_zero() : 0;
  }
  /// The largest value of any rank, which all call this.
  int agreed(int value) const { return options_.world ? int(options_.world->host().largest(value)) : value; }

  /// In the global order, and on several ranks in any order, a micro-batch draws by its index, whichever rank
  /// has it and whatever it draws: two ranks must not drop the same elements.
  void draw_from(uint64_t micro) const {
    constexpr uint64_t kStreams = uint64_t{1} << 20;  // of a micro-batch, more than a model has dropouts
    if (!options_.global_order && !(options_.world && options_.world->size() > 1)) return;
    for (const Rng& random : job_.random()) random.set_state({random.state().seed, micro * kStreams});
  }

  /// Does all that is due after a step. Returns whether the run ends here.
  bool after_step(int64_t done) {
    Moment now{.done = done, .due = due_after(done, options_, info_)};
    if (done == first_step_ + 1) say_kept();
    const int signal = agreed(InterruptGuard::signal_received());
    // The last step ends the run anyway, unless its evaluation would delay the end that a signal asks for.
    if (signal != 0 && (!now.due.last || now.due.evaluate)) stop(now, signal);
    if (now.due.log || now.stop || done == first_step_ + 1) {
      look(now);
      if (now.due.evaluate) evaluate(now);
      write(now);
      check_end(now);
      if (now.due.last || now.due.sample) sample(now);
      log_.restart();
    }
    if (now.verdict.save || (!now.saved && (now.due.last || now.stop || now.due.save))) {
      save(done);
      log_.restart_after_save();
    }
    return now.due.last || now.stop;
  }

  /// With sharded gradients (ZeRO 2): prints which ones the first step found to be kept whole.
  void say_kept() {
    if (const std::string names = joined(step_.kept()); !names.empty() && leads())
      progress_.say("  zero      gradients that come out of turn are whole on every rank: " + names);
  }

  void stop(Moment& now, int signal) {
    now.stop = true;
    result_.outcome = Outcome::interrupted;
    result_.signal = signal;
  }

  /// Reads loss and norm, which waits for the device; ends a run that has diverged.
  void look(Moment& now) {
    const double loss = result_.loss = step_.mean_loss();
    const optim::Optimizer* const counted = optimizer_.counted();
    const double norm = counted ? counted->grad_norm() : -1;
    skips_.look(std::isfinite(norm));
    note_skips();
    const double lr = options_.schedule ? options_.schedule->at(now.done - 1) : counted ? counted->lr() : -1;
    // The first step is eager, the second captures.
    now.record =
        log_.record(now.done, loss, lr, norm, skips_, step_.exposed_ms(), now.done > first_step_ + 2);
    for (size_t i = 0; i < info_.penalties.size(); ++i)
      now.record.values[info_.penalties[i]] = step_.mean_penalty(i);
    for (const auto& [name, value] : job_.state_values()) now.record.values[name] = value;
    if (now.due.evaluate) now.record.values[kUnevaluated] = 1;  // until it is done
    if (!now.due.log && now.stop) now.record.values["interrupted"] = 1;
    const bool diverged = skips_.fatal_row() >= options_.most_skips || (!counted && !std::isfinite(loss));
    if (diverged) now.record.values[kDiverged] = 1;
    if (diverged && (now.due.log || now.stop)) log_.write(now.record);
    if (const std::string warning = skips_.warning(now.done); !warning.empty() && leads()) {
      progress_.finish();
      report::tell(warning);
    }
    if (skips_.fatal_row() >= options_.most_skips) {
      save(now.done);  // the weights are sound: what led to them is not lost
      throw Diverged(skips_.complaint(now.done, saved_text()), __FILE__, __LINE__);
    }
    if (!counted) check_loss(now.done, loss);
  }

  /// For an optimizer that does not skip steps without a finite gradient.
  void check_loss(int64_t step, double loss) const {
    if (std::isfinite(loss)) return;
    throw Diverged("training: the loss of step " + std::to_string(step) +
                       " is not finite, and this optimizer does not skip such a step. " + saved_text() +
                       "; try a lower learning rate, or " + kFindOperator,
                   __FILE__, __LINE__);
  }

  std::string saved_text() const {
    const std::vector<int64_t> steps = folder_.steps();
    return steps.empty() ? "No checkpoint was saved (--save-every or TrainerOptions::save_every makes them)"
                         : "The newest checkpoint is " + folder_.file_of(steps.front());
  }

  void evaluate(Moment& now) {
    // An evaluation may take minutes: the state is saved before it, unless it shows that nothing is left to
    // save.
    if (std::isfinite(result_.loss) && (now.due.last || now.stop || now.due.save)) {
      log_.write(now.record);
      save(now.done);
      now.saved = true;
    }
    if (now.stop || !measure(now)) return;
    now.record.values.erase(kUnevaluated);
    for (const auto& [name, value] : result_.evaluation) now.record.values[name] = value;
    now.verdict = job_.judge(now.done, result_.evaluation);
    now.due.last |= now.verdict.stop;
  }

  /// Evaluates; all ranks take the values of rank 0. Theirs may differ in the last bit (GPUs of different
  /// models), and each decides by them whether to save and to stop. False if any was interrupted.
  bool measure(Moment& now) {
    Values values;
    apart(now, [&] { values = job_.evaluate(); });
    if (now.stop) return false;
    std::vector<double> numbers;
    for (const auto& [name, value] : values) numbers.push_back(value);
    if (options_.world && !numbers.empty()) {
      const Tensor shared = Tensor::from(numbers, {int64_t(numbers.size())});
      options_.world->host().broadcast(shared, 0);
      numbers = shared.to_vector<double>();
    }
    size_t i = 0;
    for (auto& [name, value] : values) value = numbers[i++];
    result_.evaluation = std::move(values);
    return true;
  }

  void write(const Moment& now) {
    const bool as_saved = now.saved && now.record.values.contains(kUnevaluated);
    if ((now.due.log || now.stop) && !as_saved) log_.write(now.record);
    if (!now.due.log) return;
    StepRecord shown = now.record;
    shown.values.erase(kUnevaluated);
    log_.write_events(shown);
  }

  void check_end(const Moment& now) {
    // One bad batch at the end is skipped like any other; with a second sign it is the weights.
    const bool lost = skips_.row() > 1 || std::ranges::any_of(result_.evaluation, [](const auto& value) {
                        return !std::isfinite(value.second);
                      });
    if (!now.due.last || now.stop || std::isfinite(result_.loss) || !lost) return;
    throw Diverged("training: the loss of the last step (" + std::to_string(now.done) +
                       ") is not finite, the run has diverged; try a lower learning rate, or " +
                       kFindOperator,
                   __FILE__, __LINE__);
  }

  void sample(Moment& now) {
    if (!info_.samples || now.stop) return;
    const auto sample_alone = [&] {
      if (leads()) job_.sample(now.done, run_);
    };
    apart(now, sample_alone, limit_after_rank_zero());
  }

  /// f() without a tape, which is no part of the steps' time and may be interrupted. `limit`: seconds for
  /// which a rank waits for the others'.
  template <class F>
  void apart(Moment& now, F&& f, double limit = comm::call_timeout()) {
    const Clock::time_point start = Clock::now();
    const NoTape off;
    try {
      f();
    } catch (const Interrupted& interrupted) {
      stop(now, interrupted.signal());
    }
    const comm::TimeoutScope scope(limit);
    if (const int signal = agreed(now.stop ? result_.signal : 0)) stop(now, signal);
    apart_seconds_ += seconds_since(start);
  }

  void save(int64_t step) {
    job_.device().synchronize();
    // Steps are looked at where they are logged; a checkpoint between two of those must not hold NaN either.
    if (!optimizer_.counted()) check_loss(step, step_.mean_loss());
    const bool again = std::exchange(saved_, step) == step;
    std::optional<optim::WholeState> whole;
    if (!again && options_.world && optimizer_.counted())
      whole.emplace(*optimizer_.counted(), options_.world->host());
    if (leads()) {  // all ranks have the same state, or parts of one
      if (again)    // before the evaluation that made it one to be kept
        folder_.prune(step, job_.spared());
      else
        folder_.save(step, job_.checkpoint(step), job_.spared());
      log_.flush_events();
    }
    const comm::TimeoutScope scope(limit_after_rank_zero());
    if (options_.world) options_.world->host().barrier();
  }

  void note_skips() {
    result_.skipped = skips_.skipped();
    if (skips_.scales()) result_.loss_scale = skips_.loss_scale();
  }

  /// Does what a run that was stopped or killed had left of its last step: a missing evaluation and sample. A
  /// run that is resumed after its last step is evaluated again in any case: its result includes the
  /// evaluation. Returns whether the run ends here.
  bool resume(bool over) {
    Moment now{.done = first_step_, .due = {}};
    over |= catch_up(now, over);
    log_.restart();
    return over || now.stop;
  }

  bool catch_up(Moment& now, bool over) {
    const std::vector<StepRecord> records = run_.metrics();
    const std::vector<Sample> samples = run_.samples();
    StepRecord record{first_step_, {}};
    if (!records.empty() && records.back().step == first_step_) record = records.back();
    const auto is_here = [&](const Sample& sample) { return sample.step == first_step_; };
    // Both are agreed on after all ranks have read what rank 0 will write to.
    const bool pending = agreed(record.values.erase(kUnevaluated) > 0) != 0;
    const bool sampled = agreed(std::ranges::any_of(samples, is_here)) != 0;
    if (const auto loss = record.values.find("loss"); loss != record.values.end())
      result_.loss = loss->second;
    if (over && record.values.contains(kDiverged))
      throw Diverged("training: the run has diverged, up to its last step (" + std::to_string(first_step_) +
                         "); try a lower learning rate, or a larger --steps, which goes on from the weights "
                         "before the steps that were skipped",
                     __FILE__, __LINE__);
    if (info_.evaluates && (pending || over) && !measure(now)) return over;
    if (info_.evaluates && pending) {
      for (const auto& [name, value] : result_.evaluation) record.values[name] = value;
      if (leads()) run_.replace_last(record);
      log_.write_events({first_step_, result_.evaluation});
      const Verdict verdict = job_.judge(first_step_, result_.evaluation);
      if (verdict.save) save(first_step_);
      over |= verdict.stop;
    }
    if (leads()) folder_.prune(first_step_, job_.spared());  // it may have ended between a save and this
    const bool due = over || (options_.sample_every > 0 && first_step_ % options_.sample_every == 0);
    if (due && !sampled) sample(now);
    return over;
  }

  Job& job_;
  const RunFolder& run_;
  const TrainerOptions& options_;
  const int64_t first_step_;
  report::Progress& progress_;
  const JobInfo info_;
  const OptimizerRef& optimizer_;
  const bool ended_;
  Step step_;
  StepLog log_;
  SkipWatch skips_;
  const io::CheckpointFolder folder_;
  const Clock::time_point begun_ = Clock::now();
  double apart_seconds_ = 0;      // in evaluations and samples
  std::optional<int64_t> saved_;  // the step of the newest checkpoint of this process
  TrainResult result_;
};

}  // namespace

double usual_bucket_mb(Device device, const dist::World& world, std::string_view rank_exchange,
                       int64_t zero) {
  // Gradients that are spread always travel in buckets.
  const bool one_sum = device.is_cuda() && zero < 2 && !asks_for_copies(device, world, rank_exchange, zero);
  return one_sum ? 0 : TrainerOptions().bucket_mb;
}

SettingList TrainerOptions::list() {
  SettingList list(Kept::option);
  list.group("Run");
  constexpr int64_t kMost = int64_t{1} << 30;
  list.add("graph", graph, "Run the step as one captured CUDA graph (GPU): on or off").as_on_off();
  list.add("log_every", log_every, "Steps between log entries").range(int64_t{1}, kMost);
  list.add("eval_every", eval_every, "Steps between evaluations; 0: only at the end")
      .range(int64_t{0}, kMost);
  list.add("save_every", save_every, "Steps between checkpoints; 0: only at the end")
      .range(int64_t{0}, kMost);
  list.add("keep", keep, "Number of checkpoints to keep").range(int64_t{1}, int64_t{1} << 20);
  list.add("loss_scale", loss_scale,
           "Initial loss scale in f16, a power of two; a step that overflows halves it")
      .range(int64_t{1}, kMost)
      .unset_is(0)
      .of_powers_of_two();
  list.add("loss_scale_interval", loss_scale_interval,
           "Consecutive steps without overflow after which the f16 loss scale doubles")
      .range(int64_t{1}, kMost)
      .unset_is(0);
  list.add("bucket_mb", bucket_mb,
           "MiB per all-reduce during the backward pass; 0: one after it, the default with NCCL")
      .range(0.0, 65536.0)
      .shown_as(fmt::format("{:g}", TrainerOptions().bucket_mb))
      .absent_means(-1.0);
  list.add("rank_exchange", rank_exchange,
           "Gradient sums of GPUs: NCCL (communicator), copies (peer); auto: peer if it can")
      .one_of({"auto", "communicator", "peer"})
      .absent_means("auto");
  list.add("zero", zero, "ZeRO stage: 0: off; 1: shard moments and master weights; 2: shard gradients, too")
      .range(int64_t{0}, int64_t{2})
      .absent_means(0);
  SettingList once(Kept::never);
  once.group("Run");
  once.add("check_finite", check_finite,
           "For this call: stop at the first NaN or infinity, name operator and line; slow");
  list.append(once);
  return list;
}

void TrainerOptions::validate() const {
  check_values(TrainerOptions(*this).list(), "train");
  // Those that a program sets, and no flag.
  const std::tuple<const char*, int64_t, int64_t> all[] = {
      {"steps", steps, 0}, {"sample_every", sample_every, 0}, {"most_skips", most_skips, 1}};
  for (const auto& [name, value, least] : all)
    check(value >= least, "train: ", name, " is ", value, "; expected ", least, " or more");
}

TrainResult train(Job& job, const RunFolder& run, const TrainerOptions& options, int64_t first_step,
                  report::Progress& progress) {
  options.validate();
  const InterruptGuard interrupts;
  return Trainer(job, run, options, first_step, progress).run();
}

TrainResult train(Job& job, const RunFolder& run, const TrainerOptions& options, report::Progress& progress) {
  options.validate();
  const io::CheckpointFolder checkpoints(run.checkpoints().string(), int(options.keep));
  std::optional<FolderLock> lock;
  if (!options.world || options.world->leads()) {  // the rank that writes
    lock.emplace(run.lock());
    checkpoints.check_writable();
    if (std::error_code code; !std::filesystem::exists(run.path() / "run.json", code))
      run.write_settings({{"job", job.settings_json()}, {"build", report::build_facts()}});
  }
  const auto newest = checkpoints.latest();
  for (const std::string& warning : newest.warnings) report::tell("tessera: warning: " + warning + "\n");
  const int64_t first_step = newest.step ? job.restore(newest.file) : 0;
  run.truncate_metrics(first_step);
  return train(job, run, options, first_step, progress);
}

}  // namespace tessera::train

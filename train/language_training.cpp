#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "autograd/tape.h"
#include "io/checkpoint_folder.h"
#include "io/file.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "train/language_job.h"
#include "train/language_plan.h"

namespace tessera::train {

using nlohmann::json;

namespace {

/// The order of the training windows has a generator of its own: how many numbers the first weights took
/// must not decide it.
constexpr uint64_t kOrderSeed = 0x0D4E'5EED'0000'0001u;

datasets::Loader<datasets::TokenWindows> make_loader(const LanguageJob& job,
                                                     const datasets::TokenWindows& windows, Device device) {
  Rng order(job.seed ^ kOrderSeed);
  return datasets::Loader(
      windows, {.size = job.batch, .shuffle = &order, .drop_last = true, .workers = 1, .device = device});
}

}  // namespace

std::vector<int64_t> sample_prompt(const LanguageData& data, const LanguageWatch& watch) {
  const io::Tokenizer& tokenizer = data.tokenizer();
  if (watch.sample_prompt.empty()) {
    if (tokenizer.special().eos) return {*tokenizer.special().eos};
    return read_tokens(data.train(), 0, 1);
  }
  const std::vector<int32_t> ids = tokenizer.encode(watch.sample_prompt).ids;
  check(!ids.empty(), "train: the prompt of samples has no tokens");
  check(int64_t(ids.size()) <= data.length(), "train: the prompt of samples has ", ids.size(),
        " tokens; sequences have ", data.length(), ": give a shorter --sample-prompt");
  return {ids.begin(), ids.end()};
}

datasets::LoaderState first_batch(const LanguageJob& job) {
  Rng order(job.seed ^ kOrderSeed);
  const RandomStream stream = order.reserve(Device::cpu());
  return {.batch = 0, .seed = stream.seed, .stream = stream.offset()};
}

int64_t evaluation_stride(const LanguageJob& job, const LanguageWatch& watch) {
  check(watch.eval_stride >= 0 && watch.eval_stride <= job.length, "train: --eval-stride ", watch.eval_stride,
        " is more than the --length of ", job.length);
  return watch.eval_stride > 0 ? watch.eval_stride : std::max<int64_t>(1, job.length / 2);
}

void BestEvaluation::add(int64_t at, double loss) {
  evaluations += 1, since += 1;
  if (std::isfinite(loss) && (step == 0 || loss < nll)) step = at, nll = loss, since = 0;
}

BestEvaluation best_evaluation(const RunFolder& run) {
  BestEvaluation best;
  for (const StepRecord& record : run.metrics())
    if (const auto nll = record.values.find("eval_nll"); nll != record.values.end())
      best.add(record.step, nll->second);
  return best;
}

void check_batch(const LanguageJob& job, const LanguageData& data) {
  check(data.train().size() >= job.batch, "train: ", data.train().tokens(), " tokens are ",
        data.train().size(), " windows of ", job.length, "; a batch takes ", job.batch,
        ": give a smaller --batch or --length, or more text");
}

TrainResult train_language(LanguageSession& session, const LanguageData& data, const RunFolder& run,
                           const TrainerOptions& given, const LanguageWatch& watch, const HeldOut& held_out,
                           const NgramBaseline& baseline, int64_t first_step,
                           const datasets::LoaderState& state, Progress& progress) {
  const LanguageJob& job = session.job();
  check_batch(job, data);
  auto loader = make_loader(job, data.train(), session.device());
  loader.set_state(state);
  io::CheckpointFolder folder(run.checkpoints().string(), given.keep);
  TrainerOptions options = given;
  options.accumulate = int(job.accumulate);
  options.sample_every = watch.sample_every;
  options.graph = given.graph && !job.documents;  // lengths differ from batch to batch

  Task task;
  task.load = [&] { session.load(loader.next()); };
  task.loss = [&] { return session.loss(); };
  task.updated = [&] { session.updated(); };
  // A window of the evaluation has as many places as a training sequence, and the last place's target.
  const int64_t stride = evaluation_stride(job, watch);
  std::vector<PerplexityWindow> windows;
  for (const HeldOut::Stretch& stretch : held_out.stretches)
    std::ranges::copy(sliding_windows(stretch.tokens, stretch.first, job.length + 1, stride),
                      std::back_inserter(windows));
  const double tokens_per_byte =
      double(held_out.targets) / double(std::max<uint64_t>(1, target_bytes(data, held_out)));
  if (!windows.empty())
    task.evaluate = [&, tokens_per_byte] {
      const double nll = session.evaluate(windows).nats;
      const auto bits = [&](double nats) { return nats * tokens_per_byte / std::log(2.0); };
      std::map<std::string, double> values = {
          {"eval_nll", nll}, {"eval_perplexity", std::exp(nll)}, {"eval_bits_per_byte", bits(nll)}};
      if (baseline.order > 0) {
        values["ngram_nll"] = baseline.nll;
        values["ngram_bits_per_byte"] = bits(baseline.nll);
        values["eval_gap"] = nll - baseline.nll;
      }
      return values;
    };
  BestEvaluation best = best_evaluation(run);
  const bool keeps_best = watch.exported == "best";
  // Stopped after it had ended early: what is left to do is what a run does at its end.
  if (watch.patience > 0 && best.since >= watch.patience) options.steps = first_step;
  task.judge = [&](int64_t step, const std::map<std::string, double>& values) -> Task::Verdict {
    best.add(step, values.at("eval_nll"));
    return {.save = keeps_best && best.since == 0,
            .stop = watch.patience > 0 && best.since >= watch.patience};
  };
  std::optional<int64_t> saved;
  task.save = [&](int64_t step) {
    const auto spared = keeps_best ? std::optional(best.step) : std::nullopt;
    if (saved == step)  // before the evaluation that made it the best one
      folder.prune(step, spared);
    else
      folder.save(step, session.checkpoint(step, loader.state()), spared);
    saved = step;
  };
  if (watch.sample_tokens > 0) {
    const std::vector<int64_t> prompt = sample_prompt(data, watch);
    // Not longer than a training sequence: the tables that a captured step reads stay as they are.
    const int64_t room = job.length - int64_t(prompt.size()) + 1;
    task.sample = [&, prompt, room](int64_t step) {
      const auto text = session.generate(prompt, {.most_tokens = std::min(watch.sample_tokens, room),
                                                  .sampling = {.temperature = 0.8, .top_k = 200},
                                                  .seed = job.seed ^ uint64_t(step)});
      std::vector<int32_t> ids(prompt.begin(), prompt.end());
      // A model may have more rows than the tokenizer has tokens.
      for (const int64_t token : text)
        if (data.tokenizer().has(int32_t(token))) ids.push_back(int32_t(token));
      run.append(Sample{step, data.tokenizer().decode(ids)});
    };
  }
  const LanguageFlops flops = count_flops(job.model, job.batch * job.accumulate, job.length);
  task.tokens_per_step = double(job.tokens_per_step());
  task.flops_per_step = flops.step();
  return run_training(task, session.optimizer(), run, session.device(), options, first_step, progress);
}

int64_t steps_within(const LanguageJob& job, Device device, double seconds) {
  using Clock = std::chrono::steady_clock;
  LanguageSession session(job, device);
  datasets::TokenBatch batch;
  batch.inputs = Tensor::zeros({job.batch, job.length}, DType::i64, Device::cpu());
  batch.targets = batch.inputs.clone();
  batch.lengths = Tensor::from(std::vector<int32_t>{0, int32_t(job.batch * job.length)}, {2});
  session.load(batch);
  session.optimizer().zero_grad();
  const auto step = [&] {
    check_interrupt();
    for (int64_t micro = 0; micro < job.accumulate; ++micro) {
      Tape tape({.loss_scale = session.optimizer().loss_scale()});
      tape.backward(session.loss());
    }
    session.optimizer().step();
    session.updated();
    session.optimizer().zero_grad();
  };
  const Clock::time_point begun = Clock::now();
  const auto passed = [&](Clock::time_point since) {
    device.synchronize();
    return std::chrono::duration<double>(Clock::now() - since).count();
  };
  step();
  const double first = passed(begun);
  // A hundredth of the time tells the pace; the first step fills caches.
  const Clock::time_point warm = Clock::now();
  int64_t timed = 0;
  do {
    step();
    timed += 1;
  } while (passed(warm) < std::min(0.01 * seconds, 5.0) && timed < 100);
  const double each = passed(warm) / double(timed);
  // A tenth is left for evaluations, samples and saves.
  return std::clamp(int64_t(0.9 * (seconds - first) / each), int64_t{1}, LanguageJob::kLargest);
}

void export_language(LanguageSession& session, const LanguageData& data, const std::string& tokenizer,
                     const std::string& folder) {
  io::AtomicFolder files(folder, io::AtomicFolder::Existing::replace);
  session.save(files.path());
  copy_tokenizer(tokenizer, files.path());
  const io::SpecialTokens& special = data.tokenizer().special();
  const std::string path = files.path() + "/config.json";
  json config = json::parse(io::read_file(path, 1 << 20));
  if (special.eos) config["eos_token_id"] = *special.eos;
  if (special.bos || special.eos) config["bos_token_id"] = special.bos ? *special.bos : *special.eos;
  io::write_file(path, config.dump(2) + "\n");
  files.publish();
}

}  // namespace tessera::train

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "autograd/tape.h"
#include "io/checkpoint_folder.h"
#include "io/file.h"
#include "runtime/error.h"
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

/// Mean loss of the first windows of the validation part, nats a token.
double evaluate_language(LanguageSession& session, const LanguageData& data, int64_t windows) {
  const int64_t size = session.job().batch;
  double sum = 0;
  int64_t counted = 0;
  std::vector<int64_t> indices;
  for (int64_t first = 0; first < windows; first += size) {
    indices.clear();
    for (int64_t i = first; i < std::min(first + size, windows); ++i) indices.push_back(i);
    const datasets::TokenBatch batch = data.validation()->batch(indices);
    int64_t targets = batch.targets.count();
    if (data.documents())
      for (const int64_t target : batch.targets.to_vector<int64_t>()) targets -= target < 0;
    if (targets > 0) sum += session.evaluate(batch) * double(targets);
    counted += targets;
  }
  return sum / double(std::max<int64_t>(1, counted));
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

int64_t evaluation_windows(const LanguageData& data, const LanguageWatch& watch) {
  if (!data.validation()) return 0;
  return std::clamp(watch.eval_tokens / data.length(), int64_t{1}, data.validation()->size());
}

TrainResult train_language(LanguageSession& session, const LanguageData& data, const RunFolder& run,
                           const TrainerOptions& given, const LanguageWatch& watch,
                           const NgramBaseline& baseline, int64_t first_step,
                           const datasets::LoaderState& state, Progress& progress) {
  const LanguageJob& job = session.job();
  check(data.train().size() >= job.batch, "train: ", data.train().tokens(), " tokens are ",
        data.train().size(), " windows of ", job.length, "; a batch takes ", job.batch);
  auto loader = make_loader(job, data.train(), session.device());
  loader.set_state(state);
  io::CheckpointFolder folder(run.checkpoints().string(), given.keep);
  TrainerOptions options = given;
  options.accumulate = int(job.accumulate);
  options.sample_every = watch.sample_every;
  options.graph = given.graph && !job.documents;  // lengths differ from batch to batch

  Task task;
  task.load = [&] {
    const double before = loader.stats().wait_seconds;
    session.load(loader.next());
    return loader.stats().wait_seconds - before;
  };
  task.loss = [&] { return session.loss(); };
  const int64_t windows = evaluation_windows(data, watch);
  const double tokens_per_byte =
      windows > 0
          ? double(windows * job.length) / double(std::max<uint64_t>(1, validation_bytes(data, windows)))
          : 0;
  if (windows > 0)
    task.evaluate = [&, tokens_per_byte] {
      const double nll = evaluate_language(session, data, windows);
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
  task.save = [&](int64_t step) { folder.save(step, session.checkpoint(step, loader.state())); };
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
    for (int64_t micro = 0; micro < job.accumulate; ++micro) {
      Tape tape;
      tape.backward(session.loss());
    }
    session.optimizer().step();
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

void export_language(const LanguageSession& session, const LanguageData& data, const std::string& tokenizer,
                     const std::string& folder) {
  namespace fs = std::filesystem;
  fs::remove_all(folder);
  session.save(folder);
  copy_tokenizer(tokenizer, folder);
  const io::SpecialTokens& special = data.tokenizer().special();
  const std::string path = folder + "/config.json";
  json config = json::parse(io::read_file(path, 1 << 20));
  if (special.eos) config["eos_token_id"] = *special.eos;
  if (special.bos || special.eos) config["bos_token_id"] = special.bos ? *special.bos : *special.eos;
  io::write_file(path, config.dump(2) + "\n");
}

}  // namespace tessera::train

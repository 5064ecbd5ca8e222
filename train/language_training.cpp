#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "plan/plan.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "train/language_job.h"
#include "train/loader_share.h"
#include "train/random_purpose.h"
#include "train/step.h"

namespace tessera::train {

using nlohmann::json;

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

int64_t evaluation_stride(const LanguageSettings& settings, const LanguageWatch& watch) {
  check(watch.eval_stride >= 0 && watch.eval_stride <= settings.length, "train: --eval-stride ",
        watch.eval_stride, " is more than the --length of ", settings.length);
  return watch.eval_stride > 0 ? watch.eval_stride : std::max<int64_t>(1, settings.length / 2);
}

void BestEvaluation::add(int64_t at, double loss) {
  evaluations += 1, since += 1;
  if (std::isfinite(loss) && (step == 0 || loss < nll)) step = at, nll = loss, since = 0;
}

BestEvaluation best_evaluation(const RunFolder& run, int64_t last) {
  BestEvaluation best;
  for (const StepRecord& record : run.metrics())
    if (const auto nll = record.values.find("eval_nll"); nll != record.values.end() && record.step <= last)
      best.add(record.step, nll->second);
  return best;
}

void LanguageJob::set_data(const LanguageData& data, const LanguageWatch& watch, HeldOut held_out,
                           const NgramBaseline& baseline) {
  const LanguageSettings& s = settings_;
  check(data.train().size() >= s.batch, "train: ", data.train().tokens(), " tokens are ", data.train().size(),
        " windows of ", s.length, "; a batch takes ", s.batch,
        ": give a smaller --batch-size or --length, or more text");
  data_ = &data, watch_ = watch, held_out_ = std::move(held_out), baseline_ = baseline;
  Rng order(seed_for(RandomPurpose::sequence_order, s.seed));
  loader_.emplace(data.train(), loader_options(order, {}));
  position_ = loader_->state();
  // A window of the evaluation has as many places as a training sequence, and the last place's target.
  const int64_t stride = evaluation_stride(s, watch);
  windows_.clear();
  for (const HeldOut::Stretch& stretch : held_out_.stretches)
    std::ranges::copy(eval::sliding_windows(stretch.tokens, stretch.first, s.length + 1, stride),
                      std::back_inserter(windows_));
  tokens_per_byte_ =
      double(held_out_.targets) / double(std::max<size_t>(1, target_text(data, held_out_).size()));
  if (watch.sample_tokens > 0) prompt_ = sample_prompt(data, watch);
}

datasets::LoaderOptions LanguageJob::loader_options(const Rng& order,
                                                    const datasets::LoaderShare& share) const {
  return {.size = settings_.batch,
          .shuffle = &order,
          .drop_last = true,
          .workers = 1,
          .order = settings_.data_order,
          .share = share,
          .device = device()};
}

JobInfo LanguageJob::info() const {
  const LanguageSettings& s = settings_;
  return {
      .evaluates = !windows_.empty(),
      .samples = data_ && watch_.sample_tokens > 0,
      // Lengths of documents differ from batch to batch; the host decides when soft_dynamic fits its scale.
      .fixed_shapes = !s.documents && s.sparse24.method != "soft_dynamic",
      .micro_batches = int(s.accumulate),
      .tokens_per_step = double(s.tokens_per_step()),
      .flops_per_step = plan::count_flops(s.model, s.batch * s.accumulate, s.length, s.forms()).step(),
      .penalties = s.penalties()};
}

bool LanguageJob::begin(const RunFolder& run) {
  best_ = best_evaluation(run);
  // Stopped after it had ended early: what is left to do is what a run does at its end.
  return has_ended();
}

void LanguageJob::divide(const dist::Share& share) {
  if (!loader_) return;  // batches come by load()
  Rng order(seed_for(RandomPurpose::sequence_order, settings_.seed));
  loader_.emplace(data_->train(), loader_options(order, loader_share(share, settings_.accumulate)));
}

void LanguageJob::advance(uint64_t index) {
  position_.batch = index;
}

void LanguageJob::batch(uint64_t index) {
  check(loader_.has_value(), settings_.family(), ": there is nothing to train on; call set_data()");
  position_.batch = index;
  set_sparsity(int64_t(index) / settings_.accumulate);
  loader_->set_state(position_);
  load(loader_->next());
  position_ = loader_->state();
}

/// What of the model is sparse in this step (from 0), by which masks.
void LanguageJob::set_sparsity(int64_t step) {
  const bool active = settings_.sparse24.active_at(step, settings_.steps);
  const bool refreshes = settings_.weights24.refreshes_at(step, settings_.sparse24.dense_first);
  if (settings_.sparse24.on()) Sparse24Settings::set_active(model_, active);
  nn::for_each_weights24(model_, [&](const std::string&, nn::Linear& layer) {
    nn::weights24_of(layer)->active = active;
    if (active && refreshes && refreshed_ != step) nn::refresh_weights24(layer);
  });
  if (active && refreshes) refreshed_ = step;
}

Values LanguageJob::state_values() {
  double flips = 0, elements = 0;
  nn::for_each_weights24(model_, [&](const std::string&, nn::Linear& layer) {
    const nn::Weights24& form = *nn::weights24_of(layer);
    if (!form.active) return;
    flips += form.flips.item<double>(), elements += double(layer.weight.count());
  });
  return elements > 0 ? Values{{"flip_rate", flips / elements}} : Values();
}

Values LanguageJob::evaluate() {
  const double nll = measure(windows_).nats;
  const auto bits = [&](double nats) { return nats * tokens_per_byte_ / std::log(2.0); };
  Values values = {{"eval_nll", nll}, {"eval_perplexity", std::exp(nll)}, {"eval_bits_per_byte", bits(nll)}};
  if (baseline_.order > 0) {
    values["ngram_nll"] = baseline_.nll;
    values["ngram_bits_per_byte"] = bits(baseline_.nll);
    values["eval_gap"] = nll - baseline_.nll;
  }
  if (settings_.sparse24.on()) add_sparsity(values);
  return values;
}

Verdict LanguageJob::judge(int64_t step, const Values& values) {
  best_.add(step, values.at("eval_nll"));
  return {.save = keeps_best() && best_.since == 0, .stop = has_ended()};
}

std::optional<int64_t> LanguageJob::spared() const {
  return keeps_best() ? std::optional(best_.step) : std::nullopt;
}

void LanguageJob::sample(int64_t step, const RunFolder& run) {
  // Not longer than a training sequence: the tables that a captured step reads stay as they are.
  const int64_t room = settings_.length - int64_t(prompt_.size()) + 1;
  const auto text = generate(prompt_, {.most_tokens = std::min(watch_.sample_tokens, room),
                                       .sampling = {.temperature = 0.8, .top_k = 200},
                                       .seed = settings_.seed ^ uint64_t(step)});
  std::vector<int32_t> ids(prompt_.begin(), prompt_.end());
  // A model may have more rows than the tokenizer has tokens.
  for (const int64_t token : text)
    if (data_->tokenizer().has(int32_t(token))) ids.push_back(int32_t(token));
  run.append(Sample{step, data_->tokenizer().decode(ids)});
}

std::vector<int64_t TrainingSettings::*> periods_of(const LanguageSettings& settings) {
  std::vector<int64_t TrainingSettings::*> periods;
  if (settings.optimizer == "galore") periods = {&TrainingSettings::galore_every};
  if (settings.optimizer == "loro")
    periods = {&TrainingSettings::loro_every, &TrainingSettings::refactor_every};
  std::erase_if(periods, [&](const auto period) { return settings.*period == 0; });
  return periods;
}

namespace {

/// Seconds per step, timed for some `seconds`; the first one fills caches and is not counted.
double timed_step(const LanguageSettings& settings, Device device, double seconds) {
  using Clock = std::chrono::steady_clock;
  LanguageJob job(settings, device);
  datasets::TokenBatch batch;
  batch.inputs = Tensor::zeros({settings.batch, settings.length}, DType::i64, Device::cpu());
  batch.targets = batch.inputs.clone();
  std::vector<int32_t> ends;  // of documents as long as the sequences
  for (int64_t row = 0; row <= settings.batch; ++row) ends.push_back(int32_t(row * settings.length));
  batch.lengths = Tensor::from(ends, {settings.batch + 1});
  job.load(batch);
  Step step(job, {.graph = false});
  check_interrupt();
  step();
  device.synchronize();
  const Clock::time_point warm = Clock::now();
  double passed = 0;
  int64_t timed = 0;
  do {
    check_interrupt();
    step();
    device.synchronize();
    passed = std::chrono::duration<double>(Clock::now() - warm).count();
    timed += 1;
  } while (passed < seconds && timed < 100);
  return passed / double(timed);
}

}  // namespace

int64_t steps_within(const LanguageSettings& settings, Device device, double seconds) {
  const auto begun = std::chrono::steady_clock::now();
  // What the optimizer does every few steps is timed in steps that all do it.
  LanguageSettings plain = settings;
  const auto periods = periods_of(settings);
  for (const auto period : periods) plain.*period = LanguageSettings::kLargest;
  const double usual = timed_step(plain, device, std::min(0.01 * seconds, 5.0));  // which tells the pace
  double each = usual;
  for (const auto period : periods) {
    LanguageSettings often = plain;
    often.*period = 1;
    each += std::max(0.0, timed_step(often, device, 0) - usual) / double(settings.*period);
  }
  const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  // A tenth is left for evaluations, samples and saves.
  return std::clamp(int64_t(0.9 * (seconds - spent) / each), int64_t{1}, LanguageSettings::kLargest);
}

namespace {

/// Puts token ids of the end and the beginning into a config.json or generation_config.json. End tokens that
/// it has stay, and `eos` comes first if it is not among them; a beginning stays.
void add_token_ids(json& config, const io::SpecialTokens& special) {
  const auto missing = [&](const char* key) { return !config.contains(key) || config[key].is_null(); };
  if (special.eos) {
    json ends = missing("eos_token_id")             ? json::array()
                : config["eos_token_id"].is_array() ? config["eos_token_id"]
                                                    : json::array({config["eos_token_id"]});
    if (std::ranges::find(ends, json(*special.eos)) == ends.end()) {
      ends.insert(ends.begin(), *special.eos);
      config["eos_token_id"] = ends.size() == 1 ? ends[0] : ends;
    }
  }
  if (missing("bos_token_id") && (special.bos || special.eos))
    config["bos_token_id"] = special.bos ? *special.bos : *special.eos;
}

/// The JSON of a file; null if it is not there.
json read_json(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return nullptr;
  return json::parse(io::read_file(path, 1 << 20));
}

}  // namespace

void export_language(LanguageJob& job, const LanguageData& data, const std::string& tokenizer,
                     const std::string& folder) {
  io::AtomicFolder files(folder, io::AtomicFolder::Existing::replace);
  job.save(files.path());
  copy_tokenizer(tokenizer, files.path());
  const io::SpecialTokens& special = data.tokenizer().special();
  const std::string base = tokenizer + "/" + kBaseFolder;  // keep_base_configs
  json config = read_json(files.path() + "/config.json"),
       generation = read_json(base + "/generation_config.json");
  if (const json of_base = read_json(base + "/config.json"); of_base.is_object())
    for (const char* const key : {"bos_token_id", "eos_token_id"})
      if (of_base.contains(key)) config[key] = of_base[key];
  add_token_ids(config, special);
  io::write_file(files.path() + "/config.json", config.dump(2) + "\n");
  if (generation.is_object()) {
    add_token_ids(generation, special);
    io::write_file(files.path() + "/generation_config.json", generation.dump(2) + "\n");
  }
  files.publish();
}

}  // namespace tessera::train

#include "bench/layers_bench.h"

#include <fmt/format.h>

#include <algorithm>

#include "bench/bert_bench.h"
#include "eval/bert_batch.h"
#include "io/file.h"
#include "io/tokenizer/tokenizer.h"
#include "nn/observe.h"
#include "pretrained/load.h"
#include "report/facts.h"
#include "runtime/f32_math.h"
#include "runtime/interrupt.h"
#include "train/bert_model.h"
#include "train/glue_data.h"
#include "train/glue_job.h"
#include "train/random_purpose.h"

namespace tessera::bench {

namespace {

/// The batch of a task, or the synthetic one, with the model that it is for.
struct Work {
  std::string task;
  models::BertConfig config;
  datasets::GlueBatch batch;
};

/// Of the model directory, with the head of the task.
models::BertConfig folder_config(const LayersBenchOptions& options, datasets::GlueTask task) {
  const std::string file = options.folder + "/config.json";
  models::BertConfig config = train::bert_config(file, io::read_file(file, int64_t{1} << 24), task);
  const auto name = [](models::BertFamily family) {
    return family == models::BertFamily::bert ? "bert" : "roberta";
  };
  check(config.family == options.model.family, "bench layers: ", options.folder, " holds a ",
        name(config.family), "; use `tessera bench layers ", name(config.family), "`");
  return config;
}

void check_length(const LayersBenchOptions& options, const models::BertConfig& config) {
  check(options.max_length <= config.longest(), "--max-length is ", options.max_length,
        "; the model has positions for ", config.longest());
}

Work synthetic_work(const LayersBenchOptions& options) {
  Work work{.task = "synthetic", .config = options.model, .batch = {}};
  if (!options.folder.empty()) work.config = folder_config(options, datasets::GlueTask::sst2);
  check_length(options, work.config);
  work.config.head = models::BertHead::classify;
  work.batch = fixed_batch(work.config, options.batch, options.max_length);
  return work;
}

/// The first batch of `train bert` with that seed.
Work task_work(const LayersBenchOptions& options, const std::string& name) {
  const datasets::GlueInfo& info = datasets::parse_glue_task(name);
  Work work{.task = info.name, .config = folder_config(options, info.task), .batch = {}};
  check_length(options, work.config);
  const train::GlueSet set = train::read_glue(info.task, options.data, io::Tokenizer::load(options.folder),
                                              options.max_length, false);
  check(set.train.size() >= options.batch, "bench layers: ", info.name, " has ", set.train.size(),
        " examples, a batch takes ", options.batch, "; give a smaller --batch-size");
  Rng order(train::seed_for(train::RandomPurpose::text_order, options.seed));
  datasets::Loader<datasets::GlueItems> loader(
      set.train,
      {.size = options.batch, .shuffle = &order, .drop_last = true, .workers = 1, .device = Device::cpu()});
  work.batch = loader.next();
  return work;
}

/// The original and the modified model of one task: one set of weights, whose form changes.
class Subject {
 public:
  Subject(const LayersBenchOptions& options, const Work& work)
      : options_(options),
        rng_(train::seed_for(train::RandomPurpose::initialisation, options.seed)),
        rows_(train::seed_for(train::RandomPurpose::row_choice, options.seed)),
        model_(make_model(options, work, rng_)),
        batch_(eval::bert_batch(work.batch, model_.config, 0, options.device)),
        targets_(work.batch.labels.to(options.device)) {
    train::use_for(train::RandomPurpose::dropout, options.seed, rng_);
    nn::set_training(model_, true);
    if (options.slice.slices()) slice(), dense();  // throws before anything is timed
  }
  void slice() { options_.slice.apply(pretrained::linear_modules(model_), rows_); }
  void dense() {
    pretrained::set_form(pretrained::linear_modules(model_), options_.slice.layers, nn::Dense{});
  }
  PassTimes time(PassTimer& timer) {
    const Rng::State dropout = rng_.state(), rows = rows_.state();
    const F32MathScope math(options_.precision.math);
    std::optional<nn::Observe> unfused;
    if (options_.unfused) unfused.emplace(model_, nn::Observer{});
    for (const nn::NamedParameter& parameter : nn::parameters(model_)) zero_grad(parameter.tensor);
    PassTimes times = timer([&] { return model_.loss(batch_, targets_); });
    rng_.set_state(dropout), rows_.set_state(rows);
    return times;
  }
  int64_t tokens() const { return batch_.tokens.count(); }

 private:
  static models::Bert make_model(const LayersBenchOptions& options, const Work& work, const Rng& rng) {
    models::BertConfig config = work.config;
    config.dtype = options.precision.dtype;
    return options.folder.empty() ? models::Bert(config, rng, options.device)
                                  : train::load_bert_as(config, options.folder, rng, options.device);
  }

  const LayersBenchOptions& options_;
  Rng rng_, rows_;
  models::Bert model_;
  models::BertBatch batch_;
  Tensor targets_;
};

double length_of(const PassTimes& times) {
  double sum = 0;
  for (const auto* ops : {&times.forward, &times.backward})
    for (const TimedOp& op : *ops) sum += op.ms;
  return sum;
}

LayersComparison compare_models(const LayersBenchOptions& options, const Work& work) {
  Subject subject(options, work);
  const bool both = options.slice.slices();
  PassTimer original(options.device), modified(options.device);
  LayersComparison made;
  made.original = {.task = work.task,
                   .slice = "",
                   .repeats = {},
                   .tokens = subject.tokens(),
                   .batch = options.batch,
                   .config = work.config};
  if (both) made.modified = made.original, made.modified->slice = options.slice.description();
  const auto repeat = [&](bool keep) {
    check_interrupt();
    PassTimes dense = subject.time(original);
    const double length = length_of(dense);
    if (keep) made.original.repeats.push_back(std::move(dense));
    if (!both) return length;
    subject.slice();
    PassTimes sliced = subject.time(modified);
    subject.dense();
    if (keep) made.modified->repeats.push_back(std::move(sliced));
    return length;
  };
  double estimate = 0;
  for (int i = 0; i < std::max(1, options.timer.warmups); ++i) estimate = repeat(false);
  const int repeats = std::clamp(int(options.timer.seconds * 1e3 / std::max(estimate, 1e-3)),
                                 options.timer.least, options.timer.most);
  for (int i = 0; i < repeats; ++i) repeat(true);
  return made;
}

}  // namespace

models::BertConfig base_model(models::BertFamily family) {
  models::BertConfig model;
  model.family = family;
  if (family == models::BertFamily::roberta)
    model.vocabulary = 50265, model.positions = 514, model.types = 1, model.pad_token = 1, model.eps = 1e-5;
  return model;
}

void LayersBenchOptions::validate() const {
  slice.refuse_auto();
  slice.validate();
  check(tasks.empty() || !data.empty(), "--task needs --data FOLDER");
  check(data.empty() || !tasks.empty(), "--data needs --task NAMES");
  check(tasks.empty() || !folder.empty(), "--task needs --model FOLDER, whose tokenizer reads the texts");
  for (const std::string& task : tasks) datasets::parse_glue_task(task);
  if (!folder.empty()) return;
  model.validate();
  check_length(*this, model);
}

int64_t default_max_length(const LayersBenchOptions& options) {
  return train::default_max_length(options.folder.empty() ? options.model
                                                          : folder_config(options, datasets::GlueTask::sst2));
}

std::vector<LayersComparison> bench_layers(const LayersBenchOptions& options) {
  options.validate();
  std::vector<LayersComparison> all;
  if (options.tasks.empty()) all.push_back(compare_models(options, synthetic_work(options)));
  for (const std::string& task : options.tasks)
    all.push_back(compare_models(options, task_work(options, task)));
  return all;
}

}  // namespace tessera::bench

#include "sparsity/gradient_tasks.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "autograd/tape.h"
#include "datasets/shuffle.h"
#include "datasets/tokenize.h"
#include "eval/bert_batch.h"
#include "io/checkpoint_folder.h"
#include "io/text_file.h"
#include "io/utf8.h"
#include "pretrained/load.h"
#include "runtime/interrupt.h"
#include "runtime/text.h"
#include "train/bert_model.h"
#include "train/glue_job.h"
#include "train/mlm_job.h"
#include "train/random_purpose.h"
#include "train/run_folder.h"

namespace tessera::sparsity {
namespace {

namespace fs = std::filesystem;

constexpr const char* kText = "mlm";

/// What a model is asked for, one batch after the other.
struct Task {
  std::string name;
  pretrained::ConfigOptions head;
  /// Of the batch of that index: what the model takes, and its targets.
  std::function<models::BertBatch(const models::BertConfig&, Device, Tensor& targets)> next;
  int64_t batches = 0;
};

/// The model's folder and its tokenizer's; or a run's checkpoint and the task that it was trained on.
struct Origin {
  std::string folder, tokenizer;
  std::string checkpoint;  // file; "": `folder` has weights
  std::optional<train::GlueSettings> run;
};

Origin of_run(const fs::path& path) {
  const train::RunFolder run = train::RunFolder::open(path);
  const nlohmann::json settings = run.settings_of("bert");
  check(settings.contains("job"), path.string(), ": it is no run of `train bert`");
  check(!settings.contains("seeds"), path.string(),
        ": it holds several seeds; name the folder of one, such as ", (path / "seed-0").string());
  Origin origin;
  origin.run = train::job_settings<train::GlueSettings>(settings["job"]);
  const train::FolderLock lock = run.lock();
  const auto latest = io::CheckpointFolder(run.checkpoints().string()).latest();
  check(latest.step.has_value(), path.string(),
        ": the run has neither a model nor a checkpoint yet; train a step, or give a model directory");
  origin.checkpoint = latest.file;
  origin.tokenizer = origin.run->model.empty()
                         ? (fs::canonical(path).parent_path() / "tokenizer.json").string()
                         : origin.run->model;
  return origin;
}

Origin origin_of(const std::string& model) {
  std::error_code ignored;
  const fs::path path = model;
  for (const fs::path& folder : {path, path / "model"})
    if (fs::exists(folder / "config.json", ignored))
      return {.folder = folder.string(), .tokenizer = folder.string(), .checkpoint = {}, .run = {}};
  check(fs::exists(path / "run.json", ignored), "gradients: ", io::shown(model),
        " has neither a config.json (a model directory) nor a run.json (a run of `train bert`)");
  return of_run(path);
}

/// A model and what it refers to.
struct Loaded {
  explicit Loaded(uint64_t seed) : rng(train::seed_for(train::RandomPurpose::initialisation, seed)) {}
  Rng rng;
  std::optional<models::Bert> own;
  std::optional<train::GlueJob> job;
  pretrained::LoadReport report;
  models::Bert& model() { return own ? *own : job->model(); }
};

std::unique_ptr<Loaded> load(const Origin& origin, const Task& task, const GradientTasks& what,
                             Device device) {
  auto loaded = std::make_unique<Loaded>(what.seed);
  if (origin.run) {
    loaded->job.emplace(*origin.run, device);
    loaded->job->restore(origin.checkpoint);
    // The whole gradient is measured: zeros are not to be those of rows that the run's own slice left out.
    nn::for_each<nn::Linear>(loaded->model(), [](const std::string&, nn::Linear& layer) {
      if (std::holds_alternative<nn::SlicedBackward>(layer.form)) layer.form = nn::Dense{};
    });
    nn::set_training(loaded->model(), what.dropout);
    return loaded;
  }
  const pretrained::Config config = pretrained::read_config(origin.folder, task.head);
  check(std::holds_alternative<models::BertConfig>(config.model), "gradients: ", io::shown(origin.folder),
        " holds a model of type ", config.type, "; expected bert or roberta");
  loaded->own.emplace(pretrained::load_bert(origin.folder, loaded->rng, device,
                                            {.config = task.head, .dtype = what.dtype}, &loaded->report));
  train::use_for(train::RandomPurpose::dropout, what.seed, loaded->rng);
  nn::set_training(*loaded->own, what.dropout);
  return loaded;
}

/// The first batches of `train bert` with that seed.
Task glue_task(const std::string& name, const io::Tokenizer& tokenizer, const GradientTasks& what) {
  const datasets::GlueInfo& info = datasets::parse_glue_task(name);
  const datasets::GlueData data(info.task, what.data, what.part);
  check(data.has_labels(), "gradients: ", data.path(), " has no labels, without which there is no loss");
  const auto items = std::make_shared<datasets::GlueItems>(
      data, tokenizer, datasets::GlueBatchOptions{.max_length = what.max_length, .packed = true});
  check(items->size() >= what.batch, "gradients: ", data.path(), " has ", items->size(),
        " examples, a batch takes ", what.batch, "; give a smaller --batch-size");
  Rng order(train::seed_for(train::RandomPurpose::text_order, what.seed));
  const auto loader = std::make_shared<datasets::Loader<datasets::GlueItems>>(
      *items,
      datasets::LoaderOptions{
          .size = what.batch, .shuffle = &order, .drop_last = true, .workers = 1, .device = Device::cpu()});
  return {.name = info.name,
          .head = {.head = info.labels.empty() ? models::BertHead::regress : models::BertHead::classify,
                   .labels = info.classes()},
          .next =
              [items, loader](const models::BertConfig& config, Device device, Tensor& targets) {
                const datasets::GlueBatch batch = loader->next();
                targets = batch.labels.to(device);
                return eval::bert_batch(batch, config, 0, device);
              },
          .batches = std::min(what.batches, loader->batches_per_epoch())};
}

/// Windows of the text, in an order of their own, masked as in pretraining.
Task text_task(const io::Tokenizer& tokenizer, const GradientTasks& what) {
  std::string text;
  for (const std::string& path : what.text) {
    if (!text.empty()) text += "\n\n";
    text += io::read_text(path, datasets::kLargestText, what.any_bytes);
  }
  const auto ids = std::make_shared<std::vector<int32_t>>(tokenizer.encode(text, {.special = false}).ids);
  const int64_t length = what.max_length - 2, windows = int64_t(ids->size()) / std::max<int64_t>(1, length);
  check(length >= 1, "gradients: --max-length is ", what.max_length,
        "; [CLS], [SEP] and a token of text need 3");
  check(windows >= what.batch, "gradients: ", ids->size(), " tokens of text are ", windows, " sequences of ",
        what.max_length, ", a batch takes ", what.batch,
        "; give a smaller --batch-size or --max-length, or more text");
  const train::Masking masking(tokenizer, what.mask);
  const datasets::Permutation order(windows, train::seed_for(train::RandomPurpose::sequence_order, what.seed),
                                    0, 0);
  const auto index = std::make_shared<int64_t>(0);
  return {.name = kText,
          .head = {.head = models::BertHead::masked_lm},
          .next =
              [=, batch = what.batch, seed = what.seed](const models::BertConfig& config, Device device,
                                                        Tensor& targets) {
                std::vector<std::vector<int64_t>> texts;
                for (int64_t i = 0; i < batch; ++i) {
                  const auto begin = ids->begin() + order(*index * batch + i) * length;
                  texts.emplace_back(begin, begin + length);
                }
                return train::masked_bert_batch(masking.batch(texts, seed, uint64_t((*index)++)), config,
                                                device, targets);
              },
          .batches = std::min(what.batches, windows / what.batch)};
}

GradientBatch rows_of(const models::BertBatch& batch, const GradientTasks& what) {
  const nn::Sequences& sequences = batch.sequences;
  GradientBatch rows{.tokens = sequences.tokens(), .padded_rows = sequences.tokens()};
  if (what.padding == Padding::max_length) rows.padded_rows = sequences.count() * what.max_length;
  if (what.padding == Padding::longest) rows.padded_rows = sequences.count() * sequences.longest();
  const Tensor& read = batch.masked.defined() ? batch.masked : batch.first_rows;
  rows.last_block = read.to(Device::cpu()).to(DType::i64).to_vector<int64_t>();
  return rows;
}

void forget_gradients(models::Bert& model) {
  for (const nn::NamedParameter& parameter : nn::parameters(model)) zero_grad(parameter.tensor);
}

TaskGradients measure_task(const Task& task, const Origin& origin, const io::Tokenizer& tokenizer,
                           const GradientTasks& what, Device device) {
  const std::unique_ptr<Loaded> loaded = load(origin, task, what, device);
  models::Bert& model = loaded->model();
  check(what.max_length <= model.config.longest(), "gradients: --max-length is ", what.max_length,
        "; the model has positions for ", model.config.longest());
  check(tokenizer.vocab_size() <= model.config.vocabulary, "gradients: the tokenizer ", tokenizer.path(),
        " has ", tokenizer.vocab_size(), " tokens, the model's table ", model.config.vocabulary,
        " rows; they do not belong together");
  TaskGradients result{.name = task.name, .fresh = loaded->report.fresh, .modules = {}};
  GradientMeter meter(model, what.layers, what.options);
  for (; result.batches < task.batches; ++result.batches) {
    check_interrupt();
    Tensor targets;
    const models::BertBatch batch = task.next(model.config, device, targets);
    meter.begin(rows_of(batch, what));
    Tape tape;
    const Tensor loss = model.loss(batch, targets);
    tape.backward(loss);
    result.loss += loss.item<double>(), result.tokens += batch.sequences.tokens();
    forget_gradients(model);
  }
  result.loss /= double(result.batches);
  result.modules = meter.modules();
  return result;
}

/// Over all batches of all tasks; modules that only some have (heads) count where they are.
TaskGradients over_all(const std::vector<TaskGradients>& tasks) {
  TaskGradients all{.name = kAllTasks, .fresh = {}, .modules = {}};
  for (const TaskGradients& task : tasks) {
    all.batches += task.batches, all.tokens += task.tokens, all.loss += task.loss * double(task.batches);
    for (const ModuleGradient& module : task.modules) {
      const auto found = std::ranges::find(all.modules, module.name, &ModuleGradient::name);
      if (found != all.modules.end()) {
        found->add(module);
      } else {
        all.modules.push_back(module);
        all.modules.back().first_norms.clear();
      }
    }
  }
  all.loss /= double(all.batches);
  return all;
}

}  // namespace

Padding parse_padding(const std::string& name) {
  return parse_name<Padding>("gradients: there is no --padding", {"max", "longest", "none"}, name);
}

void GradientTasks::validate() const {
  check(!tasks.empty() || !text.empty(),
        "gradients: there is nothing to measure on; give --task NAMES with --data FOLDER, or --text FILE...");
  check(tasks.empty() || !data.empty(),
        "gradients: --task needs --data, the directory with the tasks' files");
  check(!tasks.empty() || data.empty(), "gradients: --data needs --task, which is not given");
  std::set<datasets::GlueTask> given;
  for (const std::string& task : tasks)
    check(given.insert(datasets::parse_glue_task(task).task).second, "gradients: task ", task,
          " is given twice");
  check(part == "train" || part == "dev", "gradients: --part is \"", part, "\"; expected train or dev");
  check(batch >= 1 && batches >= 1 && max_length >= 1, "gradients: --batch-size is ", batch, ", --batches ",
        batches, ", --max-length ", max_length, "; expected 1 or more");
  check(mask > 0 && mask < 1, "gradients: --mask is ", mask, "; expected a share between 0 and 1");
  check(dtype == DType::f32 || dtype == DType::bf16, "gradients: --dtype is ", dtype,
        "; expected f32 or bf16: in f16 small gradients become zeros, which is no sparsity");
  options.validate();
}

int64_t default_max_length(const std::string& model) {
  const Origin origin = origin_of(model);
  if (origin.run) return train::default_max_length(origin.run->bert);
  const pretrained::Config config = pretrained::read_config(origin.folder);
  const auto* const bert = std::get_if<models::BertConfig>(&config.model);
  return bert ? train::default_max_length(*bert) : GradientTasks().max_length;
}

std::vector<TaskGradients> measure_gradients(const GradientTasks& what, Device device,
                                             const std::function<void(const std::string&)>& tell) {
  what.validate();
  const Origin origin = origin_of(what.model);
  if (origin.run)
    check(what.text.empty() && what.tasks.size() == 1 &&
              datasets::parse_glue_task(what.tasks[0]).name == origin.run->task,
          "gradients: ", io::shown(what.model), " is a checkpoint of task ", origin.run->task,
          "; measure it with --task ", origin.run->task, ", or save a model with `train bert --save-model`");
  if (origin.run)
    check(origin.run->bert.dtype == what.dtype, "gradients: the checkpoint in ", io::shown(what.model),
          " is in ", origin.run->bert.dtype, "; give --dtype ", origin.run->bert.dtype);
  const io::Tokenizer tokenizer = io::Tokenizer::load(origin.tokenizer);
  std::vector<TaskGradients> all;
  const auto measure = [&](const Task& task) {
    all.push_back(measure_task(task, origin, tokenizer, what, device));
    const TaskGradients& last = all.back();
    tell(fmt::format("{}: {} batches, {} tokens, loss {:.4f}{}", last.name, last.batches, last.tokens,
                     last.loss,
                     last.fresh.empty() ? ""
                                        : fmt::format("; {} parameters of the head were drawn, the model's "
                                                      "files lack them",
                                                      last.fresh.size())));
  };
  for (const std::string& name : what.tasks) measure(glue_task(name, tokenizer, what));
  if (!what.text.empty()) measure(text_task(tokenizer, what));
  if (all.size() > 1) all.push_back(over_all(all));
  return all;
}

}  // namespace tessera::sparsity

#include <fmt/format.h>

#include <filesystem>
#include <optional>

#include "cli/train_run.h"
#include "io/checkpoint_folder.h"
#include "io/file.h"
#include "io/utf8.h"
#include "ops/attention/attention.h"
#include "pretrained/load.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "train/glue_job.h"
#include "train/seeds_report.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using train::GlueSettings;

constexpr uint64_t kLargestFile = uint64_t{256} << 20;

/// The sizes that the authors of BERT published (Turc et al., arXiv:1908.08962), and BERT-base.
struct Size {
  const char* name;
  int64_t layers, d_model;
};
constexpr Size kSizes[] = {
    {"tiny", 2, 128}, {"mini", 4, 256}, {"small", 4, 512}, {"medium", 8, 512}, {"base", 12, 768}};

/// The flags that say what is trained.
struct BertFlags {
  GlueSettings settings;
  std::string size = "tiny";
  bool scratch = false, pad = false, packed = false, predict = false, save_model = false;
  int64_t seeds = 3, vocab_size = 2000, layers = 0, d_model = 0, heads = 0, d_ff = 0;
  double epochs = 3, dropout = 0;
  PrecisionFlag precision;

  void add_to(CLI::App& command);
  /// Those that run.json keeps as options.
  train::SettingList options();
  /// How to begin: run.json keeps what follows from them.
  train::SettingList beginning();
  /// Of an encoder that begins from nothing; vocabulary and head are still those of no task.
  models::BertConfig scratch_config(const train::Given& given) const;
};

train::SettingList BertFlags::options() {
  train::SettingList list(train::Kept::option);
  list.group("Run");
  list.add("predict", predict, "Write predictions for the test part as the benchmark's server takes them");
  list.add("save_model", save_model, "Write each trained model as a folder that transformers loads");
  return list;
}

train::SettingList BertFlags::beginning() {
  train::SettingList list(train::Kept::never);
  list.group("Data");
  list.add("packed", packed, "Texts one after the other, no padding (the default)");
  list.add("pad", pad, "Every text takes --max-length tokens: each step costs the same");
  list.group("Model");
  list.add("scratch", scratch,
           "No pretrained weights: random ones, and a tokenizer made from the task's texts");
  list.add("size", size, "Sizes with --scratch: tiny, mini, small, medium, base")
      .formerly("--preset")
      .one_of({"tiny", "mini", "small", "medium", "base"});
  const auto width = [&](const char* key, int64_t& value, const char* help) {
    list.add(key, value, help).range(int64_t{1}, int64_t{1} << 18).shown_as("");
  };
  width("layers", layers, "Blocks with --scratch; else those of --size");
  width("d_model", d_model, "Width with --scratch; else that of --size");
  width("n_head", heads, "Attention heads with --scratch; default: of 64 each");
  width("d_ff", d_ff, "Hidden width of the MLPs with --scratch; default: 4 times the width");
  list.add("vocab_size", vocab_size, "Vocabulary size with --scratch")
      .range(int64_t{261}, (int64_t{1} << 22) - 1);
  list.add("dropout", dropout,
           "Everywhere while training; default: what config.json says, 0.1 with --scratch")
      .range(0.0, 0.99)
      .shown_as("");
  list.group("Training");
  list.add("seeds", seeds, "Runs that differ in their seed alone").range(int64_t{1}, int64_t{1000});
  list.add("epochs", epochs, "Passes over the data; evaluated after each unless --eval-every is given")
      .range(1e-6, 1e6);
  return list;
}

void BertFlags::add_to(CLI::App& command) {
  train::SettingList list = settings.list();
  for (train::Setting& setting : list.all()) {
    if (setting.flag == "--lr") setting.help += "; default: 2e-5, with --scratch 5e-4";
    if (setting.flag == "--warmup") setting.help += "; default: 6 %";
    if (setting.flag == "--steps") setting.help += ", instead of --epochs";
    if (setting.flag == "--seed") setting.help += "; the first of --seeds";
    if (setting.flag == "--lr" || setting.flag == "--warmup" || setting.flag == "--steps") setting.shown = "";
  }
  add_flags(command, list);
  add_flags(command, beginning());
  add_flags(command, options());
  precision.add_to(command);
  command.get_option("--steps")->excludes("--epochs");
}

models::BertConfig BertFlags::scratch_config(const train::Given& given) const {
  models::BertConfig config;
  for (const Size& one : kSizes)
    if (size == one.name) config.layers = one.layers, config.d_model = one.d_model;
  if (layers > 0) config.layers = layers;
  if (d_model > 0) config.d_model = d_model;
  config.heads = heads > 0 ? heads : std::max<int64_t>(1, config.d_model / 64);
  config.d_ff = d_ff > 0 ? d_ff : 4 * config.d_model;
  config.positions = std::max<int64_t>(512, given.contains("--max-length") ? settings.max_length : 0);
  config.hidden_dropout = config.attention_dropout = config.classifier_dropout = 0.1;
  return config;
}

/// What all seeds share.
struct Group {
  GlueSettings job;  // of the first seed
  int64_t seeds = 0;
  BertFlags flags;
  std::optional<train::RunFolder> folder;
  std::optional<train::FolderLock> lock;
  std::optional<io::Tokenizer> tokenizer;
  std::string tokenizer_text;  // of --scratch
  std::optional<train::GlueSet> set;

  fs::path seed_folder(int64_t index) const {
    return folder->path() / ("seed-" + std::to_string(job.seed + uint64_t(index)));
  }
};

std::vector<std::pair<std::string, std::string>> settings_of(const GlueSettings& job) {
  std::vector<std::pair<std::string, std::string>> rows;
  const json settings = train::to_json(job);
  for (const auto& [name, value] : settings.items())
    if (name != "config" && name != "seed")
      rows.emplace_back(name, value.is_string() ? value.get<std::string>() : value.dump());
  const models::BertConfig& c = job.bert;
  rows.emplace_back("encoder",
                    fmt::format("{} blocks, d {}, {} heads, d_ff {}, vocabulary {}, dropout {:g} "
                                "({:.4g} of the attention probabilities), {}",
                                c.layers, c.d_model, c.heads, c.d_ff, c.vocabulary, c.hidden_dropout,
                                ops::applied_dropout(c.attention_dropout), name_of(job.precision())));
  return rows;
}

/// One seed of the group.
class TrainedBert : public TrainedModel {
 public:
  TrainedBert(Group& group, int64_t index) : group_(group), job_(group.job) { job_.seed += uint64_t(index); }
  const char* name() const override { return "bert"; }
  train::SettingList options() override { return group_.flags.options(); }
  train::SettingList settings() override { return job_.list(); }
  void from_flags(const CLI::App&, Device) override {}  // the group has read them
  void from_settings(const std::string&, const json&, const CLI::App&) override {}
  std::string default_name() const override { return "bert"; }
  void prepare(const train::RunFolder&, Device device, bool) override {
    session_.emplace(job_, device, &*group_.set);
  }
  json job() const override { return train::to_json(job_); }
  DType dtype() const override { return job_.bert.dtype; }
  int64_t steps() const override { return job_.steps; }
  optim::Schedule schedule() const override { return job_.make_schedule(); }
  int64_t restore(const fs::path& checkpoint) override { return session_->restore(checkpoint); }
  fs::path resume_path(const train::RunFolder&) const override { return group_.folder->path(); }

  void print_header(const train::RunFolder& run, bool graph, int64_t first_step) const override {
    const Device device = session_->device();
    fmt::print("seed {} on {} ({}), {}{}: steps {} to {}, {}\n", job_.seed, device.name(), device.card().name,
               name_of(job_.precision()),
               device.is_cuda() ? graph && job_.batches == "padded" ? ", captured" : ", eager" : "",
               first_step, job_.steps, run.path().string());
    if (first_step == 0) print_origin();
  }
  train::Job& job_to_train(train::TrainerOptions&) override { return *session_; }
  void report(const train::RunFolder& run, const train::TrainResult& result) override {
    if (result.outcome == train::Outcome::finished) finish(run);
    write_page(run);
  }
  /// What a finished run leaves beside its page. The page is written last: where it is, all is that the run
  /// was asked for then.
  void finish(const train::RunFolder& run) {
    if (group_.flags.predict)
      for (const std::string& file : train::write_submissions(*session_, *group_.set, predictions_of(run)))
        fmt::print("predictions: {}\n", file);
    if (!group_.flags.save_model) return;
    save_model(model_of(run));
    fmt::print("model: {}\n", model_of(run).string());
  }
  /// Whether a finished run has not written what it is asked for now.
  bool lacks(const train::RunFolder& run) const {
    std::error_code ignored;
    const auto files = train::submission_files(*group_.set, predictions_of(run));
    return (group_.flags.predict &&
            std::ranges::any_of(files,
                                [&](const std::string& file) { return !fs::exists(file, ignored); })) ||
           (group_.flags.save_model && !fs::is_directory(model_of(run), ignored));
  }
  void write_page(const train::RunFolder& run) const {
    train::write_run_report(run.path() / "report.html",
                            fmt::format("BERT on {}, seed {}", group_.set->info().folder, job_.seed), run,
                            settings_of(job_));
  }
  json throughput(const train::TrainResult& result) const override {
    return {{"texts_per_s", result.ms_per_step > 0 ? double(job_.batch) / result.ms_per_step * 1e3 : 0.0}};
  }
  void print_end(const train::RunFolder&, const train::TrainResult& result) const override {
    std::string line;
    for (const auto& [name, value] : result.evaluation)
      line += fmt::format("{}{} {:.4f}", line.empty() ? "" : ", ", name.substr(5), value);
    fmt::print("evaluation: {}\n", line);
  }

 private:
  static fs::path predictions_of(const train::RunFolder& run) { return run.path() / "predictions"; }
  static fs::path model_of(const train::RunFolder& run) { return run.path() / "model"; }

  /// Which weights come from the file and which do not: a head that is new learns, one that was expected in
  /// the file and is not there would be missed.
  void print_origin() const {
    if (job_.model.empty()) {
      fmt::print("  weights   all initialised at random\n");
      return;
    }
    const auto listed = [](const std::vector<std::string>& names) {
      constexpr size_t kShown = 8;
      std::string text;
      for (size_t i = 0; i < std::min(kShown, names.size()); ++i)
        text += (i ? ", " : "") + io::shown(names[i]);
      return names.size() > kShown ? text + fmt::format(" and {} more", names.size() - kShown) : text;
    };
    const pretrained::LoadReport& loaded = session_->loaded();
    fmt::print("  weights   from {}; {}\n", job_.model,
               loaded.fresh.empty() ? "none initialised at random"
                                    : "initialised at random: " + listed(loaded.fresh));
    if (!loaded.ignored.empty())
      fmt::print("            in the file, but not used: {}\n", listed(loaded.ignored));
  }
  /// Weights and configuration, and the tokenizer that goes with them.
  void save_model(const fs::path& folder) {
    std::error_code ignored;
    io::AtomicFolder files(folder.string(), io::AtomicFolder::Existing::replace);
    pretrained::save(session_->model(), files.path());
    const fs::path from = job_.model.empty() ? group_.folder->path() : fs::path(job_.model);
    for (const char* const name : {"tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json",
                                   "merges.txt", "special_tokens_map.json", "added_tokens.json"})
      if (fs::exists(from / name, ignored))
        io::write_file(files.path() + "/" + name, io::read_file((from / name).string(), kLargestFile));
    files.publish();
  }

  Group& group_;
  GlueSettings job_;
  std::optional<train::GlueJob> session_;
};

// ---- the group ----

void check_usage(const BertFlags& flags, const train::Given& given) {
  for (const char* needed : {"--task", "--data"})
    if (!given.contains(needed)) throw UsageError(std::string("train bert: ") + needed + " is required");
  if (flags.settings.model.empty() != flags.scratch)
    throw UsageError(flags.scratch ? "train bert: --model brings weights and --scratch does without; give one"
                                   : "train bert: --model FOLDER is required, or --scratch");
  if (flags.pad && flags.packed) throw UsageError("train bert: --pad and --packed contradict each other");
  for (const char* only : {"--size", "--layers", "--d-model", "--n-head", "--d-ff", "--vocab-size"})
    if (!flags.scratch && given.contains(only))
      throw UsageError(std::string("train bert: ") + only + " is of --scratch; a --model has its own sizes");
  try {
    datasets::parse_glue_task(flags.settings.task);
    if (flags.scratch) flags.scratch_config(given).validate();
  } catch (const Error& error) {
    throw UsageError(std::string("train bert: ") + error.what());
  }
}

std::string tokenizer_config() {
  return json{{"tokenizer_class", "PreTrainedTokenizerFast"},
              {"pad_token", "[PAD]"},
              {"unk_token", "[UNK]"},
              {"cls_token", "[CLS]"},
              {"sep_token", "[SEP]"},
              {"mask_token", "[MASK]"}}
             .dump(2) +
         "\n";
}

/// Reads the data with the group's tokenizer.
void read_set(Group& group) {
  const datasets::GlueTask task = datasets::parse_glue_task(group.job.task).task;
  check(group.tokenizer->vocab_size() <= group.job.bert.vocabulary, "bert: the tokenizer ",
        group.tokenizer->path(), " has ", group.tokenizer->vocab_size(), " tokens, the model's table ",
        group.job.bert.vocabulary, " rows; they do not belong together");
  group.set.emplace(
      train::read_glue(task, group.job.data, *group.tokenizer, group.job.max_length, group.flags.predict));
}

/// The job that the command line says, to be run on `device`. Nothing is written.
void begin(Group& group, Device device, const train::Given& given) {
  const BertFlags& flags = group.flags;
  const datasets::GlueInfo& info = datasets::parse_glue_task(flags.settings.task);
  GlueSettings& job = group.job = flags.settings;
  job.task = info.name;
  job.data = fs::absolute(job.data).lexically_normal().string();
  if (!flags.scratch) job.model = fs::absolute(job.model).lexically_normal().string();
  job.batches = flags.pad ? "padded" : "packed";
  if (!given.contains("--lr")) job.lr = flags.scratch ? 5e-4 : 2e-5;
  check_kept_text("--data", job.data);
  check_kept_text("--model", job.model);
  group.seeds = flags.seeds;
  if (flags.scratch) {
    group.tokenizer_text = train::train_glue_tokenizer(info.task, job.data, flags.vocab_size);
    group.tokenizer = io::Tokenizer::parse("tokenizer.json", group.tokenizer_text);
    models::BertConfig config = flags.scratch_config(given);
    config.vocabulary = group.tokenizer->vocab_size();
    config.head = models::BertHead::classify;
    job.bert = train::bert_config("config.json", pretrained::config_text(config), info.task);
  } else {
    job.bert = train::bert_config(job.model + "/config.json",
                                  io::read_file(job.model + "/config.json", kLargestFile), info.task);
    group.tokenizer = io::Tokenizer::load(job.model);
  }
  if (given.contains("--dropout"))
    job.bert.hidden_dropout = job.bert.attention_dropout = job.bert.classifier_dropout = flags.dropout;
  ops::applied_dropout(
      job.bert.attention_dropout);  // throws, before anything is written, if it would become 0
  job.set_precision(flags.precision.on(device));
  if (!given.contains("--max-length")) job.max_length = std::min<int64_t>(128, job.bert.longest());
  check(job.max_length <= job.bert.longest(), "bert: --max-length is ", job.max_length,
        "; the model has positions for ", job.bert.longest());
  read_set(group);
  const int64_t per_epoch = group.set->train.size() / job.batch;
  check(per_epoch >= 1, "bert: ", group.set->train.size(), " examples give no batch of ", job.batch,
        "; try a smaller --batch-size");
  if (!given.contains("--steps"))
    job.steps = std::max<int64_t>(1, std::llround(flags.epochs * double(per_epoch)));
  if (!given.contains("--warmup")) job.warmup = job.steps * 6 / 100;
  job.validate();
}

train::SettingList all_options(Group& group, RunFlags& run) {
  train::SettingList options = run.options.list();
  options.append(group.flags.options());
  return options;
}

void write_settings(Group& group, RunFlags& run, json settings) {
  settings["job"] = train::to_json(group.job);
  settings["build"] = train::build_facts();
  settings["options"] = train::to_json(all_options(group, run), train::Kept::option);
  group.folder->write_settings(settings);
}

/// The group that the folder describes.
void go_on(Group& group, RunFlags& run, const CLI::App& command) {
  refuse_settings(command, "--resume continues a run as it was", {}, group.job.list());
  fs::path path = run.resume;
  // One of the seeds stands for the whole.
  if (!train::RunFolder::open(path).settings_of("bert").contains("seeds"))
    path = fs::canonical(path).parent_path();
  group.folder = train::RunFolder::open(path);
  group.lock.emplace(group.folder->lock());
  const std::string file = (group.folder->path() / "run.json").string();
  const json settings = group.folder->settings();
  const json seeds = settings.value("seeds", json());
  check(settings.contains("job") && seeds.is_number_unsigned() && seeds >= 1 && seeds <= 1000, file,
        ": it is no run of `train bert`");
  try {
    group.job = train::glue_settings_from_json(settings["job"]);
  } catch (const Error& error) {
    fail_at(Site::here(), file, ": ", error.what());
  }
  group.seeds = seeds.get<int64_t>();
  train::SettingList options = all_options(group, run);
  const train::Given given = given_flags(command);
  train::take_options(options, settings, file, given);
  if (given.contains("--steps")) group.job.steps = group.flags.settings.steps;
  group.tokenizer =
      io::Tokenizer::load(group.job.model.empty() ? (path / "tokenizer.json").string() : group.job.model);
  read_set(group);
  const json known = settings.value("data", json::object());
  check(known.is_object() && known.value("fingerprint", json()) == group.set->fingerprint(), group.job.data,
        ": the data or the tokenizer are not those that ", path.string(), " began with");
  write_settings(group, run, settings);
}

/// A new folder for the group, with the tokenizer that was made for it.
void make_folder(Group& group, RunFlags& run) {
  group.folder =
      train::RunFolder::create(run.runs, run.name.empty() ? stamped("bert-" + group.job.task) : run.name);
  group.lock.emplace(group.folder->lock());
  std::error_code ignored;
  fs::remove(group.folder->checkpoints(), ignored);  // its seeds have their own
  if (!group.tokenizer_text.empty()) {
    io::write_file((group.folder->path() / "tokenizer.json").string(), group.tokenizer_text);
    io::write_file((group.folder->path() / "tokenizer_config.json").string(), tokenizer_config());
  }
  write_settings(group, run,
                 {{"model", "bert"},
                  {"started", train::utc_now()},
                  {"seeds", group.seeds},
                  {"data",
                   {{"train", group.set->train.size()},
                    {"dev", group.set->dev.front().items.size()},
                    {"tokens", group.set->train.tokens()},
                    {"fingerprint", group.set->fingerprint()}}}});
}

void print_group(const Group& group) {
  const GlueSettings& job = group.job;
  const models::BertConfig& c = job.bert;
  const train::GlueSet& set = *group.set;
  fmt::print("bert on {}: {} seeds from {}\n", set.info().folder, group.seeds, job.seed);
  fmt::print("  model     {}: {} blocks, d {}, {} heads of {}, d_ff {}, vocabulary {}\n",
             job.model.empty() ? "from scratch" : job.model, c.layers, c.d_model, c.heads,
             c.d_model / c.heads, c.d_ff, c.vocabulary);
  if (c.hidden_dropout > 0 || c.attention_dropout > 0)
    fmt::print("  dropout   {:g} of rows, {:.4g} of attention probabilities (in steps of 1/256)\n",
               c.hidden_dropout, ops::applied_dropout(c.attention_dropout));
  std::string dev;
  for (const train::GluePart& part : set.dev)
    dev += fmt::format("{}{} {}", dev.empty() ? "" : ", ", part.items.size(), part.name);
  fmt::print("  data      {} examples of {:.1f} tokens, {} cut to {}; {}; batches of {}, {}\n",
             set.train.size(), double(set.train.tokens()) / double(set.train.size()), set.train.cut(),
             job.max_length, dev, job.batch, job.batches);
  fmt::print("  training  {} steps ({:.2f} epochs), lr {:g} ({}, {} of warm-up), weight decay {:g}\n",
             job.steps, double(job.steps * job.batch) / double(set.train.size()), job.lr, job.schedule,
             job.warmup, job.weight_decay);
  fmt::print("  run       {}\n", group.folder->path().string());
}

/// Whether the seed's run has reached its end, evaluation and all.
bool is_done(const fs::path& path, int64_t steps) {
  const auto newest = io::CheckpointFolder((path / "checkpoints").string()).latest();
  if (newest.step.value_or(0) < steps) return false;
  const auto records = train::RunFolder::open(path).metrics();
  return !records.empty() && records.back().step >= steps && records.back().values.contains("eval_score");
}

/// Between two steps of a run that began: says how it goes on.
int stopped(const Group& group, const RunFlags& run, int signal) {
  fmt::print("interrupted; what was trained is saved. To go on:\n  tessera train bert --resume {}{}\n",
             quoted(group.folder->path().string()), run.device.empty() ? "" : " --device " + run.device);
  return 128 + signal;
}

int run_seeds(Group& group, RunFlags run, const CLI::App& command) {
  run.runs = group.folder->path().string();
  const std::string json_file = std::exchange(run.json, "");
  std::vector<train::RunFolder> runs;
  for (int64_t index = 0; index < group.seeds; ++index) {
    const fs::path path = group.seed_folder(index);
    std::error_code ignored;
    const bool begun = fs::exists(path / "run.json", ignored);
    if (!begun) fs::remove_all(path, ignored);  // killed before it said what it is
    run.resume = begun ? path.string() : "";
    run.name = begun ? "" : path.filename().string();
    TrainedBert model(group, index);
    try {
      if (!begun || !is_done(path, group.job.steps)) {
        if (const int code = run_train(model, run, command); code != 0) return code;
      } else if (const train::RunFolder folder = train::RunFolder::open(path);
                 !fs::exists(path / "report.html", ignored) || model.lacks(folder)) {
        // Killed between its last step and its page, or asked for more than before.
        model.prepare(folder, device_of(run), true);
        model.restore(io::CheckpointFolder(folder.checkpoints().string()).latest().file);
        model.finish(folder);
        model.write_page(folder);
      }
    } catch (const Interrupted& interrupted) {
      if (index == 0 && !begun) throw;  // nothing is there that could go on
      return stopped(group, run, interrupted.signal());
    }
    runs.push_back(train::RunFolder::open(path));
  }
  const train::SeedResults results = train::collect_seeds(runs);
  const fs::path page = group.folder->path() / "report.html";
  train::write_seeds_report(page, fmt::format("BERT on {}", group.set->info().folder), results,
                            settings_of(group.job));
  const json summary = {{"config", train::to_json(group.job)},
                        {"build", train::build_facts()},
                        {"run", group.folder->path().string()},
                        {"seeds", group.seeds},
                        {"metrics", train::to_json(results)}};
  io::write_file((group.folder->path() / "summary.json").string(), io::json_text(summary, 2) + "\n");
  if (!json_file.empty()) io::write_file(json_file, io::json_text(summary, 2) + "\n");
  fmt::print("\n{}report: {}\n", train::format_seeds(results),
             fs::absolute(page).lexically_normal().string());
  return 0;
}

int run_bert(BertFlags flags, RunFlags run, const CLI::App& command) {
  check_run_flags(run, command);
  const InterruptGuard interrupts(kStopping);
  Group group{.flags = std::move(flags)};
  const bool resumed = !run.resume.empty();
  if (!resumed) check_usage(group.flags, given_flags(command));
  if (!run.json.empty()) check_replaceable(run.json);
  if (resumed) {
    go_on(group, run, command);
  } else {
    begin(group, device_of(run), given_flags(command));
    if (command.get_option("--eval-every")->count() == 0)
      run.options.eval_every = group.set->train.size() / group.job.batch;
    make_folder(group, run);
  }
  print_group(group);
  try {
    return run_seeds(group, run, command);
  } catch (...) {  // a new folder that holds no run goes with the error that kept the first from beginning
    std::error_code ignored;
    if (!resumed && !fs::exists(group.seed_folder(0) / "run.json", ignored))
      fs::remove_all(group.folder->path(), ignored);
    throw;
  }
}

}  // namespace

void add_train_bert(CLI::App& train, Action& action) {
  auto* bert = train.add_subcommand("bert", "Fine-tune BERT or RoBERTa on a task of GLUE, several seeds");
  auto flags = std::make_shared<BertFlags>();
  auto run = std::make_shared<RunFlags>();
  flags->add_to(*bert);
  run->add_to(*bert, "bert-<task>-<time>");
  bert->callback([&action, flags, run, bert] {
    action = [flags, run, bert] {
      apply_config(*bert, run->config);
      return run_bert(*flags, *run, *bert);
    };
  });
}

}  // namespace tessera::cli

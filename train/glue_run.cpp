#include "train/glue_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "comm/deadline.h"
#include "io/checkpoint_folder.h"
#include "io/file.h"
#include "io/utf8.h"
#include "io/weights.h"
#include "ops/attention/attention.h"
#include "pretrained/load.h"
#include "report/facts.h"
#include "runtime/error.h"
#include "train/bert_model.h"
#include "train/language_data.h"

namespace tessera::train {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr uint64_t kLargestFile = uint64_t{256} << 20;

/// The sizes that the authors of BERT published (Turc et al., arXiv:1908.08962), and BERT-base.
struct Size {
  const char* name;
  int64_t layers, d_model;
};
constexpr Size kSizes[] = {
    {"tiny", 2, 128}, {"mini", 4, 256}, {"small", 4, 512}, {"medium", 8, 512}, {"base", 12, 768}};

std::vector<std::pair<std::string, std::string>> settings_of(const GlueSettings& job) {
  std::vector<std::pair<std::string, std::string>> rows;
  const json settings = to_json(job);
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

int ranks_of(const RunRequest& request) {
  return request.world ? request.world->size() : 1;
}

/// Of several runs of one job: the seconds of all, and the mean pace.
TrainResult together(const std::vector<TrainResult>& runs) {
  TrainResult all;
  double tokens = 0;  // of a step, times the runs
  for (const TrainResult& run : runs) {
    all.seconds += run.seconds, all.ms_per_step += run.ms_per_step / double(runs.size());
    tokens += run.tokens_per_s * run.ms_per_step;
  }
  if (all.ms_per_step > 0) all.tokens_per_s = tokens / (double(runs.size()) * all.ms_per_step);
  return all;
}

fs::path predictions_of(const RunFolder& run) {
  return run.path() / "predictions";
}
fs::path model_of(const RunFolder& run) {
  return run.path() / "model";
}

}  // namespace

// ---- settings ----

SettingList GlueOptions::list() {
  SettingList list(Kept::option);
  list.group("Run");
  list.add("predict", predict, "Write predictions for the test split in the format of the GLUE server");
  list.add("save_model", save_model, "Write each trained model as a Hugging Face model directory");
  return list;
}

SettingList GlueStart::list() {
  SettingList list = settings.list();
  for (Setting& setting : list.all()) {
    if (setting.flag == "--lr") setting.help += "; default: 2e-5, with --scratch 5e-4";
    if (setting.flag == "--warmup") setting.help += "; default: 6 %";
    if (setting.flag == "--steps") setting.help += ", instead of --epochs";
    if (setting.flag == "--seed")
      setting.help = "First of the --seeds random seeds of initialisation, data order and dropout";
    if (setting.flag == "--lr" || setting.flag == "--warmup" || setting.flag == "--steps") setting.shown = "";
  }
  SettingList more(Kept::never);
  more.group("Data");
  more.add("packed", packed, "Pack texts back to back without padding (the default)");
  more.add("pad", pad, "Pad every text to --max-length tokens, so that each step costs the same");
  more.group("Model");
  more.add("scratch", scratch, "Start from random weights and a tokenizer trained on the task's texts");
  more.add("size", size, "Model size by name, with --scratch")
      .formerly("--preset")
      .one_of({"tiny", "mini", "small", "medium", "base"});
  const auto width = [&](const char* key, int64_t& value, const char* help) {
    more.add(key, value, help).range(int64_t{1}, int64_t{1} << 18).shown_as("");
  };
  width("layers", layers, "Number of blocks with --scratch; default: from --size");
  width("d_model", d_model, "Hidden size with --scratch; default: from --size");
  width("n_head", heads, "Number of attention heads with --scratch; default: heads of size 64");
  width("d_ff", d_ff, "Hidden size of the MLPs with --scratch; default: 4 x --d-model");
  more.add("vocab_size", vocab_size, "Vocabulary size with --scratch")
      .range(int64_t{261}, (int64_t{1} << 22) - 1);
  more.add("dropout", dropout,
           "Dropout rate of all layers in training; default: from config.json, 0.1 with --scratch")
      .range(0.0, 0.99)
      .shown_as("");
  more.group("Training");
  more.add("seeds", seeds, "Number of runs, which differ only in their seed")
      .range(int64_t{1}, int64_t{1000});
  more.add("epochs", epochs,
           "Epochs; of a GLUE task the model is evaluated after each unless --eval-every is given")
      .range(1e-6, 1e6);
  list.append(more);
  return list;
}

models::BertConfig GlueStart::scratch_config(const Given& given) const {
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

// ---- the group ----

GlueGroup GlueGroup::open(const GlueStart& start, const GlueOptions& options, RunRequest& request) {
  GlueGroup group(options);
  if (request.world && !request.world->leads()) {
    group.follow(request);
    return group;
  }
  request.resume.empty() ? group.begin(start, request) : group.resume(start, request);
  group.announce(request);
  return group;
}

void GlueGroup::begin(const GlueStart& start, RunRequest& request) {
  settle(start, request);
  if (!request.given.contains("--eval-every"))
    request.options.eval_every = std::max<int64_t>(1, std::llround(steps_per_epoch()));
  create_folder(request);
  is_new_ = true;
}

/// Settings and data; nothing is written. Flags that are given say something else than what follows from
/// model and data.
void GlueGroup::settle(const GlueStart& start, const RunRequest& request) {
  const Given& given = request.given;
  settings_ = start.settings, count_ = start.seeds;
  const datasets::GlueInfo& info = datasets::parse_glue_task(settings_.task);
  GlueSettings& s = settings_;
  s.set_ranks(ranks_of(request), given, false);
  s.task = info.name;
  s.data = fs::absolute(s.data).lexically_normal().string();
  if (!start.scratch) s.model = fs::absolute(s.model).lexically_normal().string();
  s.batches = start.pad ? "padded" : "packed";
  if (!given.contains("--lr")) s.lr = start.scratch ? 5e-4 : 2e-5;
  if (start.scratch) {
    tokenizer_text_ = train_glue_tokenizer(info.task, s.data, start.vocab_size);
    tokenizer_ = io::Tokenizer::parse("tokenizer.json", tokenizer_text_);
    models::BertConfig config = start.scratch_config(given);
    config.vocabulary = tokenizer_->vocab_size();
    config.head = models::BertHead::classify;
    s.bert = bert_config("config.json", pretrained::config_text(config), info.task);
  } else {
    io::check_no_adapter(s.model);
    const std::string path = s.model + "/config.json", text = io::read_file(path, kLargestFile);
    s.bert = bert_config(path, text, info.task);
    check_label_order(path, text, info.task);
    tokenizer_ = io::Tokenizer::load(s.model);
  }
  if (given.contains("--dropout"))
    s.bert.hidden_dropout = s.bert.attention_dropout = s.bert.classifier_dropout = start.dropout;
  ops::applied_dropout(s.bert.attention_dropout);  // throws, before anything is written, if it would become 0
  s.set_precision(start.precision.value_or(default_precision(request.device)));
  if (!given.contains("--max-length")) s.max_length = default_max_length(s.bert);
  check(s.max_length <= s.bert.longest(), "bert: --max-length is ", s.max_length,
        "; the model has positions for ", s.bert.longest());
  read_set();
  check(set_->train.size() >= s.batch, "bert: ", set_->train.size(), " examples give no batch of ", s.batch,
        "; try a smaller --batch-size");
  if (!given.contains("--steps"))
    s.steps = std::max<int64_t>(1, std::llround(start.epochs * steps_per_epoch()));
  if (!given.contains("--warmup")) s.warmup = s.steps * 6 / 100;
  s.validate();
}

/// The group in the folder, or that of which a seed is there.
void GlueGroup::resume(const GlueStart& start, RunRequest& request) {
  fs::path path = request.resume;
  if (!RunFolder::open(path).settings_of("bert").contains("seeds")) path = fs::canonical(path).parent_path();
  folder_ = RunFolder::open(path);
  lock_.emplace(folder_->lock());
  const json run = take_settings(request.options, request.given);
  take_steps(settings_, start.settings, request.given);
  settings_.set_ranks(ranks_of(request), request.given, true);
  for (uint64_t seed = settings_.seed; seed < settings_.seed + uint64_t(count_); ++seed) {
    const fs::path checkpoints = seeds().folder_of(seed) / "checkpoints";
    std::error_code ignored;
    if (!fs::exists(checkpoints, ignored)) continue;
    for (const int64_t step : io::CheckpointFolder(checkpoints.string()).steps())
      check(step <= settings_.steps, "train bert: seed ", seed, " is at step ", step,
            " already, past --steps ", settings_.steps, "; give a larger --steps to continue");
  }
  read_known_set(run);
  write_settings(request.options, run);
}

/// The group that rank 0 has begun or resumed, as its folder describes it; nothing is written.
void GlueGroup::follow(RunRequest& request) {
  std::string path;
  {
    const comm::TimeoutScope patience(0);  // a tokenizer may be made first
    path = request.world->host().gather_texts("")[0];
  }
  std::error_code ignored;
  check(fs::exists(fs::path(path) / "run.json", ignored), "train: rank ", request.world->rank(),
        " finds no run in ", path,
        ", where rank 0 began it; all machines of the job need a file system in common (--runs)");
  note_run(path);
  folder_ = RunFolder::open(path);
  read_known_set(take_settings(request.options, {}));
}

/// Notes the group for a launcher; of several ranks rank 0 also tells the others where it is.
void GlueGroup::announce(const RunRequest& request) const {
  const fs::path path = fs::absolute(folder_->path()).lexically_normal();
  note_run(path);
  if (ranks_of(request) == 1) return;
  request.world->host().gather_texts(path.string());
}

/// Those of the run.json in the folder, which it returns, but for the options that are given again.
json GlueGroup::take_settings(TrainerOptions& options, const Given& given) {
  const std::string file = (folder_->path() / "run.json").string();
  json run = folder_->settings();
  const json seeds = run.value("seeds", json());
  check(run.contains("job") && seeds.is_number_unsigned() && seeds >= 1 && seeds <= 1000, file,
        ": not a run of `train bert`");
  try {
    settings_ = glue_settings_from_json(run["job"]);
  } catch (const Error& error) {
    fail_at(Site::here(), file, ": ", error.what());
  }
  count_ = seeds.get<int64_t>();
  SettingList kept = options.list();
  kept.append(options_.list());
  take_options(kept, run, file, given);
  return run;
}

/// Of the run that its run.json describes.
void GlueGroup::read_known_set(const json& run) {
  const fs::path path = folder_->path();
  tokenizer_ =
      io::Tokenizer::load(settings_.model.empty() ? (path / "tokenizer.json").string() : settings_.model);
  read_set();
  const json known = run.value("data", json::object());
  check(known.is_object() && known.value("fingerprint", json()) == set_->fingerprint(), settings_.data,
        ": the data or the tokenizer differs from those that ", path.string(), " began with");
}

void GlueGroup::read_set() {
  const datasets::GlueTask task = datasets::parse_glue_task(settings_.task).task;
  check(tokenizer_->vocab_size() <= settings_.bert.vocabulary, "bert: the tokenizer ", tokenizer_->path(),
        " has ", tokenizer_->vocab_size(), " tokens, the model's table ", settings_.bert.vocabulary,
        " rows; they do not belong together");
  set_.emplace(read_glue(task, settings_.data, *tokenizer_, settings_.max_length, options_.predict));
}

void GlueGroup::write_settings(const TrainerOptions& options, json run) {
  TrainerOptions trainer = options;
  SettingList kept = trainer.list();
  kept.append(options_.list());
  run["job"] = to_json(settings_);
  run["build"] = report::build_facts();
  run["options"] = to_json(kept, Kept::option);
  folder_->write_settings(run);
}

/// With the tokenizer that was made for it.
void GlueGroup::create_folder(const RunRequest& request) {
  folder_ = RunFolder::create(request.runs,
                              request.name.empty() ? stamped("bert-" + settings_.task) : request.name);
  lock_.emplace(folder_->lock());
  std::error_code ignored;
  fs::remove(folder_->checkpoints(), ignored);  // its seeds have their own
  if (!tokenizer_text_.empty()) {
    io::write_file((folder_->path() / "tokenizer.json").string(), tokenizer_text_);
    io::write_file((folder_->path() / "tokenizer_config.json").string(), bert_tokenizer_config());
  }
  write_settings(request.options, {{"model", "bert"},
                                   {"started", report::utc_now()},
                                   {"device", request.device.name()},
                                   {"gpu", request.device.info().name},
                                   {"seeds", count_},
                                   {"data",
                                    {{"train", set_->train.size()},
                                     {"dev", set_->dev.front().items.size()},
                                     {"tokens", set_->train.tokens()},
                                     {"fingerprint", set_->fingerprint()}}}});
}

void GlueGroup::discard_folder() const {
  std::error_code ignored;
  if (is_new_ && !fs::exists(seeds().folder_of(settings_.seed) / "run.json", ignored))
    fs::remove_all(folder_->path(), ignored);
}

SeedGroup GlueGroup::seeds() const {
  return {.folder = *folder_,
          .first_seed = settings_.seed,
          .count = count_,
          .steps = settings_.steps,
          .make = [this](uint64_t seed) { return std::make_unique<GlueRecipe>(*this, seed); }};
}

std::string GlueGroup::header() const {
  const GlueSettings& job = settings_;
  const models::BertConfig& c = job.bert;
  const GlueSet& set = *set_;
  std::string text = fmt::format("bert on {}: {} seeds from {}\n", set.info().folder, count_, job.seed);
  text += fmt::format("  model     {}: {} blocks, d {}, {} heads of {}, d_ff {}, vocabulary {}\n",
                      job.model.empty() ? "from scratch" : job.model, c.layers, c.d_model, c.heads,
                      c.d_model / c.heads, c.d_ff, c.vocabulary);
  if (c.hidden_dropout > 0 || c.attention_dropout > 0)
    text += fmt::format("  dropout   {:g} of rows, {:.4g} of attention probabilities (in steps of 1/256)\n",
                        c.hidden_dropout, ops::applied_dropout(c.attention_dropout));
  if (job.factors.factorizes()) text += fmt::format("  weights   {}\n", job.factors.description());
  if (job.slice.slices()) {
    text += fmt::format("  slice     {}\n", job.slice.description());
    if (job.slice.weight_grad == "none")
      text += job.missing_grad == "skip"
                  ? "            the weights of these layers get no gradient: they stay as they are\n"
                  : "            the weights of these layers get no gradient: they only decay\n";
  }
  if (job.drop.drops()) text += fmt::format("  dropbp    {}\n", job.drop.description());
  if (job.trained != "all")
    text += fmt::format("  trained   {}\n", job.trained == "biases" ? "biases and the head" : "the head");
  if (job.missing_grad == "skip") text += "  missing   parameters without a gradient are skipped\n";
  std::string dev;
  for (const eval::GluePart& part : set.dev)
    dev += fmt::format("{}{} {}", dev.empty() ? "" : ", ", part.items.size(), part.name);
  text += fmt::format("  data      {} examples of {:.1f} tokens, {} cut to {}; {}; batches of {}, {}\n",
                      set.train.size(), double(set.train.tokens()) / double(set.train.size()),
                      set.train.cut(), job.max_length, dev, job.batch, job.batches);
  text +=
      fmt::format("  training  {} steps ({:.2f} epochs), lr {:g} ({}, {} of warm-up), weight decay {:g}\n",
                  job.steps, double(job.steps * job.texts_per_step()) / double(set.train.size()), job.lr,
                  job.schedule, job.warmup, job.weight_decay);
  text += job.step_line();
  text += fmt::format("  run       {}\n", folder_->path().string());
  return text;
}

fs::path GlueGroup::write_results(const SeedsEnd& end, Device device, const std::string& file) const {
  const fs::path page = folder_->path() / "report.html";
  write_seeds_report(page, fmt::format("BERT on {}", set_->info().folder), end.results,
                     settings_of(settings_));
  json summary = {{"config", to_json(settings_)},
                  {"build", report::build_facts()},
                  {"run", folder_->path().string()},
                  {"seeds", count_},
                  {"metrics", to_json(end.results)}};
  summary["diverged"] = end.results.diverged;
  summary["resumed_after_divergence"] = end.results.resumed;
  io::write_file((folder_->path() / "summary.json").string(), io::json_text(summary, 2) + "\n");
  if (file.empty()) return page;
  // The times are those of this call, so the folder's summary has none.
  if (!end.trained.empty())
    summary.update(costs_json(GlueRecipe(*this, settings_.seed), together(end.trained), device));
  io::write_file(file, io::json_text(summary, 2) + "\n");
  return page;
}

void GlueGroup::save_model(const models::Bert& model, const fs::path& folder) const {
  std::error_code ignored;
  io::AtomicFolder files(folder.string(), io::AtomicFolder::Existing::replace);
  pretrained::save(model, files.path());
  const fs::path from = settings_.model.empty() ? folder_->path() : fs::path(settings_.model);
  for (const char* const name : {"tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json",
                                 "merges.txt", "special_tokens_map.json", "added_tokens.json"})
    if (fs::exists(from / name, ignored))
      io::write_file(files.path() + "/" + name, io::read_file((from / name).string(), kLargestFile));
  files.publish();
}

// ---- one seed ----

GlueRecipe::GlueRecipe(const GlueGroup& group, uint64_t seed)
    : group_(group), settings_(group.settings()), options_(group.options()) {
  settings_.seed = seed;
}

void GlueRecipe::spread(const optim::Sharding& sharding) {
  const char* const measures = settings_.drop.calibrates()       ? "--dropbp-rates sensitivity"
                               : settings_.slice.is_auto()       ? "--rows auto"
                               : settings_.slice.probe_every > 0 ? "--probe-gradient"
                                                                 : nullptr;
  check(!sharding.gradients || !measures, "train bert: ", measures ? measures : "",
        " measures whole gradients, of which each rank has a part alone with --zero 2; use --zero 1");
  settings_.sharding = sharding;
}

void GlueRecipe::prepare(const RunFolder& run, Device device, bool resumed) {
  const bool restored = resumed && !io::CheckpointFolder(run.checkpoints().string()).steps().empty();
  job_.emplace(settings_, device, &group_.set(), restored);
}

std::string GlueRecipe::header(const RunFolder& run, bool captured, int64_t first_step) {
  const Device device = job_->device();
  std::string text = fmt::format("seed {} on {} ({}), {}{}: steps {} to {}, {}\n", settings_.seed,
                                 device.name(), device.info().name, name_of(settings_.precision()),
                                 device.is_cuda() ? captured ? ", captured" : ", eager" : "", first_step,
                                 settings_.steps, run.path().string());
  return first_step == 0 ? text + origin() : text;
}

/// Which weights come from the file and which do not: a head that is new learns, one that was expected in the
/// file and is not there would be missed.
std::string GlueRecipe::origin() const {
  if (settings_.model.empty()) return "  weights   all initialised at random\n";
  const auto listed = [](const std::vector<std::string>& names) {
    constexpr size_t kShown = 8;
    std::string text;
    for (size_t i = 0; i < std::min(kShown, names.size()); ++i) text += (i ? ", " : "") + io::shown(names[i]);
    return names.size() > kShown ? text + fmt::format(" and {} more", names.size() - kShown) : text;
  };
  const pretrained::LoadReport& loaded = job_->loaded();
  std::string text = fmt::format(
      "  weights   from {}; {}\n", settings_.model,
      loaded.fresh.empty() ? "none initialised at random" : "initialised at random: " + listed(loaded.fresh));
  if (!loaded.ignored.empty())
    text += fmt::format("            in the file, but not used: {}\n", listed(loaded.ignored));
  return text;
}

void GlueRecipe::report(const RunFolder& run, const TrainResult& result) {
  if (result.outcome == Outcome::finished) write_extras(run);
  write_page(run);
}

void GlueRecipe::complete(const RunFolder& run) {
  write_extras(run);
  write_page(run);
}

/// The page is written last: where it is, all is that the run was asked for then.
void GlueRecipe::write_extras(const RunFolder& run) {
  if (options_.predict)
    for (const std::string& file : write_submissions(*job_, group_.set(), predictions_of(run)))
      group_.say(fmt::format("predictions: {}\n", file));
  if (!options_.save_model) return;
  group_.save_model(job_->model(), model_of(run));
  group_.say(fmt::format("model: {}\n", model_of(run).string()));
}

bool GlueRecipe::lacks(const RunFolder& run) const {
  std::error_code ignored;
  const auto files = submission_files(group_.set(), predictions_of(run));
  const auto missing = [&](const std::string& file) { return !fs::exists(file, ignored); };
  return (options_.predict && std::ranges::any_of(files, missing)) ||
         (options_.save_model && !fs::is_directory(model_of(run), ignored));
}

void GlueRecipe::write_page(const RunFolder& run) const {
  write_run_report(run.path() / "report.html",
                   fmt::format("BERT on {}, seed {}", group_.set().info().folder, settings_.seed), run,
                   settings_of(settings_));
}

json GlueRecipe::throughput(const TrainResult& result) const {
  const double texts = double(settings_.texts_per_step());
  return {{"texts_per_s", result.ms_per_step > 0 ? texts / result.ms_per_step * 1e3 : 0.0}};
}

std::string GlueRecipe::conclusion(const RunFolder&, const TrainResult& result) const {
  std::string line;
  for (const auto& [name, value] : result.evaluation)
    line += fmt::format("{}{} {:.4f}", line.empty() ? "" : ", ", name.substr(5), value);
  return fmt::format("evaluation: {}\n", line);
}

}  // namespace tessera::train

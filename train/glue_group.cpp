#include "train/glue_group.h"

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
#include "train/glue_run.h"
#include "train/tokenizer_files.h"

namespace tessera::train {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr uint64_t kLargestFile = uint64_t{256} << 20;

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

}  // namespace

std::vector<std::pair<std::string, std::string>> report_rows(const GlueSettings& job) {
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
  settings_ = settings_of_run<GlueSettings>(file, run, "bert");
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
                     report_rows(settings_));
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

}  // namespace tessera::train

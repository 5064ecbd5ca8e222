#include "train/mlm_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/checksum.h"
#include "io/file.h"
#include "ops/attention/attention.h"
#include "plan/ranks.h"
#include "pretrained/load.h"
#include "runtime/error.h"
#include "train/bert_model.h"
#include "train/seeds_report.h"
#include "train/tokenizer_files.h"

namespace tessera::train {

namespace fs = std::filesystem;
using nlohmann::json;

SettingList MlmStart::list() {
  SettingList list(Kept::never);
  list.group("Data");
  list.add("text", text.files, "--task mlm: text files, one document each");
  list.add("tokenizer", text.tokenizer,
           "--task mlm: tokenizer; default: that of --data or --model, else one trained on --text");
  list.add("validation", text.validation,
           "--task mlm: share of each document, at its end, held out for validation")
      .range(0.0, 0.9);
  list.add("piece", text.piece,
           "--task mlm: cut the text into documents of this many bytes, each with its held-out share; 0: one "
           "per file")
      .range(int64_t{0}, int64_t{1} << 40);
  const SettingList own = settings.list();
  for (const Setting& setting : own.all())
    if (setting.key == "mask") list.all().push_back(setting);
  return list;
}

SettingList MlmOptions::list() {
  SettingList list(Kept::option);
  list.group("Run");
  list.add("eval_tokens", eval_tokens, "--task mlm: maximum held-out tokens per evaluation")
      .range(int64_t{1}, int64_t{1} << 40);
  return list;
}

bool is_mlm_run(const json& run) {
  const json job = run.value("job", json());
  return job.is_object() && job.value("task", json()) == "mlm";
}

// ---- settings and data ----

void MlmRecipe::begin(const Given& given, Device device) {
  given_ = given;
  settings_ = mlm_settings(start_, text_, given, device);
}

MlmSettings mlm_settings(const GlueStart& start, const MlmStart& text, const Given& given, Device device) {
  const GlueSettings& asked = start.settings;
  MlmSettings settings = text.settings;
  static_cast<TrainingSettings&>(settings) = asked;
  settings.task = "mlm", settings.batch = asked.batch, settings.max_length = asked.max_length;
  settings.data = asked.data, settings.model = asked.model, settings.factors = asked.factors;
  for (std::string* const folder : {&settings.data, &settings.model})
    if (!folder->empty()) *folder = fs::absolute(*folder).lexically_normal().string();
  if (!given.contains("--lr")) settings.lr = settings.model.empty() ? 5e-4 : 5e-5;
  if (settings.model.empty()) {
    settings.bert = start.scratch_config(given);
    settings.bert.head = models::BertHead::masked_lm;
  } else {
    const pretrained::Config config =
        pretrained::read_config(settings.model, {.head = models::BertHead::masked_lm});
    const auto* const bert = std::get_if<models::BertConfig>(&config.model);
    check(bert != nullptr, "bert: ", settings.model, " holds a model of type ", config.type,
          "; expected bert or roberta");
    settings.bert = *bert;
  }
  if (given.contains("--dropout"))
    settings.bert.hidden_dropout = settings.bert.attention_dropout = settings.bert.classifier_dropout =
        start.dropout;
  ops::applied_dropout(settings.bert.attention_dropout);  // throws if it would become 0
  settings.set_precision(start.precision.value_or(default_precision(device)));
  if (!given.contains("--max-length")) settings.max_length = default_max_length(settings.bert);
  check(settings.max_length >= 3 && settings.max_length <= settings.bert.longest(), "mlm: --max-length is ",
        settings.max_length, "; expected 3 ([CLS], a token, [SEP]) to ", settings.bert.longest(),
        ", the positions of the model");
  MlmSettings known = settings;  // but for what follows from the text
  if (!given.contains("--steps")) known.steps = MlmSettings::kLargest;
  if (!given.contains("--warmup")) known.warmup = 0;
  known.validate();
  return settings;
}

void MlmRecipe::resume(const std::string& path, const json& run, const Given& given) {
  check(is_mlm_run(run), path, ": not a run of `train bert --task mlm`");
  given_ = given;
  settings_ = settings_of_run<MlmSettings>(path, run, "bert --task mlm");
  take_steps(settings_, start_.settings, given);
  had_evaluation_ = run.contains("evaluation");
}

void MlmRecipe::prepare(const RunFolder& run, Device device, bool resumed) {
  const std::string own = (run.path() / "data").string();
  if (!resumed) make_data(own);
  open_data(own);
  const std::string& fingerprint = data_->tokenizer().fingerprint();
  if (!resumed) settings_.fingerprint = fingerprint;
  check(settings_.fingerprint == fingerprint, "mlm: the tokenizer in ", own, " has the fingerprint ",
        fingerprint, "; the run's had ", settings_.fingerprint);
  if (resumed) check_same_data(run.settings(), *data_, settings_.data.empty() ? own : settings_.data);
  if (!resumed) set_steps();
  const bool restart = !resumed || !run.has_checkpoints();
  job_.emplace(settings_, device, *data_, options_.eval_tokens, restart ? settings_.model : std::string(),
               !restart);
  if (!job_->held_out().empty()) return;
  check_not_evaluated(had_evaluation_,
                      eval_every > 0 && given_.contains("--eval-every") ? "--eval-every"
                      : given_.contains("--eval-tokens")                ? "--eval-tokens"
                                                                        : "",
                      settings_.data.empty() ? own : settings_.data);
}

/// Shards and tokenizer in the run's folder, or the tokenizer alone if the shards lie elsewhere.
void MlmRecipe::make_data(const std::string& own) {
  LanguageText text = text_.text;
  if (text.tokenizer.empty())
    text.tokenizer =
        settings_.data.empty() ? settings_.model : tokenizer_folder(settings_.data, settings_.model);
  if (!settings_.data.empty())
    check(fs::is_directory(settings_.data), "mlm: --data: ", settings_.data,
          " is not a directory; tessera data tokenize makes one from text");
  // What it lacks is told of the user's file, not of the copy, and before the text is tokenized.
  if (!text.tokenizer.empty()) Masking(io::Tokenizer::load(text.tokenizer), settings_.mask);
  if (!settings_.data.empty()) {
    io::make_folder(own);
    copy_tokenizer(text.tokenizer, own);
  } else {
    text.kind = "bert", text.vocab_size = start_.vocab_size;
    const datasets::Tokenized done = write_language_data(text, own);
    on_invalid(done.invalid, done.bytes);
    cut_at_spaces_ = done.one_line;
  }
  const int64_t tokens = io::Tokenizer::load(own).vocab_size();
  if (settings_.model.empty()) settings_.bert.vocabulary = tokens;
  check(tokens <= settings_.bert.vocabulary, "mlm: the tokenizer has ", tokens, " tokens, the model in ",
        settings_.model, " has ", settings_.bert.vocabulary);
}

void MlmRecipe::open_data(const std::string& own) {
  const int64_t length = settings_.text_length();
  data_.emplace(settings_.data.empty() ? own : settings_.data, own, length, false, length);
}

void MlmRecipe::set_steps() {
  const double per_epoch = double(data_->train().size() / settings_.batch) / double(settings_.accumulate);
  if (!given_.contains("--steps"))
    settings_.steps = std::max<int64_t>(1, std::llround(start_.epochs * per_epoch));
  if (!given_.contains("--warmup")) settings_.warmup = settings_.steps * 6 / 100;
  settings_.validate();
}

// ---- what is said of it ----

json MlmRecipe::facts() const {
  json facts = {{"data", {{"fingerprint", data_->fingerprint()}}}};
  if (job_->held_out().empty()) return facts;
  io::Xxh3 hash;
  for (const std::vector<int64_t>& text : job_->held_out())
    hash.add(data_->tokenizer().decode(std::vector<int32_t>(text.begin(), text.end())));
  facts["evaluation"] = {{"protocol", "masked"},
                         {"length", settings_.max_length},
                         {"mask", settings_.mask},
                         {"sequences", job_->held_out().size()},
                         {"text", hash.digits()}};
  return facts;
}

std::string MlmRecipe::header(const RunFolder& run, bool captured, int64_t first_step) {
  const Device device = job_->device();
  const models::BertConfig& c = settings_.bert;
  int64_t parameters = 0;
  for (const auto& parameter : nn::parameters(job_->model())) parameters += parameter.tensor.count();
  const double epochs = double(settings_.steps * settings_.texts_per_step()) / double(data_->train().size());
  std::string text = device_line("bert, masked language model,", device, settings_.precision(), captured);
  text += fmt::format("  model     {} parameters: {} blocks, d {}, {} heads, d_ff {}, vocabulary {}, {}\n",
                      report::format_count(double(parameters)), c.layers, c.d_model, c.heads, c.d_ff,
                      c.vocabulary, settings_.model.empty() ? "from scratch" : "from " + settings_.model);
  text += fmt::format(
      "  data      {} tokens to train, {} sequences held out{}; {} sequences of {} a step, {:g} % masked\n",
      report::format_count(double(data_->train().tokens())), job_->held_out().size(),
      cut_at_spaces_ > 0 ? fmt::format(" (documents of one line, cut at a space: {})", cut_at_spaces_) : "",
      settings_.texts_per_step(), settings_.max_length, 100 * settings_.mask);
  text += fmt::format("  training  steps {} to {} ({:.2f} epochs), lr {:g} ({}, {} of warm-up), seed {}\n",
                      first_step, settings_.steps, epochs, settings_.lr, settings_.schedule, settings_.warmup,
                      settings_.seed);
  text += settings_.step_line();
  text += settings_.memory_line(settings_.planned(device),
                                plan::arena_sizes(c, settings_.planned_step(device)), device, ranks_);
  return text + fmt::format("  run       {}\n", run.path().string());
}

void MlmRecipe::report(const RunFolder& run, const TrainResult& result) {
  if (result.outcome == Outcome::finished) {
    io::AtomicFolder files((run.path() / "model").string(), io::AtomicFolder::Existing::replace);
    pretrained::save(job_->model(), files.path());
    copy_tokenizer((run.path() / "data").string(), files.path());
    files.publish();
  }
  std::vector<std::pair<std::string, std::string>> rows;
  const json settings = to_json(settings_);
  for (const auto& [name, value] : settings.items())
    rows.emplace_back(name, value.is_string() ? value.get<std::string>() : value.dump());
  write_run_report(run.path() / "report.html", "BERT, masked language model", run, rows);
}

json MlmRecipe::throughput(const TrainResult& result) const {
  const double texts = double(settings_.texts_per_step());
  return {{"texts_per_s", result.ms_per_step > 0 ? texts / result.ms_per_step * 1e3 : 0.0}};
}

std::string MlmRecipe::conclusion(const RunFolder& run, const TrainResult& result) const {
  std::string text;
  const Values& e = result.evaluation;
  if (const auto nll = e.find("eval_nll"); nll != e.end())
    text = fmt::format("held-out text: {:.4f} nats per masked token (perplexity {:.2f}), accuracy {:.4f}\n",
                       nll->second, std::exp(nll->second), e.at("eval_accuracy"));
  return text + fmt::format("model: {}\n", fs::absolute(run.path() / "model").lexically_normal().string());
}

}  // namespace tessera::train

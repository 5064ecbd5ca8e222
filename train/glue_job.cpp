#include "train/glue_job.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "autograd/tape.h"
#include "datasets/glue_submission.h"
#include "io/file.h"
#include "plan/plan.h"
#include "pretrained/load.h"
#include "runtime/allocator.h"
#include "runtime/text.h"
#include "train/bert_model.h"
#include "train/evaluating.h"
#include "train/gradient_probe.h"
#include "train/loader_share.h"
#include "train/random_purpose.h"
#include "train/run_folder.h"

namespace tessera::train {

using nlohmann::json;

namespace {

/// The head that the task needs, in the place of what a config.json says.
pretrained::ConfigOptions head_options(datasets::GlueTask task) {
  const datasets::GlueInfo& info = datasets::glue_info(task);
  return {.head = info.labels.empty() ? models::BertHead::regress : models::BertHead::classify,
          .labels = info.classes()};
}

}  // namespace

// ---- the settings ----

models::BertConfig bert_config(const std::string& path, const std::string& text, datasets::GlueTask task) {
  const pretrained::Config config = pretrained::parse_config(path, text, head_options(task));
  const auto* const bert = std::get_if<models::BertConfig>(&config.model);
  check(bert != nullptr, "bert: ", path, " is of a model of type ", config.type,
        "; expected bert or roberta");
  return *bert;
}

void check_label_order(const std::string& path, const std::string& text, datasets::GlueTask task) {
  const datasets::GlueInfo& info = datasets::glue_info(task);
  const json config = json::parse(text);
  const json names = config.value("id2label", json::object());
  std::vector<std::string> theirs, ours(info.labels.begin(), info.labels.end());
  for (size_t i = 0; i < names.size(); ++i) {
    const json name = names.value(std::to_string(i), json());
    if (!name.is_string()) return;
    theirs.push_back(name.get<std::string>());
    for (char& c : theirs.back()) c = char(std::tolower(static_cast<unsigned char>(c)));
  }
  if (theirs == ours || !std::ranges::is_permutation(theirs, ours)) return;
  fail_at(Site::here(), "bert: ", path, ": the classes of id2label are ", joined(theirs),
          ", those of the task ", info.name, " are ", joined(ours),
          ": reorder the rows of the classifier and id2label, or name the classes LABEL_0, LABEL_1, ... to "
          "train the classifier as it is");
}

SettingList GlueSettings::list() {
  SettingList list;
  list.group("Data");
  list.add("task", task, "cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli; or mlm: pretrain on --text")
      .shown_as("");
  list.add("data", data,
           "Directory with the task's files (train.tsv, dev.tsv, ...), or with one directory per task");
  list.add("max_length", max_length,
           "Maximum tokens per text or pair; longer ones are truncated; default: 128, or the model's maximum")
      .range(int64_t{1}, kLargest)
      .shown_as("");
  list.add("batch", batch, "Texts or pairs per micro-batch")
      .named("--batch-size")
      .formerly("--batch")
      .range(int64_t{1}, kLargest);
  list.add_hidden("batches", batches).one_of({"packed", "padded"});
  list.group("Model");
  list.add("model", model,
           "Hugging Face model directory with config.json, weights and tokenizer, or run folder of a "
           "finished run");
  list.add_json("config", {.get = [this] { return json::parse(pretrained::config_text(bert)); },
                           .set =
                               [this](const json& stored) {
                                 bert = bert_config("bert job", stored.dump(),
                                                    datasets::parse_glue_task(task).task);
                               }});
  factors.add_to(list);
  add_to(list);
  add_ranks(list).absent_means(1);
  add_data_order(list);
  slice.add_to(list);
  drop.add_to(list);
  list.add("missing_grad", missing_grad, "Parameters without a gradient: treat it as zero, or skip them")
      .one_of({"zero", "skip"})
      .absent_means("zero");
  list.add("trained", trained, "Parameters to train: all, biases (and the head), or the head alone")
      .named("--train")
      .one_of({"all", "biases", "head"})
      .absent_means("all");
  return list;
}

void GlueSettings::validate() const {
  const datasets::GlueInfo& info = datasets::parse_glue_task(task);
  bert.validate();
  check_values(GlueSettings(*this).list(), "bert");
  check_training("bert", bert.dtype);
  const pretrained::ConfigOptions wanted = head_options(info.task);
  check(bert.head == wanted.head && bert.labels == wanted.labels, "bert: the head of ", bert.labels,
        " labels is not that of ", info.folder);
  check(max_length <= bert.longest(), "bert: max_length (--max-length) is ", max_length,
        "; the model has positions for ", bert.longest());
  check(warmup <= steps, "bert: warmup is ", warmup, " of ", steps, " steps");
  slice.validate();
  check_bert_forms(factors, bert, !model.empty());
  check_optimizer_form(optimizer, factors);
  check(!slice.slices() || !factors.factorizes(), "bert: --slice with --form ", factors.form,
        "; the sliced backward pass needs dense weights, so leave one of them out");
  drop.validate();
  check(!slice.is_auto() || !drop.drops(),
        "bert: --rows auto with --dropbp; the variance is estimated with all branches, so leave one of them "
        "out");
  check(!drop.drops() || optimizer != "galore",
        "bert: --dropbp with --optimizer galore; a branch that is dropped where gradients are decomposed "
        "(--galore-every) has none, and would train in an arbitrary subspace, so leave one of them out");
  check(trained == "all" || !(slice.slices() || drop.drops() || factors.factorizes()), "bert: --train ",
        trained,
        " with --slice, --dropbp or --form, which are of weights that it does not train; leave one of them "
        "out");
  check(
      trained == "all" || (optimizer != "muon" && optimizer != "galore"), "bert: --train ", trained,
      " with --optimizer ", optimizer,
      ", which updates the hidden matrices that it does not train; take --optimizer adamw, which updates the "
      "rest");
  check(missing_grad == "zero" || ((optimizer == "adamw" || optimizer == "sgd") && momentum_reset == 0),
        "bert: --missing-grad skip needs --optimizer adamw or sgd without --momentum-reset; leave one out");
}

json to_json(const GlueSettings& settings) {
  return to_json(GlueSettings(settings).list(), Kept::job);
}

GlueSettings glue_settings_from_json(const json& in) {
  return job_settings<GlueSettings>(in, "bert job");
}

// ---- the job ----

namespace {

models::Bert make_model(const GlueSettings& settings, const Rng& rng, Device device, bool restored,
                        pretrained::LoadReport& report) {
  const MemoryTag tag("parameters");
  models::Bert model = settings.model.empty()
                           ? models::Bert(settings.bert, rng, device)
                           : load_bert_as(settings.bert, settings.model, rng, device, &report);
  if (settings.factors.factorizes())
    settings.factors.apply(pretrained::linear_modules(model), rng,
                           {.has_weights = !settings.model.empty(), .restored = restored});
  if (settings.trained != "all")
    nn::freeze(model, [biases = settings.trained == "biases"](const std::string& name) {
      return !name.starts_with("classifier.") && !(biases && name.ends_with(".bias"));
    });
  return model;
}

}  // namespace

GlueJob::GlueJob(const GlueSettings& settings, Device device, const GlueSet* set, bool restored)
    : Job(device),
      settings_(settings),
      rng_(seed_for(RandomPurpose::initialisation, settings.seed)),
      slice_rng_(seed_for(RandomPurpose::row_choice, settings.seed)),
      model_(make_model(settings, rng_, device, restored, loaded_)),
      optimizer_(settings.make_optimizer(nn::parameters(model_), settings.bert.dtype, 0.999, {},
                                         structure_of(pretrained::linear_modules(model_)))),
      set_(set) {
  use_for(RandomPurpose::dropout, settings.seed, rng_);
  nn::set_training(model_, true);
  if (settings.slice.slices()) sliced_ = settings.slice.apply(pretrained::linear_modules(model_), slice_rng_);
  if (set) divide({0, int(settings.accumulate)});
  keep("model", model_);
  train_with(optimizer_);
  draws_from("rng", rng_);
  if (settings.slice.slices()) draws_from("slice_rng", slice_rng_);
  if (settings.slice.is_auto()) {
    auto_rows_.emplace(model_, sliced_, settings.slice, slice_rng_);
    keep("row_shares", auto_rows_->shares);
    keep("row_factor", auto_rows_->factor);
  }
  if (settings.drop.drops()) start_drops();
}

// ---- data ----

datasets::LoaderOptions GlueJob::loader_options(const Rng& order, const datasets::LoaderShare& share) const {
  return {.size = settings_.batch,
          .shuffle = &order,
          .drop_last = true,
          .workers = device().is_cuda() ? 2 : 1,
          .order = settings_.data_order,
          .share = share,
          .device = device()};
}

void GlueJob::divide(const dist::Share& share) {
  first_ = uint64_t(share.first);
  if (set_ == nullptr) return;  // batches come by load()
  Rng order(seed_for(RandomPurpose::text_order, settings_.seed));
  loader_.emplace(set_->train, loader_options(order, loader_share(share, settings_.accumulate)));
}

/// Whichever rank trains on it.
datasets::GlueBatch GlueJob::micro_batch(uint64_t index) const {
  Rng order(seed_for(RandomPurpose::text_order, settings_.seed));
  datasets::LoaderOptions options = loader_options(order, {});
  options.workers = options.depth = 1;
  datasets::Loader<datasets::GlueItems> all(set_->train, options);
  datasets::LoaderState at = all.state();
  at.batch = index;
  all.set_state(at);
  return all.next();
}

void GlueJob::batch(uint64_t index) {
  check(loader_.has_value(), "bert: there is nothing to train on; give the job a GlueSet");
  const uint64_t each = uint64_t(settings_.accumulate), step = index / each, micro = index % each;
  if (settings_.drop.calibrates() && int64_t(step) == settings_.steps / 10 && micro == first_)
    calibrate_drops(step);
  if (auto_rows_) {
    auto_rows_->apply();  // of the shares, which a checkpoint may have brought
    if (step % uint64_t(settings_.slice.estimate_every) == 0 && micro == first_) estimate_rows(step);
  }
  datasets::LoaderState at = loader_->state();
  at.batch = index;
  loader_->set_state(at);
  load(loader_->next());
  drop_step_ = step;
  if (!probes_.empty() && step % uint64_t(settings_.slice.probe_every) == 0 && micro == 0) probe(step);
}

// ---- comparisons with the dense gradient ----

bool GlueJob::begin(const RunFolder& run) {
  if (settings_.slice.probe_every > 0) probes_ = run.path() / "probes.jsonl";
  if (auto_rows_) row_log_ = run.path() / "rows.jsonl";
  return false;
}

namespace {

/// Random numbers of a comparison of gradients in `step`, which the training never draws: the same on all
/// ranks.
Rng::State apart(RandomPurpose purpose, uint64_t seed, uint64_t step) {
  return {seed_for(purpose, seed) ^ 1, (step + 1) << 32};
}

/// Appends the line of a step, in place of those of that step and later ones: a resumed run may meet a step
/// again.
void write_line(const std::filesystem::path& file, uint64_t step, json line) {
  line["step"] = step;
  std::string kept;
  if (std::filesystem::exists(file)) {
    std::istringstream lines(io::read_file(file.string(), int64_t{1} << 30));
    for (std::string old; std::getline(lines, old);)
      if (json::parse(old).value("step", uint64_t{0}) < step) kept += old + "\n";
  }
  io::write_file(file.string(), kept + line.dump() + "\n");
}

}  // namespace

/// With the dropout masks of the micro-batch that follows, rows of its own, and no branch dropped.
void GlueJob::probe(uint64_t step) {
  const Rng::State dropout = rng_.state(), rows = slice_rng_.state();
  slice_rng_.set_state(apart(RandomPurpose::row_choice, settings_.seed, step));
  const auto backward_again = [&] {
    rng_.set_state(dropout);
    backward();
  };
  if (drops_) drops_->set_dropped(std::vector(drops_->size(), false));
  const auto distances = probe_gradient(sliced_, optimizer_, SliceSettings::kProbeDraws, backward_again);
  rng_.set_state(dropout), slice_rng_.set_state(rows);
  json line{{"draws", SliceSettings::kProbeDraws}};
  for (const GradientDistance& each : distances)
    line["gradients"][each.name] = {
        {"cosine", each.cosine}, {"bias", each.bias}, {"variance", each.variance}};
  write_line(probes_, step, std::move(line));
}

/// On the first micro-batches of this step and the next ones, with dropout masks and rows of its own: each
/// rank finds the same shares. What accumulation divides both variances by does not change their ratio.
void GlueJob::estimate_rows(uint64_t step) {
  const Rng::State dropout = rng_.state(), rows = slice_rng_.state();
  Rng::State draws = apart(RandomPurpose::row_choice, settings_.seed, step);
  draws.seed ^= 2;  // not those of a probe
  slice_rng_.set_state(draws);
  Rng::State masks = dropout;
  const auto load_batch = [&](int i) {
    load(micro_batch(step * uint64_t(settings_.accumulate) + uint64_t(i)));
    masks = apart(RandomPurpose::dropout, settings_.seed, step);
    masks.seed ^= uint64_t(i) << 1;
    const int64_t all = batch_.tokens.count();
    const bool padded = settings_.batches == "padded";
    return AutoRows::BatchRows{
        .rows = all, .valid = padded ? batch_.cu_seqlens.to(DType::i64).to_vector<int64_t>().back() : all};
  };
  const auto backward_again = [&] {
    rng_.set_state(masks);
    backward();
  };
  Event begin(Device::cpu()), end(Device::cpu());
  device().synchronize();
  begin.record();
  const RowEstimate found =
      auto_rows_->estimate(optimizer_, {.load = load_batch, .backward = backward_again});
  device().synchronize();
  end.record();
  rng_.set_state(dropout), slice_rng_.set_state(rows);
  if (row_log_.empty() || first_ != 0) return;
  json line{{"batch_variance", found.batch_variance},
            {"added_variance", found.added_variance},
            {"held", found.held},
            {"passes", found.passes},
            {"seconds", end.milliseconds_since(begin) / 1e3},
            {"modelled_time", found.seconds_dense > 0 ? found.seconds_sliced / found.seconds_dense : 1}};
  const std::vector<double> shares = auto_rows_->shares.to_vector<double>();
  const std::vector<std::string> groups = auto_rows_->groups();
  for (size_t g = 0; g < groups.size(); ++g) line["shares"][groups[g]] = shares[g];
  write_line(row_log_, step, std::move(line));
}

// ---- DropBP ----

void GlueJob::start_drops() {
  drops_.emplace(model_, settings_.max_length);
  drop_rates_ = Tensor::full({int64_t(drops_->size())}, settings_.drop.share, DType::f64, Device::cpu());
  if (settings_.drop.calibrates()) keep("drop_rates", drop_rates_);
}

/// Of the batch that is loaded.
void GlueJob::backward() {
  const F32MathScope math(settings_.f32_math);
  Tape tape({.loss_scale = optimizer_.loss_scale()});
  tape.backward(model_.loss(batch_, targets_));
}

/// On the first micro-batch of the step, with dropout masks and rows of its own: each rank finds the same
/// rates.
void GlueJob::calibrate_drops(uint64_t step) {
  load(micro_batch(step * uint64_t(settings_.accumulate)));
  const Rng::State dropout = rng_.state(), rows = slice_rng_.state();
  const auto backward_again = [&] {
    rng_.set_state(apart(RandomPurpose::dropout, settings_.seed, step));
    slice_rng_.set_state(apart(RandomPurpose::row_choice, settings_.seed, step));
    backward();
  };
  const std::vector<double> sensitivities = drop_sensitivities(*drops_, optimizer_, backward_again);
  rng_.set_state(dropout), slice_rng_.set_state(rows);
  std::vector<double> flops, rates;
  for (const nn::DropBP::Branch& branch : drops_->branches()) flops.push_back(branch.flops);
  for (const int tenths : nn::allocate_drop_rates(sensitivities, flops, settings_.drop.share))
    rates.push_back(tenths / 10.0);
  drop_rates_.copy_from(Tensor::from(rates, {int64_t(rates.size())}));
}

Tensor GlueJob::loss() {
  const F32MathScope math(settings_.f32_math);
  if (drops_) {
    drops_->set_rates(drop_rates_.to_vector<double>());
    drops_->draw(settings_.drop.share, seed_for(RandomPurpose::branch_choice, settings_.seed), drop_step_++);
  }
  return model_.loss(batch_, targets_);
}

JobInfo GlueJob::info() const {
  const int micro_batches = int(settings_.accumulate);
  if (!set_) return {.fixed_shapes = !drops_, .micro_batches = micro_batches};
  const datasets::GlueItems& train = set_->train;
  const double length = double(train.tokens()) / double(train.size());
  const double tokens = length * double(settings_.texts_per_step());
  return {.evaluates = true,
          // Packed batches have a shape each, and each step drops other branches.
          .fixed_shapes = settings_.batches == "padded" && !drops_,
          .micro_batches = micro_batches,
          .tokens_per_step = tokens,
          .flops_per_step = plan::step_flops(settings_.bert, tokens, length)};
}

eval::GluePredictions GlueJob::predict(const datasets::GlueItems& items) {
  const F32MathScope math(settings_.f32_math);
  const Evaluating evaluating(model_);
  return eval::predict_glue(model_, items, settings_.batch, device());
}

Values GlueJob::evaluate() {
  const F32MathScope math(settings_.f32_math);
  const Evaluating evaluating(model_);
  return eval::evaluate_glue(model_, set_->task, set_->dev, settings_.batch, device());
}

void GlueJob::load(const datasets::GlueBatch& batch) {
  const bool padded = settings_.batches == "padded";
  const int64_t fixed_length = padded ? settings_.max_length : 0;
  if (!padded || !batch_.tokens.defined()) {
    batch_ = eval::bert_batch(batch, settings_.bert, fixed_length, device());
    targets_ = batch.labels.to(device());
    return;
  }
  // A captured step reads the same memory each time; the texts come by way of the host.
  eval::copy_batch(batch_, eval::bert_batch(batch, settings_.bert, fixed_length, Device::cpu()));
  targets_.copy_from(batch.labels);
}

std::vector<std::string> submission_files(const GlueSet& set, const std::filesystem::path& folder) {
  std::vector<std::string> files;
  for (const eval::GluePart& part : set.test)
    files.push_back((folder / datasets::glue_submission_name(set.task, part.name)).string());
  return files;
}

std::vector<std::string> write_submissions(GlueJob& job, const GlueSet& set,
                                           const std::filesystem::path& folder) {
  io::AtomicFolder files(folder.string(), io::AtomicFolder::Existing::replace);
  for (const eval::GluePart& part : set.test)
    io::write_file(files.path() + "/" + datasets::glue_submission_name(set.task, part.name),
                   datasets::glue_submission(set.task, job.predict(part.items).values));
  files.publish();
  return submission_files(set, folder);
}

}  // namespace tessera::train

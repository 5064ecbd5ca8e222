#include "train/glue_settings.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "pretrained/config.h"
#include "runtime/error.h"
#include "runtime/text.h"
#include "train/bert_model.h"

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

namespace {

/// The layers of each block that a run slices, found in a model of the smallest sizes that has their names.
std::vector<plan::SlicedLayers> sliced_layers(models::BertConfig config, const SliceSettings& slice) {
  config.vocabulary = config.d_model = config.d_ff = config.heads = config.types = 1;
  config.positions = config.position_offset() + 1;
  const Rng rng(0);
  models::Bert model(config, rng, Device::cpu(), models::Start::blank);
  slice.apply(pretrained::linear_modules(model), rng);
  const auto is_sliced = [](const nn::Linear& layer) {
    return std::holds_alternative<nn::SlicedBackward>(layer.form);
  };
  std::vector<plan::SlicedLayers> layers;
  for (const models::BertBlock& block : model.blocks)
    layers.push_back({.qkv = is_sliced(block.attention.qkv),
                      .out = is_sliced(block.attention.out),
                      .up = is_sliced(block.mlp.up),
                      .down = is_sliced(block.mlp.down)});
  return layers;
}

}  // namespace

plan::BertStep GlueSettings::planned_step(Device device) const {
  using Trained = plan::BertStep::Trained;
  plan::BertStep step{.batch = batch,
                      .length = max_length,
                      .trained = trained == "all"      ? Trained::all
                                 : trained == "biases" ? Trained::biases
                                                       : Trained::head,
                      .forms = factors.forms(!model.empty()),
                      .drop = drop.share,
                      .on_gpu = device.is_cuda()};
  if (slice.slices()) step.slice = slice.slice(Rng(0)), step.sliced = sliced_layers(bert, slice);
  return step;
}

plan::Memory GlueSettings::planned(Device device) const {
  const plan::BertStep step = planned_step(device);
  return with_states(plan::count_memory(bert, step), plan::hidden_matrices(bert, step.forms), bert.dtype,
                     device);
}

void GlueSettings::check_together() const {
  check(!slice.slices() || !factors.factorizes(), "--slice with --form ", factors.form,
        "; the sliced backward pass needs dense weights, so leave one of them out");
  check(!slice.is_auto() || !drop.drops(),
        "--rows auto with --dropbp; the variance is estimated with all branches, so leave one of them "
        "out");
  check(!drop.drops() || optimizer != "galore",
        "--dropbp with --optimizer galore; a branch that is dropped where gradients are decomposed "
        "(--galore-every) has none, and would train in an arbitrary subspace, so leave one of them out");
  check(trained == "all" || !(slice.slices() || drop.drops() || factors.factorizes()), "--train ", trained,
        " with --slice, --dropbp or --form, which are of weights that it does not train; leave one of them "
        "out");
  check(
      trained == "all" || (optimizer != "muon" && optimizer != "galore"), "--train ", trained,
      " with --optimizer ", optimizer,
      ", which updates the hidden matrices that it does not train; take --optimizer adamw, which updates the "
      "rest");
  check(missing_grad == "zero" || ((optimizer == "adamw" || optimizer == "sgd") && momentum_reset == 0),
        "--missing-grad skip needs --optimizer adamw or sgd without --momentum-reset; leave one out");
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
  drop.validate();
  check_together();
}

}  // namespace tessera::train

#include "train/glue_start.h"

#include <algorithm>

namespace tessera::train {

namespace {

/// The sizes that the authors of BERT published (Turc et al., arXiv:1908.08962), and BERT-base.
struct Size {
  const char* name;
  int64_t layers, d_model;
};
constexpr Size kSizes[] = {
    {"tiny", 2, 128}, {"mini", 4, 256}, {"small", 4, 512}, {"medium", 8, 512}, {"base", 12, 768}};

}  // namespace

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

SettingList GlueOptions::list() {
  SettingList list(Kept::option);
  list.group("Run");
  list.add("predict", predict, "Write predictions for the test split in the format of the GLUE server");
  list.add("save_model", save_model, "Write each trained model as a Hugging Face model directory");
  return list;
}

}  // namespace tessera::train

#include "train/glue_data.h"

#include "io/checksum.h"
#include "runtime/error.h"
#include "train/tokenizer_files.h"

namespace tessera::train {
namespace {

using datasets::GlueData;
using datasets::GlueItems;
using datasets::GlueTask;

std::vector<std::string> suffixes(GlueTask task) {
  if (task == GlueTask::mnli) return {"_matched", "_mismatched"};
  return {""};
}

}  // namespace

std::string GlueSet::fingerprint() const {
  io::Xxh3 sum;
  sum.add(train.fingerprint());
  for (const eval::GluePart& part : dev) sum.add(part.items.fingerprint());
  return sum.digits();
}

GlueSet read_glue(GlueTask task, const std::string& folder, const io::Tokenizer& tokenizer,
                  int64_t max_length, bool with_test) {
  const datasets::GlueBatchOptions options{.max_length = max_length, .packed = true};
  const auto labelled = [&](const std::string& part) {
    const GlueData data(task, folder, part);
    check(data.has_labels(), "glue: ", data.path(), " has no labels, which training and evaluation need");
    return GlueItems(data, tokenizer, options);
  };
  GlueSet set{task, labelled("train"), {}, {}};
  for (const std::string& suffix : suffixes(task)) {
    const std::string dev = "dev" + suffix, test = "test" + suffix;
    set.dev.push_back({dev, suffix, labelled(dev)});
    if (!with_test) continue;
    const GlueData data(task, folder, test);
    check(data.left_out() == 0, "glue: ", data.path(), ": ", data.left_out(),
          " rows cannot be read, so predictions would belong to other rows");
    set.test.push_back({test, suffix, GlueItems(data, tokenizer, options)});
  }
  return set;
}

std::string train_glue_tokenizer(GlueTask task, const std::string& folder, int64_t vocab_size) {
  const GlueData data(task, folder, "train");
  std::vector<std::string> texts;
  for (int64_t i = 0; i < data.size(); ++i) {
    texts.emplace_back(data.first(i));
    if (!data.second(i).empty()) texts.emplace_back(data.second(i));
  }
  return train_bert_tokenizer(texts, vocab_size);
}

}  // namespace tessera::train

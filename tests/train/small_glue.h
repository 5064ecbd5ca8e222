#pragma once

#include <optional>

#include "datasets/glue_synthetic.h"
#include "pretrained/load.h"
#include "tests/folder.h"
#include "train/glue_job.h"
#include "train/trainer.h"

namespace tessera::train {

/// A task's files and a tokenizer of their texts, made once for all tests of a task.
struct MadeTask {
  MadeTask(datasets::GlueTask task, int64_t train, int64_t dev) {
    datasets::write_synthetic_glue(task, folder.path(), {.train = train, .dev = dev, .test = 20});
    tokenizer.emplace(io::Tokenizer::parse("made", train_glue_tokenizer(task, folder.path(), 500)));
  }
  GlueSet set(datasets::GlueTask task, int64_t max_length = 48, bool with_test = false) const {
    return read_glue(task, folder.path(), *tokenizer, max_length, with_test);
  }
  TemporaryFolder folder;
  std::optional<io::Tokenizer> tokenizer;
};

/// Five steps of an encoder of two blocks without dropout.
inline GlueSettings small_glue_job(const MadeTask& made, const char* task, int64_t width = 16) {
  GlueSettings job;
  job.task = task;
  job.data = made.folder.path();
  models::BertConfig config{.vocabulary = made.tokenizer->vocab_size(),
                            .positions = 64,
                            .d_model = width,
                            .d_ff = 2 * width,
                            .heads = 2,
                            .layers = 2,
                            .head = models::BertHead::classify};
  job.bert = bert_config("c", pretrained::config_text(config), datasets::parse_glue_task(task).task);
  job.batch = 4, job.max_length = 48, job.steps = 5, job.lr = 1e-3;
  return job;
}

/// Texts labelled as in SST-2.
struct MadeSst2 : MadeTask {
  explicit MadeSst2(int64_t train) : MadeTask(datasets::GlueTask::sst2, train, 8) {}
  /// Twelve steps of an encoder of three blocks with dropout.
  GlueSettings job(int64_t batch) const {
    GlueSettings job = small_glue_job(*this, "sst2");
    job.bert.layers = 3, job.bert.hidden_dropout = job.bert.attention_dropout = 0.1;
    job.batch = batch, job.steps = 12, job.lr = 1e-2;
    return job;
  }
  GlueSet examples = set(datasets::GlueTask::sst2);
};

/// The bytes of a run's files; empty: there is no such file.
struct RunFiles {
  std::string checkpoint;  // after the last step
  std::string probes, rows;
};

/// Of a run that stops after `stop` steps and goes on; 0: one that does not stop.
inline RunFiles files_of_run(const MadeSst2& made, const GlueSettings& settings, int64_t stop = 0) {
  const TemporaryFolder root;
  const RunFolder run = RunFolder::create(root.path(), "run");
  report::Progress quiet(report::Progress::Mode::quiet);
  const auto train_to = [&](GlueJob& job, int64_t from, int64_t to) {
    train(job, run, {.steps = to, .log_every = 1, .schedule = settings.make_schedule()}, from, quiet);
  };
  const std::filesystem::path file = root / "end.safetensors";
  if (stop > 0) {
    GlueJob first(settings, Device::cpu(), &made.examples);
    train_to(first, 0, stop);
    first.checkpoint(stop).save(file.string());
  }
  GlueJob job(settings, Device::cpu(), &made.examples);
  train_to(job, stop > 0 ? job.restore(file) : 0, settings.steps);
  job.checkpoint(settings.steps).save(file.string());
  return {get(file), get(run.path() / "probes.jsonl"), get(run.path() / "rows.jsonl")};
}

}  // namespace tessera::train

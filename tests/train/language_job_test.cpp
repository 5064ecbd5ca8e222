#include "train/language_job.h"

#include <cmath>
#include <csignal>

#include "autograd/tape.h"
#include "io/checkpoint_folder.h"
#include "io/file.h"
#include "report/progress.h"
#include "runtime/allocator.h"
#include "runtime/interrupt.h"
#include "tests/errors.h"
#include "tests/train/small_language.h"
#include "train/step.h"
#include "train/trainer.h"

namespace tessera::train {
namespace {

/// Which elements are dropped depends on the seed alone, not on how many numbers the first weights took.
TEST(LanguageJob, DropsTheSameElementsWithWeightsThatWereLoaded) {
  const TemporaryFolder root;
  const LanguageData data = small_language_data(root);
  LanguageSettings job = small_language_job();
  std::get<models::GptConfig>(job.model).residual_dropout = 0.5;
  LanguageJob drawn(job, Device::cpu());
  const std::string folder = root / "weights";
  drawn.save(folder);
  LanguageJob loaded(job, Device::cpu(), folder);
  std::vector<float> losses;
  for (LanguageJob* const session : {&drawn, &loaded, &drawn}) {
    session->load(language_batch(data, {0, 1}));
    losses.push_back(session->loss().item());
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_NE(losses[0], losses[2]);  // the next masks are others
}

/// A model of another depth meets the same batches, and another dropout leaves the first weights alone.
TEST(LanguageJob, InitialisationDataAndDropoutShareNoRandomNumbers) {
  const TemporaryFolder root;
  const LanguageData data = small_language_data(root);
  const auto first_batch = [&](auto change) {
    LanguageSettings job = small_language_job();
    change(std::get<models::GptConfig>(job.model));
    LanguageJob session(job, Device::cpu());
    session.set_data(data, {.ngram = 0}, {}, {});
    session.batch(0);
    const io::Checkpoint state = session.checkpoint(0);
    return std::tuple(state.get<Rng>("rng").state(),
                      state.get<Tensor>("model.blocks.0.mlp.up.weight").to_vector<float>());
  };
  const auto plain = first_batch([](auto&) {});
  const auto deep = first_batch([](models::GptConfig& config) { config.layers = 5; });
  const auto dropping = first_batch([](models::GptConfig& config) { config.residual_dropout = 0.5; });
  EXPECT_EQ(std::get<0>(plain), std::get<0>(deep));
  EXPECT_EQ(std::get<0>(plain), std::get<0>(dropping));
  EXPECT_EQ(std::get<1>(plain), std::get<1>(dropping));
  EXPECT_EQ(std::get<1>(plain), std::get<1>(deep));
}

TEST(LanguageJob, ARunOfBeforeGoesOnWithItsOwnOrders) {
  const TemporaryFolder root;
  const LanguageData data = small_language_data(root);
  LanguageSettings settings = small_language_job(), before = settings;
  before.data_order = 1;
  LanguageJob job(settings, Device::cpu()), old(before, Device::cpu());
  for (LanguageJob* const of : {&job, &old}) of->set_data(data, {.sample_tokens = 0}, {}, {});
  const NoTape off;
  const auto loss = [](LanguageJob& of, uint64_t index) { return of.batch(index), of.loss().item<double>(); };
  EXPECT_EQ(loss(job, 0), loss(old, 0));
  const auto second_epoch = uint64_t(data.train().size() / settings.batch);
  EXPECT_NE(loss(job, second_epoch), loss(old, second_epoch));
}

TEST(LanguageJob, RestoresEverythingThatContinuesTheCurve) {
  for (const bool llama : {false, true}) {
    const TemporaryFolder root;
    const LanguageData data = small_language_data(root);
    const LanguageSettings job = small_language_job(llama);
    const auto step = [&](LanguageJob& session, int64_t window) {
      Step one(session);
      one([&](int) { session.load(language_batch(data, {window, window + 1})); });
      return one.loss().item<double>();
    };
    LanguageJob whole(job, Device::cpu()), other(job, Device::cpu());
    step(whole, 0), step(whole, 2);
    const datasets::LoaderState state{.batch = 2, .seed = 3, .stream = 4};
    const std::string file = root / "c.safetensors";
    whole.position() = state;
    whole.checkpoint(2).save(file);
    EXPECT_EQ(other.restore(file), 2);
    EXPECT_EQ(other.position(), state);
    for (int64_t window = 4; window < 10; window += 2) EXPECT_EQ(step(whole, window), step(other, window));
  }
}

TEST(LanguageJob, RestoresOnlyItsOwnJob) {
  const TemporaryFolder root;
  const LanguageSettings job = small_language_job();
  const std::string file = root / "c.safetensors";
  LanguageJob(job, Device::cpu()).checkpoint(7).save(file);
  LanguageSettings longer = job, other = job;
  longer.steps = 2 * job.steps;
  std::get<models::GptConfig>(other.model).residual_dropout = 0.5;
  EXPECT_EQ(LanguageJob(longer, Device::cpu()).restore(file), 7);
  const std::string error = message_of([&] { LanguageJob(other, Device::cpu()).restore(file); });
  EXPECT_NE(error.find("\"model\""), std::string::npos) << error;
}

TEST(LanguageJob, DecaysMatricesAlone) {
  // With gradients of zero all that a step changes is what decays.
  LanguageSettings job = small_language_job(true);
  job.lr = 0.1, job.weight_decay = 0.5;
  LanguageJob session(job, Device::cpu());
  std::map<std::string, std::vector<float>> before;
  for (const auto& [name, tensor] : session.optimizer().parameters())
    before[name] = tensor.detach().to_vector<float>();
  session.optimizer().zero_grad();
  session.optimizer().complete_gradients();
  session.optimizer().step();
  for (const auto& [name, tensor] : session.optimizer().parameters()) {
    const bool fixed = name == "token.weight" || name.find("norm") != std::string::npos;
    EXPECT_EQ(tensor.detach().to_vector<float>() == before.at(name), fixed) << name;
  }
}

TEST(LanguageJob, EvaluatesWithoutDropoutAndGoesOnWithIt) {
  const TemporaryFolder root;
  const LanguageData data = small_language_data(root);
  const std::vector<int64_t> tokens = read_tokens(data.train(), 0, 17);
  for (const bool llama : {false, true}) {
    LanguageSettings job = small_language_job(llama);
    if (llama)
      job.dropout = 0.5;
    else
      std::get<models::GptConfig>(job.model).residual_dropout = 0.5;
    LanguageJob session(job, Device::cpu());
    EXPECT_EQ(language_loss(session, tokens), language_loss(session, tokens));
    session.load(language_batch(data, {0, 1}));
    EXPECT_NE(session.loss().item<double>(), session.loss().item<double>());
  }
}

TEST(LanguageJob, DropoutOfALlamaIsOfTheJobAndNotOfItsFolder) {
  const TemporaryFolder root;
  LanguageSettings job = small_language_job(true);
  job.dropout = 0.25;
  EXPECT_EQ(job_settings<LanguageSettings>(to_json(job)).dropout, 0.25);
  LanguageJob session(job, Device::cpu());
  const std::string folder = root / "model";
  session.save(folder);
  EXPECT_EQ(io::read_file(folder + "/config.json", 1 << 20).find("0.25"), std::string::npos);
  LanguageSettings gpt = small_language_job();
  gpt.dropout = 0.25;
  EXPECT_NE(message_of([&] { gpt.validate(); }).find("dropout is 0.25"), std::string::npos);
  std::get<models::GptConfig>(gpt.model).residual_dropout = 0.25;
  EXPECT_EQ(job_settings<LanguageSettings>(to_json(gpt)).dropout, 0.25);
  gpt.dropout = 0;  // as earlier versions wrote it
  EXPECT_EQ(job_settings<LanguageSettings>(to_json(gpt)).dropout, 0);
}

TEST(LanguageJob, AveragesAreWhatIsEvaluatedSavedAndRestored) {
  const TemporaryFolder root;
  const LanguageData data = small_language_data(root);
  const std::vector<int64_t> tokens = read_tokens(data.train(), 0, 17);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    LanguageSettings job = small_language_job(true);
    std::get<models::LlamaConfig>(job.model).dtype = dtype;
    job.lr = 0.05;
    LanguageSettings with = job;
    with.ema = 0.99;
    LanguageJob plain(job, Device::cpu()), averaged(with, Device::cpu()), again(with, Device::cpu());
    const auto step = [&](LanguageJob& session, int64_t window) {
      Step one(session);
      one([&](int) { session.load(language_batch(data, {window, window + 1})); });
      return one.loss().item<double>();
    };
    EXPECT_EQ(language_loss(averaged, tokens), language_loss(plain, tokens)) << "they begin as the weights";
    for (int64_t window = 0; window < 6; window += 2) {
      EXPECT_EQ(step(averaged, window), step(plain, window)) << "they do not change the training";
      EXPECT_NE(language_loss(averaged, tokens), language_loss(plain, tokens));
    }
    const std::string file = root / "c.safetensors";
    averaged.checkpoint(3).save(file);
    EXPECT_EQ(again.restore(file), 3);
    EXPECT_EQ(step(again, 8), step(averaged, 8));
    EXPECT_EQ(language_loss(again, tokens), language_loss(averaged, tokens));
    const std::string folder = root / name_of(dtype);
    averaged.save(folder);
    LanguageJob exported(job, Device::cpu(), folder);
    EXPECT_EQ(language_loss(exported, tokens), language_loss(averaged, tokens));
    // A checkpoint without averages is none of a job that has them.
    plain.checkpoint(3).save(file);
    EXPECT_NE(message_of([&] { again.restore(file); }).find("\"ema\""), std::string::npos);
  }
}

TEST(LanguageTraining, DocumentsApartAreSequencesOfTheirOwn) {
  const TemporaryFolder root;
  const LanguageData data = small_language_data(root, true);
  LanguageSettings job = small_language_job(true);
  job.documents = true;
  // The window with the border between the two texts.
  const uint64_t border = document_begins(data.train(), 0, data.train().tokens())[1];
  const int64_t window = int64_t(border - 1) / job.length;
  const datasets::TokenBatch batch = language_batch(data, {window, 0});
  ASSERT_EQ(batch.lengths.size(0), 4) << "three segments";
  LanguageJob session(job, Device::cpu());
  session.load(batch);
  // The mean of what each segment costs by itself, over the targets that count.
  double sum = 0;
  int64_t counted = 0;
  const auto ends = batch.lengths.to_vector<int64_t>();
  const auto inputs = batch.inputs.reshape({32}).to_vector<int64_t>(),
             targets = batch.targets.reshape({32}).to_vector<int64_t>();
  for (size_t i = 1; i < ends.size(); ++i) {
    std::vector<int64_t> segment(inputs.begin() + ends[i - 1], inputs.begin() + ends[i]);
    if (const int64_t behind = targets[size_t(ends[i] - 1)]; behind >= 0) segment.push_back(behind);
    const int64_t there = int64_t(segment.size()) - 1;
    if (there > 0) sum += language_loss(session, segment) * double(there);
    counted += there;
  }
  EXPECT_EQ(counted, 31);
  // f32: 31 losses near 5.5, each rounded a few times, in another order.
  EXPECT_NEAR(session.loss().item<double>(), sum / double(counted), 1e-5);
}

TEST(LanguageJob, AnInterruptedEvaluationLeavesTheStateAsItWas) {
  const TemporaryFolder root;
  const LanguageData data = small_language_data(root);
  LanguageSettings job = small_language_job();
  job.ema = 0.5;
  LanguageJob session(job, Device::cpu());
  session.load(language_batch(data, {0, 1}));
  Tape tape;
  tape.backward(session.loss());
  session.optimizer().step();
  session.updated();
  const std::string path = root / "c";
  session.checkpoint(1).save(path);
  const std::string before = get(path);
  const std::vector<int64_t> tokens = read_tokens(data.train(), 0, 17);
  {
    const InterruptGuard guard;
    std::raise(SIGINT);
    EXPECT_THROW(language_loss(session, tokens), Interrupted);
    EXPECT_THROW(session.generate(std::span(tokens).first(8), {.most_tokens = 4}), Interrupted);
  }
  session.checkpoint(1).save(path);
  EXPECT_TRUE(get(path) == before);  // the weights, and not their averages
}

TEST(LanguageTraining, AStepOfSeveralMicroBatchesIsOneLargeStep) {
  const TemporaryFolder root;
  const LanguageData data = small_language_data(root);
  std::vector<std::vector<StepRecord>> curves;
  for (const int64_t accumulate : {1, 2}) {
    LanguageSettings job = small_language_job();
    job.accumulate = accumulate, job.batch = 4 / accumulate, job.steps = 6, job.lr = 1e-2;
    const RunFolder run = RunFolder::create(root.path(), "r");
    LanguageJob session(job, Device::cpu());
    report::Progress progress(report::Progress::Mode::quiet);
    session.set_data(data, {.sample_every = 3, .sample_tokens = 4}, held_out(data, 100), {});
    train(session, run, {.steps = 6, .log_every = 1, .sample_every = 3, .schedule = job.make_schedule()}, 0,
          progress);
    curves.push_back(run.metrics());
    const auto samples = run.samples();
    ASSERT_EQ(samples.size(), 2u);
    EXPECT_EQ(samples[0].step, 3);
    EXPECT_EQ(samples[1].step, 6);
  }
  ASSERT_EQ(curves[0].size(), 6u);
  for (size_t i = 0; i < 6; ++i)
    // f32: the same 64 losses near 5.5 in another order; what that changes in the weights grows over six
    // steps.
    EXPECT_NEAR(curves[0][i].values.at("loss"), curves[1][i].values.at("loss"), 1e-4) << i;
  EXPECT_NEAR(curves[0][5].values.at("eval_nll"), curves[1][5].values.at("eval_nll"), 1e-4);
  EXPECT_LT(curves[0][5].values.at("eval_nll"), curves[0][0].values.at("loss") - 0.1);
  EXPECT_DOUBLE_EQ(curves[0][5].values.at("eval_bits_per_byte"),
                   curves[0][5].values.at("eval_nll") * 100 /
                       double(target_text(data, held_out(data, 100)).size()) / std::log(2.0));
}

TEST(LanguageTraining, KeepsTheBestEvaluationAndEndsBehindIt) {
  const TemporaryFolder root;
  const LanguageData data = small_language_data(root);
  LanguageSettings job = small_language_job();
  job.steps = 400, job.lr = 0.05, job.schedule = "constant";
  const RunFolder run = RunFolder::create(root.path(), "r");
  LanguageJob session(job, Device::cpu());
  report::Progress progress(report::Progress::Mode::quiet);
  const LanguageWatch watch{.sample_tokens = 4, .patience = 3, .exported = "best"};
  const HeldOut text = held_out(data, 100);
  const TrainerOptions options{
      .steps = 400, .log_every = 100, .eval_every = 2, .keep = 1, .schedule = job.make_schedule()};
  session.set_data(data, watch, text, {});
  const TrainResult result = train(session, run, options, 0, progress);
  EXPECT_EQ(result.outcome, Outcome::finished);
  ASSERT_LT(result.step, 400) << "a rate that does not learn for long";
  const BestEvaluation best = best_evaluation(run);
  EXPECT_EQ(best.since, 3);
  EXPECT_EQ(best.step, result.step - 6);
  EXPECT_EQ(best.evaluations, result.step / 2);
  EXPECT_EQ(best_evaluation(run, best.step + 3).since, 1) << "evaluations after that step are left out";
  EXPECT_LT(best_evaluation(run, best.step - 1).step, best.step);
  EXPECT_GT(result.evaluation.at("eval_nll"), best.nll);
  EXPECT_EQ(run.samples().back().step, result.step) << "the end of the run, as the last step is";
  // Of the checkpoints the newest and the best are there, and the best one is the model of that evaluation.
  const io::CheckpointFolder folder(run.checkpoints().string());
  EXPECT_EQ(folder.steps(), (std::vector<int64_t>{result.step, best.step}));
  EXPECT_EQ(session.restore(folder.file_of(best.step)), best.step);
  std::vector<eval::PerplexityWindow> windows;
  for (const HeldOut::Stretch& stretch : text.stretches)
    for (const eval::PerplexityWindow& window : eval::sliding_windows(stretch.tokens, stretch.first, 17, 8))
      windows.push_back(window);
  EXPECT_EQ(session.measure(windows).nats, best.nll);
  // It does not begin again to wait for what does not come.
  session.restore(folder.file_of(result.step));
  const size_t records = run.metrics().size(), samples = run.samples().size();
  const TrainResult again = train(session, run, options, result.step, progress);
  EXPECT_EQ(again.outcome, Outcome::finished);
  EXPECT_EQ(again.step, result.step);
  EXPECT_EQ(again.evaluation, result.evaluation);
  EXPECT_EQ(run.metrics().size(), records);
  EXPECT_EQ(run.samples().size(), samples);
}

}  // namespace
}  // namespace tessera::train

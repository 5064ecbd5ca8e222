#include "train/tnp_job.h"

#include <nlohmann/json.hpp>
#include <set>

#include "report/progress.h"
#include "tests/errors.h"
#include "tests/folder.h"
#include "train/step.h"
#include "train/trainer.h"

namespace tessera::train {
namespace {

using nlohmann::json;

TnpSettings small_tnp_job() {
  TnpSettings job;
  job.model = {
      .features = 2, .d_model = 8, .d_ff = 8, .heads = 2, .layers = 1, .components = 2, .embed_hidden = 8};
  job.context = 4, job.targets = 3, job.batch = 2;
  return job;
}

TEST(TnpSettings, ComesBackFromJsonExactly) {
  TnpSettings job = small_tnp_job();
  job.lr = 0.1, job.seed = (uint64_t(1) << 62) + 1, job.model.dtype = DType::bf16, job.model.pre_norm = true;
  const json out = json::parse(to_json(job).dump());
  EXPECT_EQ(to_json(job_settings<TnpSettings>(out)), to_json(job));
  EXPECT_EQ(job_settings<TnpSettings>(out).seed, job.seed);
}

TEST(TnpSettings, EverySettingMustBeThereAndOfItsType) {
  const json good = to_json(small_tnp_job());
  for (const auto& [name, value] : good.items()) {
    json missing = good;
    missing.erase(name);
    if (name == "task_stream")  // runs of version 1 did not note it
      EXPECT_EQ(job_settings<TnpSettings>(missing).task_stream, 1);
    else
      EXPECT_NE(message_of([&] { job_settings<TnpSettings>(missing); }).find("\"" + name + "\" is missing"),
                std::string::npos);
    for (const json& wrong :
         {json(nullptr), json::array(), json::object(), value.is_string() ? json(1) : json("1")}) {
      json bad = good;
      bad[name] = wrong;
      EXPECT_NE(message_of([&] { job_settings<TnpSettings>(bad); }).find("\"" + name + "\""),
                std::string::npos)
          << bad;
    }
  }
}

/// Jobs from before TF32 have no such setting, and mean what they meant.
TEST(TnpSettings, Tf32IsWrittenWhereItIsChosenAlone) {
  TnpSettings job = small_tnp_job();
  EXPECT_FALSE(to_json(job).contains("f32_math"));
  EXPECT_EQ(job_settings<TnpSettings>(to_json(job)).precision(), Precision(DType::f32));
  job.set_precision({DType::f32, F32Math::tf32});
  EXPECT_EQ(to_json(job).at("f32_math"), "tf32");
  EXPECT_EQ(job_settings<TnpSettings>(to_json(job)).precision(), job.precision());
  json wrong = to_json(job);
  wrong["model.dtype"] = "bf16";
  EXPECT_NE(message_of([&] { job_settings<TnpSettings>(wrong); }).find("only f32 has it"), std::string::npos);
  for (const json& bad : {json("f32"), json("bf16"), json(1), json(nullptr)}) {
    wrong = to_json(job);
    wrong["f32_math"] = bad;
    EXPECT_NE(message_of([&] { job_settings<TnpSettings>(wrong); }).find("\"f32_math\""), std::string::npos)
        << bad;
  }
}

TEST(TnpJob, ARunInTf32IsAnotherJobThanOneInF32) {
  const TemporaryFolder root;
  const TnpSettings plain = small_tnp_job();
  TnpSettings tf32 = plain;
  tf32.set_precision({DType::f32, F32Math::tf32});
  for (const auto& [saved, restored] : {std::pair(plain, tf32), std::pair(tf32, plain)}) {
    const std::string file = root / "c.safetensors";
    TnpJob(saved, Device::cpu()).checkpoint(7).save(file);
    TnpJob session(restored, Device::cpu());
    const std::string error = message_of([&] { session.restore(file); });
    for (const char* part : {"another job", "\"f32_math\"", "tf32"})
      EXPECT_NE(error.find(part), std::string::npos) << part << " in: " << error;
  }
}

/// Jobs from before there was a choice have no such settings, and mean AdamW.
TEST(TnpSettings, OptimizersOtherThanAdamWAreWritten) {
  TnpSettings job = small_tnp_job();
  EXPECT_FALSE(to_json(job).contains("optimizer") || to_json(job).contains("momentum"));
  EXPECT_EQ(job_settings<TnpSettings>(to_json(job)).optimizer, "adamw");
  job.optimizer = "muon", job.momentum = 0.5;
  EXPECT_EQ(to_json(job).at("optimizer"), "muon");
  EXPECT_EQ(job_settings<TnpSettings>(to_json(job)).momentum, 0.5);
  job.optimizer = "loro";
  EXPECT_NE(message_of([&] { job.validate(); }).find("a TNP has none; give another --optimizer"),
            std::string::npos);
  job.optimizer = "newton";
  EXPECT_NE(message_of([&] { job.validate(); }).find("\"newton\""), std::string::npos);
  job.optimizer = "sgd", job.momentum = 1;
  EXPECT_NE(message_of([&] { job.validate(); }).find("momentum (--momentum) is 1"), std::string::npos);
}

TEST(TnpJob, EveryOptimizerResumesToTheSameBits) {
  const TemporaryFolder root;
  for (const std::string& name : optim::optimizer_names())
    for (const DType dtype : {DType::f32, DType::bf16}) {
      TnpSettings job = small_tnp_job();
      if (name == "loro") continue;  // for weights made of factors, which a TNP has none of
      job.optimizer = name, job.model.dtype = dtype, job.steps = 9;
      job.galore_rank = 2, job.galore_every = 3;
      const auto steps = [](TnpJob& session, uint64_t from, uint64_t to) {
        Step step(session);
        for (uint64_t i = from; i < to; ++i) step([&](int) { session.batch(i); });
      };
      const std::string whole = root / "whole", half = root / "half", rest = root / "rest";
      TnpJob straight(job, Device::cpu()), first(job, Device::cpu()), second(job, Device::cpu());
      steps(straight, 0, 9), straight.checkpoint(9).save(whole);
      steps(first, 0, 4), first.checkpoint(4).save(half);
      EXPECT_EQ(second.restore(half), 4);
      steps(second, 4, 9), second.checkpoint(9).save(rest);
      EXPECT_EQ(get(whole), get(rest)) << name << " " << dtype;
      EXPECT_NE(get(whole), get(half)) << name;
    }
}

TEST(TnpJob, ComputesInItsOwnF32Math) {
  TnpSettings job = small_tnp_job();
  const auto loss = [](const TnpSettings& one, F32Math outside) {
    TnpJob session(one, Device::cpu());
    session.load(make_prior(one).batch(0));
    const F32MathScope scope(outside);
    return session.loss().item();
  };
  const double plain = loss(job, F32Math::ieee);
  EXPECT_EQ(loss(job, F32Math::tf32), plain) << "the job says ieee";
  job.set_precision({DType::f32, F32Math::tf32});
  EXPECT_NE(loss(job, F32Math::ieee), plain);
  EXPECT_EQ(loss(job, F32Math::ieee), loss(job, F32Math::tf32));
  EXPECT_NEAR(loss(job, F32Math::ieee), plain, 0.01);
}

TEST(TnpJob, RestoresOnlyItsOwnJob) {
  const TemporaryFolder root;
  const TnpSettings job = small_tnp_job();
  const std::string file = root / "c.safetensors";
  TnpJob session(job, Device::cpu());
  session.checkpoint(7).save(file);
  TnpSettings longer = job, other = job;
  longer.steps = 2 * job.steps;  // a run may be made longer
  other.seed = 5;
  EXPECT_EQ(TnpJob(longer, Device::cpu()).restore(file), 7);
  TnpJob refused(other, Device::cpu());
  const auto before = refused.model().embedder.up.weight.detach().to_vector<float>();
  const std::string error = message_of([&] { refused.restore(file); });
  for (const char* part : {"c.safetensors", "another job", "\"seed\"", "0 in it", "5 here"})
    EXPECT_NE(error.find(part), std::string::npos) << part << " in: " << error;
  EXPECT_EQ(refused.model().embedder.up.weight.detach().to_vector<float>(), before);
}

TEST(TnpJob, ALossScaleContinuesAndOneThatWasNotSavedBegins) {
  const TemporaryFolder root;
  TnpSettings job = small_tnp_job();
  job.model.dtype = DType::f16;
  const std::string file = root / "c.safetensors", old_file = root / "old.safetensors";
  const auto step = [&](TnpJob& session, uint64_t batch) {
    Step one(session);
    one([&](int) { session.batch(batch); });
    return one.loss().item();
  };
  TnpJob session(job, Device::cpu());
  step(session, 0);
  session.optimizer().loss_scale().fill(0x1p11);
  session.checkpoint(7).save(file);

  TnpJob same(job, Device::cpu());
  EXPECT_EQ(same.restore(file), 7);
  EXPECT_EQ(same.optimizer().loss_scale().item(), 0x1p11);
  for (uint64_t batch = 1; batch < 6; ++batch) EXPECT_EQ(step(session, batch), step(same, batch));
  session.checkpoint(12).save(root / "a"), same.checkpoint(12).save(root / "b");
  EXPECT_EQ(get(root / "a"), get(root / "b"));

  // A checkpoint from before there was loss scaling.
  const io::Checkpoint stored = io::Checkpoint::read(file);
  io::Checkpoint old;
  for (const auto& [name, value] : stored.values())
    if (const auto* const tensor = std::get_if<Tensor>(&value);
        tensor && !name.starts_with("optimizer.loss_scale"))
      old.add(name, *tensor);
  old.add("step", stored.get<int64_t>("step")), old.add("job", stored.get<std::string>("job"));
  old.add("rng", stored.get<Rng>("rng")), old.add("optimizer.lr", stored.get<double>("optimizer.lr"));
  ASSERT_EQ(old.values().size() + 2, stored.values().size());
  old.save(old_file);
  TnpJob late(job, Device::cpu());
  EXPECT_EQ(late.restore(old_file), 7);
  EXPECT_EQ(late.optimizer().loss_scale().item(), optim::LossScale{}.initial);
  EXPECT_EQ(late.optimizer().steps(), 1);
}

TEST(TnpJob, AJobOfOtherTasksIsReadButNotTrained) {
  const TemporaryFolder root;
  TnpSettings job = small_tnp_job();
  job.task_stream = 1, job.steps = 2;
  EXPECT_FALSE(to_json(job).contains("task_stream"));
  const std::string file = root / "c.safetensors";
  TnpJob session(job, Device::cpu());
  session.checkpoint(2).save(file);
  EXPECT_EQ(TnpJob(job_settings<TnpSettings>(to_json(job)), Device::cpu()).restore(file), 2);
  const RunFolder run = RunFolder::create(root.path(), "r");
  report::Progress progress(report::Progress::Mode::quiet);
  expect_error([&] { train(session, run, {.steps = 2}, 0, progress); }, {"version 1", "version 2"});
}

TEST(TnpJob, DrawsTheTasksOfTheIndex) {
  const TnpSettings job = small_tnp_job();
  TnpJob session(job, Device::cpu());
  const datasets::Prior prior = make_prior(job);
  session.draw(prior, 5);
  EXPECT_EQ(session.inputs_of_loss().yt.to_vector<float>(), prior.batch(5).yt.to_vector<float>());
  EXPECT_NE(session.inputs_of_loss().yt.to_vector<float>(), prior.batch(6).yt.to_vector<float>());
}

TEST(TnpJob, TrainingOnAGpuIsTheSameInAGraphAndEagerAndResumed) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  for (const char* prior : {"linear", "rbf", "matern52", "periodic"}) {
    TnpSettings job = small_tnp_job();
    job.model.d_model = 16;  // heads of 8, the smallest on a GPU
    job.prior = prior, job.model.features = default_features(prior), job.steps = 12;
    job.model.d_model = 16;  // a head_dim that the GPU has
    const auto run_steps = [&](TnpJob& session, bool graph, int64_t first, int64_t last) {
      const TemporaryFolder root;
      const RunFolder run = RunFolder::create(root.path(), "r");
      report::Progress progress(report::Progress::Mode::quiet);
      const TrainerOptions options{
          .steps = last, .log_every = 1, .graph = graph, .schedule = job.make_schedule()};
      train(session, run, options, first, progress);
      std::vector<double> losses;
      for (const StepRecord& record : run.metrics()) losses.push_back(record.values.at("loss"));
      return losses;
    };
    TnpJob eager(job, Device::cuda(), 2), graph(job, Device::cuda(), 2), cut(job, Device::cuda(), 2);
    const std::vector<double> losses = run_steps(eager, false, 0, 12);
    EXPECT_EQ(losses.size(), 12u);
    EXPECT_EQ(std::set<double>(losses.begin(), losses.end()).size(), 12u) << "steps met the same tasks";
    EXPECT_EQ(run_steps(graph, true, 0, 12), losses) << prior;
    const TemporaryFolder root;
    const std::string file = root / "c.safetensors";
    std::vector<double> parts = run_steps(cut, true, 0, 7);
    cut.checkpoint(7).save(file);
    TnpJob resumed(job, Device::cuda(), 2);
    resumed.restore(file);
    for (const double loss : run_steps(resumed, true, 7, 12)) parts.push_back(loss);
    EXPECT_EQ(parts, losses) << prior;
  }
}

TEST(TnpJob, EvaluationNeverMeetsTheTasksOfTraining) {
  const TnpSettings job = small_tnp_job();
  EXPECT_NE(make_prior(job).batch(0).yc.to_vector<float>(),
            fresh_tasks(job, job.batch).batch(0).yc.to_vector<float>());
}

}  // namespace
}  // namespace tessera::train

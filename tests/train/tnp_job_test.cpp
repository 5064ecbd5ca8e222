#include "train/tnp_job.h"

#include <nlohmann/json.hpp>
#include <set>

#include "tests/errors.h"
#include "tests/train/folder.h"

namespace tessera::train {
namespace {

using nlohmann::json;

TnpJob small_job() {
  TnpJob job;
  job.model = {
      .features = 2, .d_model = 8, .d_ff = 8, .heads = 2, .layers = 1, .components = 2, .embed_hidden = 8};
  job.context = 4, job.targets = 3, job.batch = 2;
  return job;
}

TEST(TnpJob, ComesBackFromJsonExactly) {
  TnpJob job = small_job();
  job.lr = 0.1, job.seed = (uint64_t(1) << 63) + 1, job.model.dtype = DType::bf16, job.model.pre_norm = true;
  const json out = json::parse(to_json(job).dump());
  EXPECT_EQ(to_json(tnp_job_from_json(out)), to_json(job));
  EXPECT_EQ(tnp_job_from_json(out).seed, job.seed);
}

TEST(TnpJob, EverySettingMustBeThereAndOfItsType) {
  const json good = to_json(small_job());
  for (const auto& [name, value] : good.items()) {
    json missing = good;
    missing.erase(name);
    if (name == "task_stream")  // runs of version 1 did not note it
      EXPECT_EQ(tnp_job_from_json(missing).task_stream, 1);
    else
      EXPECT_NE(message_of([&] { tnp_job_from_json(missing); }).find("\"" + name + "\" is missing"),
                std::string::npos);
    for (const json& wrong :
         {json(nullptr), json::array(), json::object(), value.is_string() ? json(1) : json("1")}) {
      json bad = good;
      bad[name] = wrong;
      EXPECT_NE(message_of([&] { tnp_job_from_json(bad); }).find("\"" + name + "\""), std::string::npos)
          << bad;
    }
  }
}

TEST(TnpSession, RestoresOnlyItsOwnJob) {
  const TemporaryFolder root;
  const TnpJob job = small_job();
  const std::string file = (root / "c.safetensors").string();
  TnpSession session(job, Device::cpu());
  session.checkpoint(7).save(file);
  TnpJob longer = job, other = job;
  longer.steps = 2 * job.steps;  // a run may be made longer
  other.seed = 5;
  EXPECT_EQ(TnpSession(longer, Device::cpu()).restore(file), 7);
  TnpSession refused(other, Device::cpu());
  const auto before = refused.model().embed_in.weight.detach().to_vector<float>();
  const std::string error = message_of([&] { refused.restore(file); });
  for (const char* part : {"c.safetensors", "another job", "\"seed\"", "0 in it", "5 here"})
    EXPECT_NE(error.find(part), std::string::npos) << part << " in: " << error;
  EXPECT_EQ(refused.model().embed_in.weight.detach().to_vector<float>(), before);
}

TEST(TnpSession, AJobOfOtherTasksIsReadButNotTrained) {
  const TemporaryFolder root;
  TnpJob job = small_job();
  job.task_stream = 1, job.steps = 2;
  EXPECT_FALSE(to_json(job).contains("task_stream"));
  const std::string file = (root / "c.safetensors").string();
  TnpSession session(job, Device::cpu());
  session.checkpoint(2).save(file);
  EXPECT_EQ(TnpSession(tnp_job_from_json(to_json(job)), Device::cpu()).restore(file), 2);
  const RunFolder run = RunFolder::create(root.path(), "r");
  Progress progress(Progress::Mode::quiet);
  expect_error([&] { train_tnp(session, run, {.steps = 2}, 0, 2, progress); }, {"version 1", "version 2"});
}

TEST(TnpSession, DrawsTheTasksOfTheIndex) {
  const TnpJob job = small_job();
  TnpSession session(job, Device::cpu());
  const datasets::Prior prior = make_prior(job);
  session.draw(prior, 5);
  EXPECT_EQ(session.batch().yt.to_vector<float>(), prior.batch(5).yt.to_vector<float>());
  EXPECT_NE(session.batch().yt.to_vector<float>(), prior.batch(6).yt.to_vector<float>());
}

TEST(TnpSession, TrainingOnAGpuIsTheSameInAGraphAndEagerAndResumed) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  for (const char* prior : {"linear", "rbf", "matern52", "periodic"}) {
    TnpJob job = small_job();
    job.prior = prior, job.model.features = default_features(prior), job.steps = 12;
    const auto train = [&](TnpSession& session, bool graph, int64_t first, int64_t last) {
      const TemporaryFolder root;
      const RunFolder run = RunFolder::create(root.path(), "r");
      Progress progress(Progress::Mode::quiet);
      const TrainerOptions options{
          .steps = last, .log_every = 1, .graph = graph, .schedule = make_schedule(job)};
      train_tnp(session, run, options, first, 2, progress);
      std::vector<double> losses;
      for (const StepRecord& record : run.metrics()) losses.push_back(record.values.at("loss"));
      return losses;
    };
    TnpSession eager(job, Device::cuda()), graph(job, Device::cuda()), cut(job, Device::cuda());
    const std::vector<double> losses = train(eager, false, 0, 12);
    EXPECT_EQ(losses.size(), 12u);
    EXPECT_EQ(std::set<double>(losses.begin(), losses.end()).size(), 12u) << "steps met the same tasks";
    EXPECT_EQ(train(graph, true, 0, 12), losses) << prior;
    const TemporaryFolder root;
    const std::string file = (root / "c.safetensors").string();
    std::vector<double> parts = train(cut, true, 0, 7);
    cut.checkpoint(7).save(file);
    TnpSession resumed(job, Device::cuda());
    resumed.restore(file);
    for (const double loss : train(resumed, true, 7, 12)) parts.push_back(loss);
    EXPECT_EQ(parts, losses) << prior;
  }
}

TEST(TnpSession, EvaluationNeverMeetsTheTasksOfTraining) {
  const TnpJob job = small_job();
  EXPECT_NE(make_prior(job).batch(0).yc.to_vector<float>(),
            make_prior(job, true).batch(0).yc.to_vector<float>());
}

}  // namespace
}  // namespace tessera::train

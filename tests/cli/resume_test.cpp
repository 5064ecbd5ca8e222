#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <nlohmann/json.hpp>
#include <random>

#include "io/checkpoint_folder.h"
#include "tests/cli/command.h"
#include "tests/place.h"

// A run that was stopped, killed or damaged goes on to the end that it would have reached: the same bytes in
// the last checkpoint, the same losses at every step.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

/// Losses, learning rates and gradient norms, step by step; timings are left out.
std::vector<std::string> tnp_curve(const Workplace& at, const std::string& run) {
  return curve_of(at, "runs/" + run, {"loss", "lr", "grad_norm"});
}

std::string checkpoint_name(const std::string& run, int64_t step) {
  std::string digits = std::to_string(step);
  return "runs/" + run + "/checkpoints/step-" + std::string(6 - digits.size(), '0') + digits + ".safetensors";
}

/// The bytes hold all tensors, the generator, the step and the job, each with its checksum.
::testing::AssertionResult same_end(const Workplace& at, const std::string& a, const std::string& b,
                                    int64_t step) {
  const std::string first = at.get(checkpoint_name(a, step)), second = at.get(checkpoint_name(b, step));
  if (first.empty() || second.empty())
    return ::testing::AssertionFailure()
           << "no checkpoint of step " << step << " in " << (first.empty() ? a : b);
  if (first != second) return ::testing::AssertionFailure() << "checkpoints of step " << step << " differ";
  const auto curve_a = tnp_curve(at, a), curve_b = tnp_curve(at, b);
  if (int64_t(curve_a.size()) != step)
    return ::testing::AssertionFailure() << curve_a.size() << " lines in " << a;
  if (curve_a != curve_b) return ::testing::AssertionFailure() << "curves differ";
  return ::testing::AssertionSuccess();
}

/// A save in progress: its temporary lies in the folder.
bool saves_now(const fs::path& checkpoints) {
  std::error_code code;
  for (fs::directory_iterator entry(checkpoints, code), end; !code && entry != end; entry.increment(code))
    if (entry->path().filename().string().starts_with(".")) return true;
  return false;
}

/// Stops the process at a moment when a save is in progress. Returns false if it has ended before.
bool stop_in_a_save(Process& process, const fs::path& checkpoints) {
  while (process.running()) {
    if (!saves_now(checkpoints)) continue;
    process.send(SIGSTOP);
    if (!process.await_stop()) return false;
    if (saves_now(checkpoints)) return true;
    process.send(SIGCONT);  // the save ended before the process stopped
  }
  return false;
}

const std::string kLogged = " --quiet --log-every 1" + kTiny;

TEST(Reproducible, TheSameSeedGivesTheSameBits) {
  const Workplace workplace;
  expect_success(run(workplace, "train tnp --steps 60 --name a --seed 7" + kLogged));
  expect_success(run(workplace, "train tnp --steps 60 --name b --seed 7 --save-every 9" + kLogged));
  expect_success(run(workplace, "train tnp --steps 60 --name c --seed 8" + kLogged));
  EXPECT_TRUE(same_end(workplace, "a", "b", 60));
  EXPECT_FALSE(same_end(workplace, "a", "c", 60));  // the comparison sees a difference
  EXPECT_NE(tnp_curve(workplace, "a"), tnp_curve(workplace, "c"));
}

TEST(SlowReproducible, TheNumberOfThreadsChangesNoBit) {
  const Workplace workplace;
  // Large enough that most loops have several blocks.
  const std::string flags =
      "train tnp --steps 200 --seed 7 --device cpu --d-model 64 --d-ff 171 --n-head 2 --layers 2 --m 24 --n "
      "24 --batch-size 16 --eval-tasks 4 --quiet --log-every 1 --name threads-";
  for (const char* threads : {"1", "2", "4"}) {
    const Variable set("TESSERA_THREADS", threads);
    expect_success(run(workplace, flags + threads));
  }
  EXPECT_TRUE(same_end(workplace, "threads-1", "threads-2", 200));
  EXPECT_TRUE(same_end(workplace, "threads-1", "threads-4", 200));
}

TEST(Resume, AnF16RunGoesOnWithItsLossScale) {
  const Workplace workplace;
  for (const char* name : {"a", "b"})
    expect_success(run(workplace, std::string("train tnp --precision f16 --loss-scale 1048576 ") +
                                      "--loss-scale-interval 3 --steps 40 --save-every 20 --name " + name +
                                      kLogged));
  // As if the second had been killed after step 20.
  fs::remove(workplace / checkpoint_name("b", 40));
  fs::remove(workplace / "runs/b/report.html");
  const Outcome resumed = run(workplace, "train tnp --device cpu --quiet --resume runs/b");
  expect_success(resumed);
  EXPECT_TRUE(same_end(workplace, "a", "b", 40));
  const json scale = json::parse(workplace.get("runs/a/run.json")).at("loss_scale"),
             other = json::parse(workplace.get("runs/b/run.json")).at("loss_scale");
  EXPECT_EQ(scale, other);
  EXPECT_GT(scale.at("skipped_steps"), 0);
  const json last = metrics_of(workplace, "runs/b").back();
  EXPECT_EQ(last.at("skipped_steps"), scale.at("skipped_steps"));
  EXPECT_EQ(last.at("loss_scale"), scale.at("last"));
  const std::string at_end = "loss scale " + std::to_string(scale.at("last").get<int64_t>()) + " at the end";
  EXPECT_TRUE(holds_all(resumed.out, at_end));
  expect_failure(workplace, "train tnp --resume runs/b --steps 50 --loss-scale 8", 2,
                 "--loss-scale cannot change it");
  const std::string skipped = std::to_string(scale.at("skipped_steps").get<int64_t>());
  EXPECT_TRUE(holds_all(resumed.out, "skipped " + skipped + " steps|loss scale"));
  EXPECT_TRUE(holds_all(workplace.get("runs/b/report.html"), skipped + " of 40 steps skipped|Loss scale"));
}

TEST(Resume, TwoDoNotTrainInOneFolderAndLeftoversGo) {
  const Workplace workplace;
  workplace.put("runs/.metrics.jsonl.tmp-1-0", "not of a run");
  Process first(workplace, words_of("train tnp --steps 1000000 --name r" + kLogged));
  ASSERT_TRUE(wait_for(first, [&] { return steps_logged(workplace, "runs/r") >= 5; }));
  expect_failure(workplace, "train tnp --device cpu --resume runs/r", 1, "runs/r|another process");
  EXPECT_TRUE(first.running());
  first.send(SIGKILL);
  first.wait();
  workplace.put("runs/r/.metrics.jsonl.tmp-1-0", "of a writer that was killed");
  const int64_t more = steps_logged(workplace, "runs/r") + 1;
  expect_success(
      run(workplace, "train tnp --device cpu --quiet --resume runs/r --steps " + std::to_string(more)));
  EXPECT_FALSE(fs::exists(workplace / "runs/r/.metrics.jsonl.tmp-1-0"));
  EXPECT_TRUE(fs::exists(workplace / "runs/.metrics.jsonl.tmp-1-0"));
}

TEST(Resume, ARunThatMayNotSaveEndsBeforeItChangesAnything) {
  const Workplace workplace;
  fs::permissions(workplace.path(), fs::perms::all);
  const UnprivilegedUser user;
  expect_success(run(workplace, "train tnp --steps 4 --name r" + kLogged));
  const std::string metrics = workplace.get("runs/r/metrics.jsonl"),
                    settings = workplace.get("runs/r/run.json");
  fs::permissions(workplace / "runs/r/checkpoints", fs::perms::owner_read | fs::perms::owner_exec);
  expect_failure(workplace, "train tnp --device cpu --resume runs/r --steps 8", 1,
                 "runs/r/checkpoints is read-only for this user|check its permissions");
  fs::permissions(workplace / "runs/r/checkpoints", fs::perms::owner_all);
  EXPECT_EQ(workplace.get("runs/r/metrics.jsonl"), metrics);
  EXPECT_EQ(workplace.get("runs/r/run.json"), settings);
  EXPECT_TRUE(fs::exists(workplace / "runs/r/report.html"));
}

TEST(Resume, KilledBehindItsLastStepARunStillWritesItsPage) {
  const Workplace workplace;
  expect_success(run(workplace, "train tnp --steps 20 --name a" + kLogged));
  const std::string checkpoint = workplace.get(checkpoint_name("a", 20)),
                    metrics = workplace.get("runs/a/metrics.jsonl");
  const Outcome done = run(workplace, "train tnp --device cpu --quiet --resume runs/a");
  EXPECT_TRUE(done.code == 1 && holds_all(done.err, "finished its 20 steps|--steps")) << done.err;
  fs::remove(workplace / "runs/a/report.html");
  const Outcome late = run(workplace, "train tnp --device cpu --quiet --resume runs/a --json-out a.json");
  expect_success(late);
  EXPECT_TRUE(fs::exists(workplace / "runs/a/report.html"));
  EXPECT_EQ(workplace.get("runs/a/metrics.jsonl"), metrics);
  EXPECT_TRUE(workplace.get(checkpoint_name("a", 20)) == checkpoint);
  const json summary = json::parse(workplace.get("a.json"));
  const size_t last = metrics.rfind('\n', metrics.size() - 2);
  const json record = json::parse(metrics.substr(last + 1));
  EXPECT_EQ(summary["loss"], record["loss"]);
  EXPECT_EQ(summary["evaluation"]["eval_nll"], record["eval_nll"]);
}

TEST(SlowResume, KilledTwentyTimesEndsWithTheSameBits) {
  constexpr int64_t kSteps = 1500;
  constexpr int kKills = 20;
  const Workplace workplace;
  const std::string flags = "train tnp --steps 1500 --seed 5";
  expect_success(run(workplace, flags + " --name whole" + kLogged));
  std::mt19937 random(20);
  int kills = 0, in_saves = 0, before_checkpoints = 0;
  const fs::path checkpoints = workplace / "runs/cut/checkpoints";
  for (int round = 0; kills < kKills; ++round) {
    ASSERT_LT(round, 3 * kKills) << "the run ends before it is killed";
    const bool begun = fs::exists(workplace / "runs/cut/run.json");
    if (!begun) fs::remove_all(workplace / "runs/cut");  // killed before it said what it is
    Process process(workplace, words_of(begun ? "train tnp --quiet --resume runs/cut --device cpu"
                                              : flags + " --name cut --save-every 2" + kLogged));
    // Some kills while the process begins, some after a few steps, some in a save.
    const int64_t enough = steps_logged(workplace, "runs/cut") + int64_t(random() % 60);
    if (round % 4 == 0) {
      if (random() % 2) wait_for(process, [&] { return !process.out().empty(); });
    } else if (!wait_for(process, [&] { return steps_logged(workplace, "runs/cut") >= enough; })) {
      break;
    }
    if (round % 4 >= 2 && !stop_in_a_save(process, checkpoints)) break;
    process.send(SIGKILL);
    const Outcome killed = process.wait();
    if (killed.signal != SIGKILL) break;
    ++kills;
    in_saves += saves_now(checkpoints);
    before_checkpoints += !fs::exists(checkpoints) || fs::is_empty(checkpoints);
  }
  EXPECT_EQ(kills, kKills);
  EXPECT_GE(in_saves, 3) << "kills that left half a save";
  const Outcome last = run(workplace, "train tnp --quiet --resume runs/cut --device cpu");
  expect_success(last);
  EXPECT_EQ(last.err, "");  // nothing had to be passed over
  EXPECT_TRUE(same_end(workplace, "whole", "cut", kSteps));
  EXPECT_FALSE(saves_now(checkpoints));  // what the kills left is gone
  RecordProperty("killed_in_a_save", in_saves);
  RecordProperty("killed_before_a_checkpoint", before_checkpoints);
}

class Interrupted : public ::testing::TestWithParam<int> {};

TEST_P(Interrupted, SavesAndPrintsTheCommandThatGoesOn) {
  constexpr int64_t kSteps = 3000;
  const Workplace workplace;
  const std::string flags = "train tnp --steps 3000 --save-every 1000 --keep 2";
  expect_success(run(workplace, flags + " --name whole" + kLogged));
  Process process(workplace, words_of(flags + " --name cut" + kLogged));
  ASSERT_TRUE(wait_for(process, [&] { return steps_logged(workplace, "runs/cut") >= 5; }));
  process.send(GetParam());
  const Outcome cut = process.wait();
  ASSERT_EQ(cut.code, 128 + GetParam()) << cut.out << cut.err;
  const int64_t step = steps_logged(workplace, "runs/cut");
  EXPECT_LT(step, kSteps);
  EXPECT_TRUE(fs::exists(workplace / checkpoint_name("cut", step)));
  EXPECT_TRUE(holds_all(cut.out, "interrupted after step " + std::to_string(step) + "; saved"));
  EXPECT_TRUE(fs::exists(workplace / "runs/cut/report.html"));

  const size_t command = cut.out.find("tessera train tnp --resume");
  ASSERT_NE(command, std::string::npos) << cut.out;
  const std::string line = first_line(cut.out.substr(command + std::string("tessera ").size()));
  // A refusal changes nothing, also not the line that was logged only because the run was stopped.
  const std::string metrics = workplace.get("runs/cut/metrics.jsonl");
  for (const int64_t steps : {int64_t{1}, step}) {
    const Outcome refused = expect_failure(
        workplace, line + " --steps " + std::to_string(steps), 1,
        "the run is at step " + std::to_string(step) + " already|--steps " + std::to_string(steps));
    EXPECT_EQ(refused.err.find("finished"), std::string::npos) << refused.err;
  }
  EXPECT_EQ(workplace.get("runs/cut/metrics.jsonl"), metrics);
  const json before = json::parse(workplace.get("runs/cut/run.json"));
  expect_success(run(workplace, line));
  EXPECT_TRUE(same_end(workplace, "whole", "cut", kSteps));
  // It logged and saved as it did before, without being told again.
  const json after = json::parse(workplace.get("runs/cut/run.json"));
  EXPECT_EQ(after.at("options"), before.at("options"));
  EXPECT_EQ(after.at("job"), before.at("job"));
  EXPECT_TRUE(fs::exists(workplace / checkpoint_name("cut", 2000)));
}
INSTANTIATE_TEST_SUITE_P(By, Interrupted, ::testing::Values(SIGINT, SIGTERM, SIGHUP), [](const auto& info) {
  return std::string(info.param == SIGINT ? "Sigint" : info.param == SIGTERM ? "Sigterm" : "Sighup");
});

/// Whether the run has saved its last step and is evaluating.
bool evaluates(const Workplace& at, const std::string& run, int64_t step) {
  return fs::exists(at / checkpoint_name(run, step)) &&
         at.get("runs/" + run + "/metrics.jsonl").find("unevaluated") != std::string::npos;
}

TEST(InterruptedEvaluation, IsAcknowledgedAndTheRunEndsAsIfNothingHadBeen) {
  const Workplace workplace;
  const std::string flags = "train tnp --steps 6 --seed 3" + kLogged;
  expect_success(run(workplace, flags + " --name whole"));
  for (const int signals : {1, 2}) {
    const std::string name = "cut" + std::to_string(signals);
    std::string endless = flags + " --name " + name;  // an evaluation that does not end by itself
    endless.replace(endless.find("--eval-tasks 4"), 14, "--eval-tasks 16777216");
    Process process(workplace, words_of(endless));
    ASSERT_TRUE(wait_for(process, [&] { return evaluates(workplace, name, 6); }));
    for (int i = 0; i < signals; ++i) process.send(SIGINT);
    const Outcome cut = process.wait();
    ASSERT_EQ(cut.code, 130) << cut.out << cut.err;
    EXPECT_TRUE(holds_all(cut.err, "tessera: stopping"));
    if (signals == 1)
      EXPECT_TRUE(holds_all(cut.out, "interrupted after step 6; saved|--resume runs/" + name));
    EXPECT_FALSE(fs::exists(workplace / ("runs/" + name + "/report.html")));
    expect_success(run(workplace, "train tnp --quiet --device cpu --eval-tasks 4 --resume runs/" + name));
    EXPECT_TRUE(same_end(workplace, "whole", name, 6));
    const auto last_record = [&](const std::string& of) {
      return metrics_of(workplace, "runs/" + of).back();
    };
    EXPECT_EQ(last_record(name).at("eval_nll"), last_record("whole").at("eval_nll"));
    EXPECT_FALSE(last_record(name).contains("unevaluated"));
    EXPECT_TRUE(fs::exists(workplace / ("runs/" + name + "/report.html")));
  }
}

TEST(InterruptedPreparation, LeavesNoFolder) {
  const Workplace workplace;
  std::mt19937 random(4);
  std::string text;
  while (text.size() < 8'000'000) {
    for (uint32_t letters = 2 + random() % 9; letters > 0; --letters) text += char('a' + random() % 26);
    text += random() % 9 ? ' ' : '\n';
  }
  workplace.put("a.txt", text);
  Process process(workplace,
                  words_of("train gpt --text a.txt --tokenizer-kind bpe --vocab-size 100000 --name r "
                           "--device cpu --quiet --steps 1000000"));
  ASSERT_TRUE(wait_for(process, [&] { return fs::exists(workplace / "runs/r"); }));
  process.send(SIGINT);
  const Outcome cut = process.wait();
  EXPECT_EQ(cut.code, 130) << cut.out << cut.err;
  EXPECT_TRUE(holds_all(cut.err, "stopping|interrupted by Ctrl-C before there was a result"));
  EXPECT_EQ(workplace.files(), (std::vector<std::string>{"a.txt", "runs"}));
}

// Where its output shows the page the process has only its memory to free: to resume such a run is an error.
TEST(InterruptedEnd, OfARunThatIsCompleteChangesNothing) {
  const Workplace workplace;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const std::string name = "r" + std::to_string(signal);
    Process process(workplace, words_of("train tnp --steps 2" + kLogged + " --name " + name));
    wait_for(process, [&] { return process.out().find("report:") != std::string::npos; });
    process.send(signal), process.send(signal);
    const Outcome end = process.wait();
    EXPECT_EQ(end.code, 0) << end.signal << end.out << end.err;
    EXPECT_TRUE(fs::exists(workplace / ("runs/" + name + "/report.html")));
  }
}

struct Damage {
  const char* name;
  std::string (*apply)(std::string bytes);
};
void PrintTo(const Damage& damage, std::ostream* out) {
  *out << damage.name;
}

class DamagedNewest : public ::testing::TestWithParam<Damage> {};

TEST_P(DamagedNewest, IsPassedOverWithAWarning) {
  const Workplace workplace;
  // Another number of steps would change most schedules.
  const std::string flags = " --schedule constant --warmup 0 --save-every 2" + kLogged;
  expect_success(run(workplace, "train tnp --steps 8 --name whole" + flags));
  expect_success(run(workplace, "train tnp --steps 6 --name cut" + flags));
  const std::string newest = checkpoint_name("cut", 6);
  const std::string bytes = workplace.get(newest);
  ASSERT_GT(bytes.size(), 200u) << newest;  // what is damaged lies among them
  workplace.put(newest, GetParam().apply(bytes));
  const Outcome resumed = run(workplace, "train tnp --quiet --device cpu --resume runs/cut --steps 8");
  expect_success(resumed);
  EXPECT_TRUE(holds_all(resumed.err, "tessera: warning: passed over|step-000006"));
  EXPECT_TRUE(holds_all(resumed.out, "resuming from|step-000004|(step 4)"));
  EXPECT_TRUE(same_end(workplace, "whole", "cut", 8));
}
INSTANTIATE_TEST_SUITE_P(
    By, DamagedNewest,
    ::testing::Values(Damage{"Truncated",
                             [](std::string bytes) { return bytes.substr(0, bytes.size() - 1); }},
                      Damage{"Halved", [](std::string bytes) { return bytes.substr(0, bytes.size() / 2); }},
                      Damage{"Empty", [](std::string) { return std::string(); }},
                      Damage{"FlippedInATensor",
                             [](std::string bytes) {
                               bytes[bytes.size() - 9] = char(bytes[bytes.size() - 9] ^ 1);
                               return bytes;
                             }},
                      Damage{"FlippedInTheHeader",
                             [](std::string bytes) {
                               bytes[100] = char(bytes[100] ^ 1);
                               return bytes;
                             }}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(TornMetrics, AreLoggedAgain) {
  const Workplace workplace;
  const std::string flags = " --schedule constant --warmup 0" + kLogged;
  expect_success(run(workplace, "train tnp --steps 8 --name whole" + flags));
  expect_success(run(workplace, "train tnp --steps 6 --name cut" + flags));
  workplace.put("runs/cut/metrics.jsonl", workplace.get("runs/cut/metrics.jsonl") +
                                              R"({"step":7,"loss":9.0})" + "\n" + R"({"step":8,"lo)");
  expect_success(run(workplace, "train tnp --quiet --device cpu --resume runs/cut --steps 8"));
  EXPECT_TRUE(same_end(workplace, "whole", "cut", 8));
}

// ---- a full disk ----

/// A small file system of its own, seen by this process and its children only; gone with them.
class SmallDisk {
 public:
  SmallDisk(const fs::path& folder, const char* options) : folder_(folder) {
    fs::create_directories(folder);
    mounted_ = ::unshare(CLONE_NEWNS) == 0 &&
               ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
               ::mount("tmpfs", folder.c_str(), "tmpfs", 0, options) == 0;
  }
  ~SmallDisk() {
    if (mounted_) ::umount2(folder_.c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  bool mounted() const { return mounted_; }
  uint64_t free_bytes() const {
    struct statvfs info {};
    ::statvfs(folder_.c_str(), &info);
    return uint64_t(info.f_bavail) * info.f_frsize;
  }

 private:
  fs::path folder_;
  bool mounted_ = false;
};

TEST(FullDisk, EndsWithPathAndBytesAndTheLastCheckpointGoesOn) {
  const Workplace workplace;
  const SmallDisk disk(workplace / "runs", "size=8m");
  if (!disk.mounted()) GTEST_SKIP() << "a small file system can be mounted by root only";
  // Checkpoints of about a megabyte: there is room for the lines and rows of the run, but not for one of
  // them.
  const std::string flags =
      " --quiet --log-every 1 --device cpu --d-model 64 --d-ff 128 --n-head 1 --layers 1 --emb-hidden 64 "
      "--components 2 --m 4 --n 4 --batch-size 2 --eval-tasks 4 --schedule constant --warmup 0 --save-every "
      "2";
  expect_success(run(workplace, "train tnp --steps 8 --name whole --keep 1" + flags));
  expect_success(run(workplace, "train tnp --steps 4 --name cut --keep 2" + flags));
  const uint64_t size = fs::file_size(workplace / checkpoint_name("cut", 4));
  ASSERT_GT(disk.free_bytes(), size);
  ASSERT_GT(size, 600'000u);
  workplace.put("runs/filler", std::string(disk.free_bytes() - 300'000, 'x'));

  const std::string resume = "train tnp --quiet --device cpu --resume runs/cut --steps 8";
  expect_failure(workplace, resume, 1,
                 "tessera: write: |checkpoints/step-000006|" + std::to_string(size) +
                     " bytes are needed|are free|make room");
  EXPECT_FALSE(fs::exists(workplace / checkpoint_name("cut", 6)));
  EXPECT_FALSE(saves_now(workplace / "runs/cut/checkpoints"));
  expect_success(run(workplace, "eval tnp runs/cut --tasks 2 --device cpu"));

  fs::remove(workplace / "runs/filler");
  expect_success(run(workplace, resume));
  EXPECT_TRUE(same_end(workplace, "whole", "cut", 8));
}

TEST(Resume, ARunThatMetOtherTasksIsNotContinued) {
  const Workplace workplace;
  expect_success(run(workplace, "train tnp --steps 4 --name r" + kLogged));
  json settings = json::parse(workplace.get("runs/r/run.json"));
  EXPECT_EQ(settings.at("job").at("task_stream"), 2);
  settings["job"].erase("task_stream");  // as in a run of before there were versions
  workplace.put("runs/r/run.json", settings.dump());
  const std::vector<std::string> before = workplace.files();
  expect_failure(workplace, "train tnp --quiet --device cpu --resume runs/r --steps 8", 1,
                 "runs/r/run.json|version 1|version 2|new run|eval tnp");
  EXPECT_EQ(workplace.files(), before);
  EXPECT_EQ(json::parse(workplace.get("runs/r/run.json")), settings);
  settings["job"]["task_stream"] = 3;
  workplace.put("runs/r/run.json", settings.dump());
  expect_failure(workplace, "eval tnp runs/r --tasks 2 --device cpu", 1, "run.json|task_stream|3|1 to 2");
}

TEST(Resume, StepsThatDoNotFitTheRunAreRefusedBeforeAnythingIsWritten) {
  const Workplace workplace;
  const std::string run_json = "runs/r/run.json", resume = "train tnp --quiet --device cpu --resume runs/r";
  expect_success(run(workplace,
                     "train tnp --schedule cosine_restarts --restarts 3 --steps 40 --warmup 4 --save-every 4 "
                     "--keep 20 --quiet --name r" +
                         kTiny));
  cut_back(workplace, "runs/r", 4);
  const std::string before = workplace.get(run_json);
  expect_failure(workplace, resume + " --steps 5", 1, "schedule: 3 restarts");
  EXPECT_EQ(workplace.get(run_json), before);
  expect_success(run(workplace, resume));
}

TEST(Resume, DoesNotKeepASlowCheckOfTheCallBefore) {
  const Workplace workplace;
  workplace.put("c.toml", "check-finite = false\n");
  expect_success(run(workplace, "train tnp --steps 2 --check-finite --name r" + kLogged));
  EXPECT_FALSE(json::parse(workplace.get("runs/r/run.json")).at("options").contains("check_finite"));
  expect_success(run(workplace, "train tnp --quiet --device cpu --resume runs/r --steps 4 --config c.toml"));
}

/// tests/cli/earlier holds runs of version 0.1.0 at revision 0fa62f4c96a1, stopped after step 4, and the
/// whole curves that it gave: a TNP in f16, and a LLaMA with micro-batches, averages of the weights and
/// dropout.
class EarlierRun : public ::testing::TestWithParam<const char*> {};

TEST_P(EarlierRun, GoesOnToItsEnd) {
  const Workplace workplace;
  const std::string model = GetParam(), name = "runs/" + model;
  fs::create_directories(workplace / "runs");
  fs::copy(tessera::test::place("TESSERA_TEST_DATA", TESSERA_TEST_DATA) + "/cli/earlier/" + model,
           workplace / name, fs::copy_options::recursive);
  const json before = json::parse(workplace.get(name + "/run.json"));
  const Outcome resumed = run(workplace, "train " + model + " --quiet --device cpu --resume " + name);
  expect_success(resumed);
  EXPECT_TRUE(holds_all(resumed.out, "(step 4)|trained 4 steps"));
  const json after = json::parse(workplace.get(name + "/run.json"));
  json job = before.at("job");
  for (const auto& [old, now] :
       {std::pair("clip_norm", "max_grad_norm"), std::pair("final_lr", "min_lr_ratio")})
    if (job.contains(old)) job[now] = job[old], job.erase(old);  // renamed since
  EXPECT_EQ(after.at("job"), job);
  json options = before.at("options");
  options.erase("check_finite");  // which was kept once
  EXPECT_EQ(after.at("options"), options);
  const std::vector<json> expected = json_lines(workplace.get(name + "/expected.jsonl")),
                          found = metrics_of(workplace, name);
  ASSERT_EQ(expected.size(), 8u);
  ASSERT_EQ(found.size(), 8u);
  for (size_t i = 0; i < 8; ++i)
    // Another processor's BLAS may round otherwise: the last bits of 8 steps in f32; f16 keeps 11 bits.
    for (const auto& [key, value] : expected[i].items())
      if (value.is_number())
        EXPECT_NEAR(found[i].at(key).get<double>(), value.get<double>(), 2e-3 * std::abs(value.get<double>()))
            << key << " of " << expected[i];
      else
        EXPECT_EQ(found[i].at(key), value) << key << " of " << expected[i];
}
INSTANTIATE_TEST_SUITE_P(Of, EarlierRun, ::testing::Values("tnp", "llama"));

TEST(FullDisk, WithoutAByteLeftTheMessageIsStillTheDisks) {
  const Workplace workplace;
  const SmallDisk disk(workplace / "runs", "size=1m");
  if (!disk.mounted()) GTEST_SKIP() << "a small file system can be mounted by root only";
  expect_success(run(workplace, "train tnp --steps 4 --save-every 2 --name cut" + kLogged));
  workplace.put("runs/filler", std::string(disk.free_bytes(), 'x'));
  const std::string resume = "train tnp --quiet --device cpu --resume runs/cut --steps 8";
  expect_failure(workplace, resume, 1, "runs/cut/|bytes are needed|0 are free|make room");
  fs::remove(workplace / "runs/filler");
  expect_success(run(workplace, resume));
  EXPECT_EQ(steps_logged(workplace, "runs/cut"), 8);
}

}  // namespace
}  // namespace tessera::cli::test

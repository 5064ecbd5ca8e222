#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#if defined(TESSERA_WITH_SQLITE)
#include <sqlite3.h>
#endif

#include "io/checkpoint_folder.h"
#include "io/events.h"
#include "io/safetensors.h"
#include "io/utf8.h"
#include "tests/cli/command.h"

// What the subcommands print and write when all is well.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++count;
  return count;
}

/// The standard output of a line that must succeed.
// ---- help ----

class Help : public ::testing::TestWithParam<const char*> {};

TEST_P(Help, FitsAScreen) {
  const Workplace workplace;
  for (const char* flag : {"--help", "-h"}) {
    const Outcome outcome = run(workplace, GetParam() + std::string(" ") + flag);
    EXPECT_EQ(outcome.code, 0);
    EXPECT_EQ(outcome.err, "");
    const auto lines = lines_of(outcome.out);
    EXPECT_GT(lines.size(), 4u);
    // A maximised terminal of an ordinary display; training has the flags of every optimizer and of ranks.
    EXPECT_LE(lines.size(), std::string(GetParam()) == "train tnp" ? 83u : 60u) << outcome.out;
    for (const std::string& line : lines) EXPECT_LE(line.size(), 120u) << line;
    EXPECT_TRUE(holds_all(outcome.out, std::string("Usage: tessera ") + GetParam()));
  }
  EXPECT_TRUE(workplace.files().empty());
}
INSTANTIATE_TEST_SUITE_P(Levels, Help,
                         ::testing::Values("", "doctor", "train", "train tnp", "eval", "eval tnp", "op",
                                           "bench", "bench op", "bench step", "bench step tnp", "bench host",
                                           "bench sweep", "bench optim", "bench copy", "bench compare",
                                           "plan", "plan tnp", "report"));

TEST(Threads, AWrongNumberIsOneLineAndOneOfOpenMpIsIgnored) {
  const Workplace at;
  for (const char* wrong : {"0", "abc"}) {
    {
      const Variable set("TESSERA_THREADS", wrong);
      for (const char* line : {"--version", "op --list"}) {
        const Outcome outcome = run(at, line);
        EXPECT_EQ(outcome.code, 2) << outcome.signal;
        EXPECT_EQ(outcome.out, "");
        EXPECT_EQ(outcome.err, std::string("tessera: TESSERA_THREADS is \"") + wrong +
                                   "\"; expected a number of threads from 1 to 4096\n");
      }
    }
    const Variable unset("TESSERA_THREADS", ""), set("OMP_NUM_THREADS", wrong);
    const Outcome outcome = run(at, "--version");
    EXPECT_EQ(outcome.code, 0) << outcome.signal;
    EXPECT_TRUE(holds_all(outcome.err, "tessera: warning: OMP_NUM_THREADS is |it is ignored"));
  }
}

/// The formats are those that the operator takes.
TEST(HelpText, NamesTheFormatsOfCompressedWeights) {
  const Workplace workplace;
  const std::string ops = said(workplace, "op --list"), before = "one of ";
  const size_t attr = ops.find("  set  format ", ops.find("\nsparse_linear:"));
  ASSERT_NE(attr, std::string::npos);
  const size_t begin = ops.find(before, attr) + before.size();
  std::string formats = ops.substr(begin, ops.find('\n', begin) - begin);
  std::erase(formats, ' ');
  EXPECT_NE(formats.find("tca-bme,"), std::string::npos) << formats;
  for (const char* command : {"bench decode", "sparsify"})
    EXPECT_NE(said(workplace, std::string(command) + " --help").find("--format {" + formats + "}"),
              std::string::npos)
        << command;
  EXPECT_NE(said(workplace, "convert --help").find("--format {" + formats + ",dense}"), std::string::npos);
}

TEST(HelpText, ShowsDefaultsAndChoices) {
  const Workplace workplace;
  EXPECT_TRUE(holds_all(said(workplace, "plan tnp --help"), "--context-parallel INT=1|--context-split"));
  EXPECT_TRUE(holds_all(said(workplace, "train tnp --help"),
                        "--steps INT=1000|--lr FLOAT=0.001|--batch-size INT=16|--precision "
                        "{f32,tf32,bf16,f16}|default: bf16 on a GPU that supports it, else f32|"
                        "{constant,linear,cosine,wsd,cosine_restarts,cosine_warmups}=cosine|--runs TEXT=runs|"
                        "--keep INT=3|cuda:<index>"));
  EXPECT_TRUE(holds_all(said(workplace, "bench op --help"), "--seconds FLOAT=0.5|--mode TEXT=fwd,bwd"));
  EXPECT_TRUE(holds_all(said(workplace, "eval tnp --help"), "--eval-tasks INT=4096"));
}

TEST(Version, IsOneLine) {
  const Workplace workplace;
  const std::string out = said(workplace, "--version");
  EXPECT_TRUE(out.starts_with("tessera ")) << out;
  EXPECT_EQ(lines_of(out).size(), 1u);
}

// ---- op ----

Tensor square(const std::vector<float>& values) {
  return Tensor::from(values, {2, 2});
}

TEST(OpList, AsJsonIsTheSameListAsInWords) {
  const Workplace workplace;
  const json all = json::parse(said(workplace, "op --list --json"));
  const std::string words = said(workplace, "op --list");
  ASSERT_GE(all.size(), 20u);
  std::set<std::string> names;
  for (const json& op : all) {
    const auto name = op.at("name").get<std::string>();
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_NE(("\n" + words).find("\n" + name + ": " + op.at("summary").get<std::string>() + "\n"),
              std::string::npos)
        << name;
    EXPECT_FALSE(op.at("inputs").empty()) << name;
    EXPECT_FALSE(op.at("outputs").empty()) << name;
    EXPECT_FALSE(op.at("dtypes").at("cpu").empty()) << name;
    for (const json& attr : op.at("attributes")) EXPECT_TRUE(attr.contains("default")) << name;
  }
  EXPECT_EQ(count_of(words, "\n  dtypes: "), all.size());
  EXPECT_TRUE(names.contains("relu") && names.contains("attention") && names.contains("gmm_nll"));
}

TEST(OpRun, WritesOutputsAndGradients) {
  const Workplace workplace;
  const Tensor x = square({-1.0f, 2.0f, 0.0f, 3.5f}), d = square({5.0f, 6.0f, 7.0f, 8.0f});
  io::save_safetensors(workplace / "x", {{"x", x}});
  io::save_safetensors(workplace / "xd", {{"x", x}, {"d_y", d}});
  EXPECT_EQ(said(workplace, "op relu --in x --out y"), "");
  EXPECT_EQ(said(workplace, "op relu --in xd --out yd --grad"), "");
  auto y = io::load_safetensors(workplace / "y"), yd = io::load_safetensors(workplace / "yd");
  ASSERT_EQ(y.size(), 1u);
  ASSERT_EQ(yd.size(), 2u);
  const std::vector<float> relu = {0, 2, 0, 3.5f};
  EXPECT_EQ(y.at("y").to_vector<float>(), relu);
  EXPECT_EQ(yd.at("y").to_vector<float>(), relu);
  EXPECT_EQ(yd.at("d_x").to_vector<float>(), (std::vector<float>{0, 6, 0, 8}));
  EXPECT_EQ(y.at("y").shape(), Shape({2, 2}));
}

TEST(OpRun, KeepsTheDTypeAndTakesAttributes) {
  const Workplace workplace;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    io::save_safetensors(workplace / "x", {{"x", square({1.0f, 2.0f, 3.0f, 5.0f}).to(dtype)}});
    said(workplace, "op sum --in x --out y --set dim=0 --set keep=true");
    const Tensor y = io::load_safetensors(workplace / "y").at("y");
    EXPECT_EQ(y.dtype(), dtype);
    EXPECT_EQ(y.shape(), Shape({1, 2}));
    EXPECT_EQ(y.to_vector<double>(), (std::vector<double>{4, 7}));
  }
}

/// The help of the command and of its subcommands at every depth.
void expect_help_within(const Workplace& workplace, const std::string& command, size_t width) {
  const std::string help = said(workplace, command + " --help");
  bool of_subcommands = false;
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_LE(line.size(), width) << command << ": " << line;
    if (of_subcommands && line.starts_with("  ") && line[2] != ' ')
      expect_help_within(workplace, command + " " + line.substr(2, line.find(' ', 2) - 2), width);
    of_subcommands = line == "Subcommands:" || (of_subcommands && line.starts_with("  "));
  }
}

TEST(Help, LinesOfAllCommandsFitAScreen) {
  expect_help_within(Workplace(), "", 120);
}

// ---- doctor and plan ----

TEST(Help, OfGptNamesNoFlagOfLlamaAsItsOwn) {
  const Workplace workplace;
  const std::string help = said(workplace, "train gpt --help");
  EXPECT_EQ(help.find("needs --ffn"), std::string::npos);
  EXPECT_TRUE(holds_all(help, "--activation-l1|needs train llama --ffn relu2 or relu"));
}

TEST(Doctor, AsJsonNamesWhatIsMissingAndWhatInstallsIt) {
  const Workplace workplace;
  const json facts = json::parse(said(workplace, "doctor --json"));
  for (const char* key : {"version", "revision", "compiler", "cpu_flags", "cuda", "blas", "system"})
    EXPECT_TRUE(facts.at(key).is_string()) << key;
  std::set<std::string> names;
  for (const json& part : facts.at("parts")) {
    names.insert(part.at("name").get<std::string>());
    EXPECT_EQ(part.at("present").get<bool>(), part.at("lost").get<std::string>().empty()) << part;
  }
  for (const json& part : facts.at("parts"))
    if (part.at("name") == "BLAS")
      EXPECT_TRUE(holds_all(part.at("value").get<std::string>(), "kernels for")) << part;
  for (const char* name : {"CPU", "BLAS", "SQLite", "libpng", "TensorBoard files", "Chart.js", "operators"})
    EXPECT_TRUE(names.contains(name)) << name;
  const auto present = [&](const char* name) {
    for (const json& part : facts.at("parts"))
      if (part.at("name") == name) return part.at("present").get<bool>();
    return false;
  };
  EXPECT_EQ(present("TensorBoard files"), io::EventWriter::available());
#if defined(TESSERA_WITH_SQLITE)
  EXPECT_TRUE(present("SQLite"));
#else
  EXPECT_FALSE(present("SQLite"));
#endif
  EXPECT_TRUE(holds_all(said(workplace, "doctor"), "[ok]|operators"));
}

TEST(Doctor, LinksOfThisMachine) {
  const Workplace workplace;
  const json found = json::parse(said(workplace, "doctor --links --json")).at("links");
  ASSERT_EQ(found.at("ranks").size(), 1u);
  EXPECT_EQ(found.at("multicast"), false);
  const json& machine = found.at("ranks")[0].at("machine");
  for (const char* key : {"gpus", "links", "shm", "memlock", "open_files", "nccl"})
    EXPECT_TRUE(machine.contains(key)) << key;
  const size_t gpus = machine.at("gpus").size();
  EXPECT_EQ(machine.at("links").size(), gpus * (gpus - (gpus > 0)));
  EXPECT_TRUE(holds_all(said(workplace, "doctor --links"), "NCCL|/dev/shm|open files|NVLink multicast: off"));
}

TEST(Plan, AsJsonAddsUp) {
  const Workplace workplace;
  const json plan = json::parse(said(workplace, "plan tnp --memory 80 --precision bf16 --json"));
  EXPECT_EQ(plan.at("memory_bytes"), 80.0 * (1 << 30));
  const double count = plan.at("parameter_count");
  for (const char* kind : {"plain", "checkpointed"}) {
    const json& part = plan.at(kind);
    EXPECT_EQ(part.at("total").get<double>(),
              part.at("parameters").get<double>() + part.at("gradients").get<double>() +
                  part.at("optimizer").get<double>() + part.at("saved").get<double>() +
                  part.at("transient").get<double>());
    EXPECT_EQ(part.at("parameters"), 2 * count);
    EXPECT_GE(part.at("largest_batch").get<int64_t>(), 1);
  }
  EXPECT_LT(plan["checkpointed"]["saved"].get<double>(), plan["plain"]["saved"].get<double>());
  EXPECT_GT(plan["checkpointed"]["flops"].get<double>(), plan["plain"]["flops"].get<double>());
  EXPECT_GT(plan["checkpointed"]["largest_batch"].get<int64_t>(),
            plan["plain"]["largest_batch"].get<int64_t>());
  EXPECT_TRUE(holds_all(said(workplace, "plan tnp --memory 80"), "parameters|optimizer|largest batch"));
}

// ---- bench ----

TEST(Bench, OpWritesRecordsThatCompareReads) {
  const Workplace workplace;
  const std::string line =
      "bench op linear --device cpu --shape B=1,T=4,bias=0,in=8,out=8 --seconds 0.01 --json a.jsonl";
  EXPECT_TRUE(holds_all(said(workplace, line), "linear|fwd|bwd|f32"));
  said(workplace, line + " --mode fwd --dtype f64,bf16");
  const auto records = json_lines(workplace.get("a.jsonl"));
  ASSERT_EQ(records.size(), 4u);  // appended
  std::set<std::string> kinds;
  for (const json& record : records) {
    EXPECT_EQ(record.at("op"), "linear");
    EXPECT_EQ(record.at("shape").at("T"), 4);
    EXPECT_EQ(record.at("device"), "cpu");
    EXPECT_GT(record.at("ms").at("p50").get<double>(), 0);
    EXPECT_LE(record.at("ms").at("p10").get<double>(), record.at("ms").at("p90").get<double>());
    EXPECT_GT(record.at("flops").get<double>(), 0);
    kinds.insert(record.at("dtype").get<std::string>() + " " + record.at("mode").get<std::string>());
  }
  EXPECT_EQ(kinds, (std::set<std::string>{"f32 fwd", "f32 bwd", "f64 fwd", "bf16 fwd"}));
  const std::string out = said(workplace, "bench compare a.jsonl a.jsonl --html page.html");
  EXPECT_EQ(count_of(out, "1.00x"), 4u) << out;
  EXPECT_TRUE(holds_all(workplace.get("page.html"), "<!doctype html>|linear|Benchmark comparison"));
  // A forced variant is named, also in records of the time when they were called rows; an unknown share is
  // not 0 %.
  std::string forced = first_line(workplace.get("a.jsonl"));
  forced.replace(forced.find("\"variant\":\"\""), 12, "\"row\":\"big\"");
  workplace.put("b.jsonl", forced + "\n");
  said(workplace, "bench compare b.jsonl a.jsonl --html page.html");
  EXPECT_TRUE(holds_all(workplace.get("page.html"), "<td>tessera variant big</td>|<td>-</td>")) << forced;
}

TEST(Bench, OpTakesSeveralShapes) {
  const Workplace workplace;
  said(workplace,
       "bench op softmax --device cpu --shape R=2,C=3 --shape R=4,C=3 --mode fwd --seconds 0.001 --json "
       "a.jsonl");
  const auto records = json_lines(workplace.get("a.jsonl"));
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0].at("shape").at("R"), 2);
  EXPECT_EQ(records[1].at("shape").at("R"), 4);
}

TEST(Bench, OpPrintsAndWritesEachRowAtOnceSoThatAnInterruptKeepsIt) {
  const Workplace workplace;
  Process process(workplace, words_of("bench op matmul --device cpu --shape M=2,N=3,K=4 --shape "
                                      "M=4096,N=4096,K=4096 --mode fwd --seconds 600 --json a.jsonl"));
  ASSERT_TRUE(wait_for(process, [&] { return process.out().find("matmul") != std::string::npos; }));
  process.send(SIGINT);  // while the second problem is measured, which takes minutes
  const Outcome outcome = process.wait();
  EXPECT_NE(outcome.code, 0);
  EXPECT_EQ(count_of(outcome.out, "matmul"), 1u) << outcome.out;
  const auto records = json_lines(workplace.get("a.jsonl"));
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].at("shape").at("M"), 2);
}

TEST(Bench, OpTakesSizesOfACpuByDefault) {
  const Workplace workplace;
  said(workplace, "bench op gelu --device cpu --shape C=1365 --mode fwd --seconds 0.001 --json a.jsonl");
  const json record = json_lines(workplace.get("a.jsonl")).at(0);
  EXPECT_LT(record.at("shape").at("R"), 10000) << "a GPU's default is 36096";
}

TEST(Bench, CompareLeavesOutAnotherGpuUnlessAsked) {
  const Workplace workplace;
  const std::string ours =
      R"({"op":"silu","shape":{"R":4},"dtype":"bf16","device":"cuda","gpu":"NVIDIA H200","mode":"fwd","implementation":"tessera","ms":{"p10":1,"p50":2,"p90":3}})";
  std::string theirs = ours;
  theirs.replace(theirs.find("H200"), 4, "H100");
  workplace.put("a.jsonl", ours + "\n");
  workplace.put("b.jsonl", theirs + "\n");
  expect_failure(workplace, "bench compare a.jsonl b.jsonl", 1, "b.jsonl|same GPU model|--any-gpu");
  EXPECT_TRUE(holds_all(said(workplace, "bench compare a.jsonl b.jsonl --any-gpu"), "silu|1.00x"));
}

TEST(Bench, SweepWritesVerdictsThatCompareCounts) {
  const Workplace workplace;
  const std::string words = said(workplace, "bench sweep relu linear --device cpu --count 6 --json a.jsonl");
  EXPECT_EQ(count_of(words, " 12 measurements"), 2u) << words;
  EXPECT_EQ(count_of(words, " 0 wrong"), 2u) << words;
  const auto records = json_lines(workplace.get("a.jsonl"));
  ASSERT_EQ(records.size(), 24u);
  for (const json& record : records) EXPECT_EQ(record.at("sweep").at("verdict"), "ok");
  EXPECT_TRUE(holds_all(said(workplace, "bench compare a.jsonl a.jsonl --html page.html"),
                        "slower than 1.3x|linear  bwd          6|relu    fwd          6"));
  EXPECT_TRUE(holds_all(workplace.get("page.html"), "Sweep: linear bwd"));

  json wrong = records[0];
  wrong["sweep"]["verdict"] = "y: error 1";
  workplace.put("b.jsonl", wrong.dump() + "\n");
  const Outcome outcome = run(workplace, "bench compare b.jsonl a.jsonl");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(holds_all(outcome.out, "WRONG relu|y: error 1"));
}

TEST(Bench, OptimAndCopy) {
  const Workplace workplace;
  said(workplace,
       "bench optim --device cpu --parameters 5000 --dtype f32,bf16 --seconds 0.01 --json o.jsonl");
  said(workplace, "bench copy --device cpu --json o.jsonl");
  std::set<std::string> kinds;
  for (const json& record : json_lines(workplace.get("o.jsonl"))) {
    EXPECT_GT(record.at("gbs").get<double>(), 0);
    EXPECT_GT(record.at("copy_gbs").get<double>(), 0);
    const std::string clip = record.contains("attrs") ? record.at("attrs").at("clip").get<std::string>() : "";
    kinds.insert(record.at("op").get<std::string>() + " " + record.at("dtype").get<std::string>() + clip);
  }
  EXPECT_EQ(kinds, (std::set<std::string>{"adamw f32on", "adamw f32off", "adamw bf16on", "adamw bf16off",
                                          "copy f32"}));
}

TEST(Bench, StepAndHost) {
  const Workplace workplace;
  const std::string tiny =
      " --device cpu --d-model 8 --d-ff 8 --n-head 1 --layers 1 --emb-hidden 8 --components 2 --m 4 --n 4 "
      "--batch-size 2";
  said(workplace, "bench step tnp --checkpoint on,off --seconds 0.01 --json s.jsonl" + tiny);
  said(workplace, "bench host --device cpu --json h.jsonl");
  std::set<std::string> steps, hosts;
  for (const json& record : json_lines(workplace.get("s.jsonl"))) {
    EXPECT_GT(record.at("tokens_per_s").get<double>(), 0);
    steps.insert(record.at("op").get<std::string>() + " " +
                 record.at("attrs").at("checkpoint").get<std::string>());
  }
  for (const json& record : json_lines(workplace.get("h.jsonl")))
    hosts.insert(record.at("mode").get<std::string>());
  EXPECT_EQ(steps, (std::set<std::string>{"step tnp on", "step tnp off"}));
  said(workplace, "bench step tnp --checkpoint-interval 2 --seconds 0.01 --json c.jsonl" + tiny);
  const json grouped = json::parse(workplace.get("c.jsonl"));
  EXPECT_EQ(grouped.at("attrs").at("checkpoint"), "on");
  EXPECT_EQ(grouped.at("shape").at("group"), 2);
  EXPECT_EQ(hosts, (std::set<std::string>{"fwd", "bwd"}));
}

// ---- train and eval ----

#if defined(TESSERA_WITH_SQLITE)
/// The first row that the query gives, as words.
std::vector<std::string> query(const fs::path& database, const std::string& sql) {
  sqlite3* handle = nullptr;
  std::vector<std::string> row;
  EXPECT_EQ(sqlite3_open_v2(database.c_str(), &handle, SQLITE_OPEN_READONLY, nullptr), SQLITE_OK);
  sqlite3_stmt* statement = nullptr;
  EXPECT_EQ(sqlite3_prepare_v2(handle, sql.c_str(), -1, &statement, nullptr), SQLITE_OK)
      << sqlite3_errmsg(handle);
  if (sqlite3_step(statement) == SQLITE_ROW)
    for (int i = 0; i < sqlite3_column_count(statement); ++i) {
      const auto* text = reinterpret_cast<const char*>(sqlite3_column_text(statement, i));
      row.push_back(text ? text : "null");
    }
  sqlite3_finalize(statement);
  sqlite3_close(handle);
  return row;
}
#endif

#if defined(TESSERA_WITH_SQLITE)
TEST(Train, SeveralSeedsHaveARowTogetherAndOneEach) {
  const Workplace workplace;
  ASSERT_EQ(run(workplace, "data glue --out glue --task sst2 --train 40 --dev 12 --test 6").code, 0);
  const Outcome outcome =
      run(workplace,
          "train bert --task sst2 --data glue --seeds 2 --steps 3 --scratch --layers 1 --d-model 8 "
          "--n-head 1 --d-ff 8 --vocab-size 300 --batch-size 4 --max-length 32 --device cpu "
          "--quiet --name g --json out.json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto row = query(workplace / "runs/runs.sqlite",
                         "SELECT model, status, steps, best_eval, device, count(*) FROM runs");
  const double score = json::parse(workplace.get("out.json")).at("metrics").at("eval_score").at("mean");
  ASSERT_EQ(row.size(), 6u);
  EXPECT_EQ(row[0] + " " + row[1] + " " + row[2] + " " + row[4] + " " + row[5], "bert finished 3 cpu 1");
  EXPECT_NEAR(std::stod(row[3]), score, 1e-12);
  EXPECT_EQ(query(workplace / "runs/g/runs.sqlite", "SELECT count(*), min(best_eval) >= 0 FROM runs"),
            (std::vector<std::string>{"2", "1"}));
}
#endif

TEST(Train, EveryPriorHasFeaturesOfItsOwn) {
  const Workplace workplace;
  for (const std::string prior : {"linear", "rbf", "matern52", "periodic"}) {
    const Outcome outcome =
        run(workplace, "train tnp --steps 2 --prior " + prior + " --name " + prior + kTiny);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const bool linear = prior == "linear";
    EXPECT_TRUE(holds_all(outcome.out, "prior " + prior + (linear ? ", 10 features," : ", 1 feature,")));
    EXPECT_EQ(json::parse(workplace.get("runs/" + prior + "/run.json")).at("job").at("model.features"),
              linear ? 10 : 1);
  }
  const Outcome given = run(workplace, "train tnp --steps 2 --features 2 --name given" + kTiny);
  EXPECT_TRUE(holds_all(given.out, "prior linear, 2 features,")) << given.err;
}

TEST(Train, WritesTheWholeRunFolder) {
  const Workplace workplace;
  const Outcome outcome = run(workplace,
                              "train tnp --prior rbf --steps 20 --log-every 5 --eval-every 10 --save-every 5 "
                              "--name r --json-out out.json --seed 3" +
                                  kTiny);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  // A pipe gets plain lines: no colour, nothing rewritten.
  for (const std::string& text : {outcome.out, outcome.err}) {
    EXPECT_EQ(text.find('\033'), std::string::npos);
    EXPECT_EQ(text.find('\r'), std::string::npos);
  }
  EXPECT_TRUE(holds_all(outcome.out,
                        "tnp on cpu|parameters|prior rbf, 1 feature, M=|drawn on cpu|seed 3|trained 20 "
                        "steps|Bayes-optimal|report: "));
  EXPECT_TRUE(holds_all(outcome.err, "step 20/20  loss |lr |tok/s|ms/step"));

  const json settings = json::parse(workplace.get("runs/r/run.json"));
  EXPECT_EQ(settings.at("model"), "tnp");
  EXPECT_EQ(settings.at("device"), "cpu");
  EXPECT_EQ(settings.at("job").at("seed"), 3);
  EXPECT_EQ(settings.at("job").at("steps"), 20);
  EXPECT_EQ(settings.at("job").at("prior"), "rbf");
  EXPECT_EQ(settings.at("options").at("save_every"), 5);
  EXPECT_TRUE(settings.at("build").at("revision").is_string());

  const std::vector<json> metrics = metrics_of(workplace, "runs/r");
  std::vector<int64_t> steps, evaluated;
  for (const json& record : metrics) {
    steps.push_back(record.at("step"));
    for (const char* name :
         {"loss", "lr", "grad_norm", "ms_per_step", "tokens_per_s", "data_wait", "memory_gib"})
      EXPECT_TRUE(record.at(name).is_number()) << record;
    if (record.contains("eval_nll")) evaluated.push_back(record["step"]);
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 5, 10, 15, 20}));
  EXPECT_EQ(evaluated, (std::vector<int64_t>{10, 20}));

  const io::CheckpointFolder checkpoints(workplace / "runs/r/checkpoints");
  EXPECT_EQ(checkpoints.steps(), (std::vector<int64_t>{20, 15, 10}));  // --keep 3
  EXPECT_EQ(*checkpoints.latest().step, 20);
  EXPECT_TRUE(checkpoints.latest().warnings.empty());

  const std::string report = workplace.get("runs/r/report.html");
  EXPECT_TRUE(holds_all(report,
                        "<!doctype html>|tnp on the rbf prior|Negative log-likelihood|Predictive density|"
                        "Bayes-optimal|job/seed|</html>"));
  EXPECT_EQ(report.find("src=\"http"), std::string::npos);  // it needs no network

  size_t event_files = 0;
  for (const std::string& name : workplace.files()) {
    if (name.find("runs/r/events.") != 0) continue;
    ++event_files;
    const std::string bytes = workplace.get(name);
    EXPECT_EQ(count_of(bytes, "\x0a\x04loss"), metrics.size());  // the tag, with its length before it
    EXPECT_EQ(count_of(bytes,
                       "\x0a\x08"
                       "eval_nll"),
              evaluated.size());
  }
  EXPECT_EQ(event_files, io::EventWriter::available() ? 1u : 0u);

  const json summary = json::parse(workplace.get("out.json"));
  EXPECT_EQ(summary.at("outcome"), "finished");
  EXPECT_EQ(summary.at("steps"), 20);
  EXPECT_EQ(summary.at("run"), "runs/r");
  EXPECT_EQ(summary.at("config"), settings.at("job"));
  EXPECT_EQ(summary.at("loss"), metrics.back().at("loss"));
  EXPECT_EQ(summary.at("evaluation").at("eval_nll"), metrics.back().at("eval_nll"));
  for (const char* name : {"tokens_per_s", "tasks_per_s", "points_per_s"})
    EXPECT_GT(summary.at("throughput").at(name).get<double>(), 0) << name;
  EXPECT_GT(summary.at("avg_step_ms").get<double>(), 0);
  EXPECT_GT(summary.at("timing_s").at("total").get<double>(), 0);
  EXPECT_GT(summary.at("peak_mem_bytes").get<int64_t>(), 0);

#if defined(TESSERA_WITH_SQLITE)
  const auto row = query(workplace / "runs/runs.sqlite",
                         "SELECT path, model, status, steps, device, count(*) OVER () FROM runs");
  EXPECT_EQ(row, (std::vector<std::string>{(fs::canonical(workplace.path()) / "runs/r").string(), "tnp",
                                           "finished", "20", "cpu", "1"}));
#endif
}

TEST(Train, APathThatIsNotUtf8IsWrittenWithItsBytesEscaped) {
  const Workplace at;
  const std::string runs = "caf\xE9", shown = "caf\\xE9";
  said(at, "train tnp --quiet --steps 2 --runs " + runs + " --name r --json-out " + runs + ".json" + kTiny);
  EXPECT_EQ(json::parse(at.get(runs + ".json")).at("run"), shown + "/r");
  EXPECT_EQ(json::parse(said(at, "eval tnp " + runs + "/r --tasks 2 --json --device cpu")).at("run"),
            shown + "/r");
  said(at, "train tnp --quiet --resume " + runs + "/r --steps 3 --device cpu");
  said(at, "train tnp --quiet --steps 2 --name r\xFF" + kTiny);
  said(at, "report runs/r\xFF " + runs + "/r --out p.html");
  for (const std::string& page : {std::string("p.html"), std::string("runs/r\xFF/report.html")}) {
    EXPECT_TRUE(io::is_utf8(at.get(page))) << page;
    EXPECT_TRUE(holds_all(at.get(page), "r\\xFF")) << page;
  }
#if defined(TESSERA_WITH_SQLITE)
  const auto row = query(at / runs + "/runs.sqlite", "SELECT path, steps, count(*) OVER () FROM runs");
  EXPECT_EQ(row, (std::vector<std::string>{(fs::canonical(at.path()) / shown / "r").string(), "3", "1"}));
#endif
}

#if defined(TESSERA_WITH_SQLITE)
TEST(Train, ADamagedDatabaseIsAWarningAndTheRunGoesOn) {
  const Workplace at;
  at.put("runs/runs.sqlite", "this is no database, and longer than the head of one would be............");
  const Outcome outcome = run(at, "train tnp --quiet --steps 2 --name r" + kTiny);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(holds_all(outcome.err, "tessera: warning: results database|runs.sqlite"));
  EXPECT_TRUE(fs::exists(at / "runs/r/report.html"));
}
#endif

TEST(Train, ANameThatIsTakenGetsANumber) {
  const Workplace workplace;
  for (int i = 0; i < 3; ++i) said(workplace, "train tnp --quiet --steps 1 --name r" + kTiny);
  for (const char* name : {"r", "r-2", "r-3"})
    EXPECT_TRUE(fs::exists(workplace / "runs/" + name + "/report.html"));
}

TEST(Train, QuietPrintsNoProgress) {
  const Workplace workplace;
  const Outcome outcome = run(workplace, "train tnp --quiet --steps 2" + kTiny);
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.err, "");
}

TEST(Train, AFinishedRunIsNotResumedByItselfButGoesOnWithSteps) {
  const Workplace workplace;
  said(workplace, "train tnp --quiet --steps 2 --name r" + kTiny);
  expect_failure(workplace, "train tnp --resume runs/r --device cpu", 1, "has finished its 2 steps|--steps");
  const std::string metrics = workplace.get("runs/r/metrics.jsonl");
  const Outcome before = expect_failure(workplace, "train tnp --resume runs/r --steps 1 --device cpu", 1,
                                        "is at step 2 already, past --steps 1|larger --steps");
  EXPECT_EQ(before.out, "") << "it does not go on";
  EXPECT_EQ(workplace.get("runs/r/metrics.jsonl"), metrics);
  EXPECT_TRUE(fs::exists(workplace / "runs/r/report.html"));
  expect_failure(workplace, "train tnp --resume runs/r --steps 4 --eval-tasks 5 --device cpu", 1,
                 "evaluated with tasks 4|with tasks 5|leave --eval-tasks out");
  EXPECT_TRUE(holds_all(said(workplace, "train tnp --resume runs/r --steps 4 --quiet --device cpu"),
                        "resuming from|(step 2)|trained 2 steps"));
}

TEST(Eval, ComparesWithTheOptimumAndCanFail) {
  const Workplace workplace;
  said(workplace, "train tnp --quiet --steps 2 --name r" + kTiny);
  const json result = json::parse(said(workplace, "eval tnp runs/r --eval-tasks 8 --device cpu --json"));
  const std::string one = "eval tnp runs/r --eval-tasks 1 --device cpu";  // its error is not known
  EXPECT_TRUE(json::parse(said(workplace, one + " --json")).at("gap_error").is_null());
  EXPECT_EQ(said(workplace, one).find(" 0.0000\n"), std::string::npos);
  EXPECT_EQ(result.at("step"), 2);
  EXPECT_EQ(result.at("tasks"), 8);
  EXPECT_EQ(result.at("points"), 32);
  EXPECT_NEAR(result.at("gap").get<double>(),
              result.at("nll").get<double>() - result.at("optimal_nll").get<double>(), 1e-12);
  EXPECT_GT(result.at("gap").get<double>(), 0);
  const Outcome failed =
      expect_failure(workplace, "eval tnp runs/r --eval-tasks 8 --device cpu --most-gap 0.0001", 1,
                     "the gap|is above 0.0001 nats");
  EXPECT_TRUE(holds_all(failed.out, "prior|optimal"));
  said(workplace, "eval tnp runs/r --eval-tasks 8 --device cpu --most-gap 1000");
  // A bound below 0 is one, too.
  EXPECT_EQ(run(workplace, "eval tnp runs/r --eval-tasks 8 --device cpu --most-gap -1000").code, 1);
  // More tasks at a time than there are must not cost their memory.
  const json few =
      json::parse(said(workplace, "eval tnp runs/r --eval-tasks 8 --batch-size 1000000 --device cpu --json"));
  EXPECT_EQ(few.at("nll"), result.at("nll"));
}

}  // namespace
}  // namespace tessera::cli::test

"""`tessera calibrate` of a LLaMA with grouped queries, dense and pruned by Wanda, and the same calibration in PyTorch and transformers.

usage: python gates_parity.py TESSERA

The peer is written here from TEAL's paper (arXiv:2408.14690): the inputs of each projection are recorded by hooks on the samples that
tessera chose, thresholds are exact quantiles (symmetric, of the magnitude, with column norms), gates are hooks that zero the inputs of the
latter half of a text, and the greedy allocation tries every projection at every step. Thresholds must agree within 1e-4 or a bin of
tessera's histogram, the greedy steps must be the same (but for errors that tie within 1e-5), perplexities under gates within 1e-3.
Exit status 77: no transformers here, skipped.
"""
import json
import math
import os
import subprocess
import sys
import tempfile

from needs import needs

with needs("torch, transformers and safetensors"):
    import torch
    import torch.nn.functional as F
    import transformers
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
torch.manual_seed(1)
transformers.utils.logging.disable_progress_bar()
LENGTH, SAMPLES, WINDOWS, STEP, MOST = 24, 24, 12, 0.25, 0.6
SPARSITY = 0.4
FLIPPED = 1e-3  # of an error: an input within rounding of its threshold may count on one side only


def tessera(folder, *words):
    done = subprocess.run([os.path.abspath(sys.argv[1]), *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"FAILED {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def projections(model):
    """Block by block, the linear modules in tessera's order."""
    for i, block in enumerate(model.model.layers):
        names = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
        yield {f"model.layers.{i}.{name}": block.get_submodule(name) for name in names}


def record(model, samples):
    inputs = {}
    hooks = [module.register_forward_pre_hook(lambda m, x, name=name: inputs.setdefault(name, []).append(x[0].reshape(-1, x[0].shape[-1]).clone()))
             for found in projections(model) for name, module in found.items()]
    for sample in samples:
        model(sample[None])
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in inputs.items()}


def threshold(inputs, module, share, rule, scale):
    x = inputs.double()
    if scale == "column-norm":
        x = x * module.weight.data.double().norm(dim=0)
    values = torch.sort((x if rule == "symmetric" else x.abs()).flatten())[0]
    at = (0.5 + share / 2 if rule == "symmetric" else share) * (len(values) - 1)
    return values[math.floor(at)].item(), values[math.ceil(at)].item()


class Gates:
    """Zeroes inputs of at most the threshold in the latter half of each text."""

    def __init__(self, modules, thresholds, scale):
        self.hooks = []
        for name, module in modules.items():
            norms = module.weight.data.norm(dim=0) if scale == "column-norm" else None
            self.hooks.append(module.register_forward_pre_hook(lambda m, x, t=thresholds[name], n=norms: (self.gated(x[0], t, n),)))

    @staticmethod
    def gated(x, t, norms):
        half = int(x.shape[1] * 0.5)
        last = x[:, x.shape[1] - half:]
        kept = last * ((last.abs() if norms is None else last.abs() * norms) > t)
        return torch.cat([x[:, :x.shape[1] - half], kept], dim=1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


def interpolated(layer, shares, share):
    at = share * (len(shares) - 1)
    below = min(int(at), len(shares) - 2)
    return layer["thresholds"][below] + (layer["thresholds"][below + 1] - layer["thresholds"][below]) * (at - below)


def block_output(model, sample, i):
    """The stream after block i of the dense model; hooks on block i change it."""
    found = []
    hook = model.model.layers[i].register_forward_hook(lambda m, x, y: found.append((y[0] if isinstance(y, tuple) else y).clone()))
    model(sample[None])
    hook.remove()
    return found[0][0, LENGTH - LENGTH // 4:]


def compare_greedy(model, calibration, sample, i, found, scale):
    """The number of steps that differ."""
    layers = {layer["name"]: layer for layer in calibration["layers"]}
    dense = block_output(model, sample, i)
    weights = {name: module.weight.numel() for name, module in found.items()}
    unit = model.config.hidden_size ** 2
    shares = dict.fromkeys(found, 0.0)

    def error(trial):
        with Gates(found, {name: interpolated(layers[name], calibration["shares"], share) for name, share in trial.items()}, scale):
            return (block_output(model, sample, i) - dense).norm().item()

    wrong = 0
    for step in calibration["greedy"][i]["steps"][1:]:
        theirs = dict(zip(calibration["greedy"][i]["layers"], step["shares"]))
        trials = []
        for name in found:
            if shares[name] >= 0.99:
                continue
            trial = {**shares, name: min(0.99, shares[name] + STEP * unit / weights[name])}
            trials.append((error(trial), trial))
        least, best = min(trials, key=lambda one: one[0])
        chosen = [e for e, trial in trials if all(abs(trial[name] - theirs[name]) < 1e-9 for name in trial)]
        if not chosen or chosen[0] > least * (1 + 1e-5) or abs(step["error"] - least) > FLIPPED * least:
            wrong += 1
        shares = theirs
        if all(abs(best[name] - theirs[name]) < 1e-9 for name in best):
            sparsity = sum(share * weights[name] for name, share in shares.items()) / sum(weights.values())
            wrong += abs(sparsity - step["sparsity"]) > 1e-9
            wrong += abs(error(dict.fromkeys(found, sparsity)) - step["baseline"]) > FLIPPED * step["baseline"]
    return wrong


def perplexity(model, tokens):
    total = 0.0
    for i in range(WINDOWS):
        window = tokens[i * LENGTH:(i + 1) * LENGTH]
        total += F.cross_entropy(model(window[None, :-1]).logits[0], window[1:], reduction="sum").item()
    return math.exp(total / (WINDOWS * (LENGTH - 1)))


@torch.no_grad()
def compare(folder, name, rule, scale, samples, held):
    """One calibration of the model in folder/name."""
    out = f"{name}-{rule}-{scale}"
    common = ["--text", "text", "--eval-text", "held", "--device", "cpu"]
    report = json.loads(tessera(folder, "calibrate", "--model", name, "--out", out, "--samples", str(SAMPLES), "--length", str(LENGTH), "--rule", rule,
                                "--scale", scale, "--step", str(STEP), "--most", str(MOST), "--eval-windows", str(WINDOWS), "--activation-sparsity",
                                str(SPARSITY), "--json", *common))
    calibration = json.load(open(os.path.join(folder, out, "calibration.json")))
    model = AutoModelForCausalLM.from_pretrained(os.path.join(folder, name), dtype=torch.float32).eval()
    inputs = record(model, samples)
    modules = {key: module for found in projections(model) for key, module in found.items()}
    worst = 0.0
    for layer in calibration["layers"]:
        for i in range(20, 200, 20):
            share = calibration["shares"][i]
            low, high = threshold(inputs[layer["name"]], modules[layer["name"]], share, rule, scale)
            ours = layer["thresholds"][i]
            bin_width = 2.5e-4 * abs(ours)
            worst = max(worst, low - ours - bin_width, ours - high - bin_width)
    steps = sum(len(block["steps"]) - 1 for block in calibration["greedy"])
    wrong = sum(compare_greedy(model, calibration, samples[0], i, found, scale) for i, found in enumerate(projections(model)))
    gaps = []
    uniform = {layer["name"]: interpolated(layer, calibration["shares"], SPARSITY) for layer in calibration["layers"]}
    greedy = {}
    by_name = {layer["name"]: layer for layer in calibration["layers"]}
    for block in calibration["greedy"]:
        nearest = min(block["steps"], key=lambda step: abs(step["sparsity"] - SPARSITY))
        for key, share in zip(block["layers"], nearest["shares"]):
            greedy[key] = interpolated(by_name[key], calibration["shares"], share)
    for thresholds, measured in ((uniform, report["measured"][0]["uniform_perplexity"]), (greedy, report["measured"][0]["greedy_perplexity"])):
        with Gates(modules, thresholds, scale):
            gaps.append(abs(perplexity(model, held) / measured - 1))
    gaps.append(abs(perplexity(model, held) / report["dense_perplexity"] - 1))
    good = worst <= 1e-4 and wrong == 0 and max(gaps) <= 1e-3 and steps > 10
    print(f"{out:<28} thresholds off by at most {max(worst, 0):.1e}, {wrong} of {steps} greedy steps differ, perplexity "
          f"{report['dense_perplexity']:.2f} dense, {report['measured'][0]['uniform_perplexity']:.2f} uniform, "
          f"{report['measured'][0]['greedy_perplexity']:.2f} greedy, {max(gaps):.1e} off")
    return good


failed = 0
with tempfile.TemporaryDirectory() as folder:
    text = "".join(f"line {i * i} of {i % 7}\n" for i in range(400))
    open(os.path.join(folder, "text"), "w").write(text)
    open(os.path.join(folder, "held"), "w").write("".join(f"text {i * 3} and {i * i % 11}\n" for i in range(60)))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=32, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15))
    model.save_pretrained(os.path.join(folder, "dense"))
    tessera(folder, "tokenizer", "train", "--kind", "byte", "--text", "text", "--out", "dense/tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=os.path.join(folder, "dense/tokenizer.json"))
    tessera(folder, "prune", "--model", "dense", "--sparsity", "0.3", "--out", "wanda", "--text", "text", "--eval-text", "held", "--device", "cpu",
            "--samples", str(SAMPLES), "--length", str(LENGTH))
    tokens = torch.tensor(tokenizer.encode(text))
    held = torch.tensor(tokenizer.encode(open(os.path.join(folder, "held")).read()))
    # The same text, number and length of samples and seed: the samples of the pruning are those of the calibration.
    begins = json.load(open(os.path.join(folder, "wanda", "pruning.json")))["calibration"]["begins"]
    samples = [tokens[begin:begin + LENGTH] for begin in begins]
    for name in ("dense", "wanda"):
        for rule, scale in (("symmetric", "one"), ("magnitude", "one"), ("magnitude", "column-norm")):
            if not compare(folder, name, rule, scale, samples, held):
                print(f"FAILED {name} {rule} {scale}")
                failed += 1
sys.exit(1 if failed else 0)

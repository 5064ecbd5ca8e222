"""`tessera prune` of a GPT-2, an OPT and a LLaMA with grouped queries, and the same pruning in PyTorch and transformers.

usage: python prune_parity.py TESSERA

The peer is written here from the papers: Wanda (arXiv:2306.11695; unstructured, 2:4, 4:8 and the variant), magnitude, and SparseGPT
(arXiv:2301.00774; unstructured, 2:4, and with rounding). It passes the samples that tessera chose through transformers' models, block by
block. Masks must be equal, but for scores within 1e-4 of the limit that decides; SparseGPT's in 99.9 % of the weights. The perplexity
that tessera measured before and after is compared with that of transformers' model from the exported folder (1e-3 of it). Exit status
77: no transformers here, skipped.
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
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
LENGTH, SAMPLES = 24, 16
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=32, n_embd=48, n_layer=2, n_head=3)),
    "opt": lambda: OPTForCausalLM(OPTConfig(vocab_size=257, max_position_embeddings=32, hidden_size=48, word_embed_proj_dim=48, ffn_dim=96,
                                            num_hidden_layers=2, num_attention_heads=3)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=32, hidden_size=48, intermediate_size=96,
                                                  num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))}
WANDA = {"wanda": [], "wanda 2:4": ["--pattern", "2:4"], "wanda 4:8": ["--pattern", "4:8"], "wanda variant": ["--variant"],
         "magnitude": ["--method", "magnitude"], "magnitude 2:4": ["--method", "magnitude", "--pattern", "2:4"]}
SPARSEGPT = {"sparsegpt": [], "sparsegpt 2:4": ["--pattern", "2:4"], "sparsegpt 4 bits": ["--bits", "4"]}
BLOCK, DAMPING = 32, 0.01


def blocks_of(model):
    for path in ("transformer.h", "model.decoder.layers", "model.layers"):
        try:
            return path, model.get_submodule(path)
        except AttributeError:
            continue


def linears(model):
    """Block by block: {name: (module, its weight [out, in] as a view)}."""
    path, blocks = blocks_of(model)
    for i, block in enumerate(blocks):
        found = {}
        for name, module in block.named_modules():
            if isinstance(module, transformers.pytorch_utils.Conv1D):
                found[f"{path}.{i}.{name}"] = (module, module.weight.data.T)
            elif isinstance(module, torch.nn.Linear):
                found[f"{path}.{i}.{name}"] = (module, module.weight.data)
        yield found


def inputs_of(model, found, samples):
    """The inputs of the modules, [tokens, in], for all samples."""
    inputs = {name: [] for name in found}
    hooks = [module.register_forward_hook(lambda m, x, y, name=name: inputs[name].append(x[0].reshape(-1, x[0].shape[-1]).clone()))
             for name, (module, _) in found.items()]
    for sample in samples:
        model(sample[None])
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in inputs.items()}


def lowest(scores, zeros):
    """Per row True for the lowest `zeros`, and the score that decides."""
    order = torch.sort(scores, dim=-1, stable=True)
    drop = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order.indices[..., :zeros], True)
    return drop, order.values[..., zeros - 1:zeros + 1].mean(-1, keepdim=True)


def drop_by(scores, kind, share):
    if ":" in kind:
        n, m = map(int, kind.split()[-1].split(":"))
        drop, limit = lowest(scores.reshape(scores.shape[0], -1, m), n)
        return drop.reshape(scores.shape), limit.expand(-1, -1, m).reshape(scores.shape)
    if kind.startswith("magnitude"):
        drop, limit = lowest(scores.reshape(1, -1), int(scores.numel() * share))
        return drop.reshape(scores.shape), limit.expand(1, scores.numel()).reshape(scores.shape)
    if "variant" in kind:
        order = torch.sort(scores, dim=-1, stable=True)
        sums = torch.cumsum(order.values.double(), dim=1)
        alpha, low, high = 0.4, 0.0, 0.8
        while True:
            counts = (sums <= sums[:, -1:] * alpha).sum(1)
            reached = counts.sum().item() / scores.numel()
            if abs(reached - share) <= 0.001:
                break
            low, high = (low, alpha) if reached > share else (alpha, high)
            alpha = (low + high) / 2
        drop = torch.zeros_like(scores, dtype=torch.bool)
        for row, count in enumerate(counts.tolist()):
            drop[row, order.indices[row, :count]] = True
        return drop, torch.full_like(scores, math.nan)
    drop, limit = lowest(scores, int(scores.shape[1] * share))
    return drop, limit.expand_as(scores)


def sparsegpt(weight, x, kind):
    """weight [rows, in] f32, x [tokens, in]: the pruned weight."""
    w = weight.clone()
    bits = 4 if "bits" in kind else 0
    if bits:
        high, low = w.max(1).values.clamp(min=0), w.min(1).values.clamp(max=0)
        scale = (high - low) / (2 ** bits - 1)
        zero = torch.round(-low / scale)
    h = (x.double().T @ x.double()) * 2 / SAMPLES
    dead = torch.diag(h) == 0
    h[dead, dead] = 1
    w[:, dead] = 0
    h += DAMPING * torch.diag(h).mean() * torch.eye(len(h), dtype=torch.float64)
    u = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True).float()
    for begin in range(0, w.shape[1], BLOCK):
        end = min(begin + BLOCK, w.shape[1])
        errors = torch.zeros_like(w[:, begin:end])
        scores = w[:, begin:end] ** 2 / torch.diag(u)[begin:end] ** 2
        drop = scores < torch.sort(scores.flatten()).values[int(scores.numel() * 0.5)]
        for i in range(begin, end):
            if "2:4" in kind and i % 4 == 0:
                score = w[:, i:i + 4] ** 2 / torch.diag(u)[i:i + 4] ** 2
                drop[:, i - begin:i - begin + 4] = lowest(score, 2)[0]
            q = w[:, i].clone()
            q[drop[:, i - begin]] = 0
            if bits:
                q = scale * (torch.clamp(torch.round(q / scale) + zero, 0, 2 ** bits - 1) - zero)
            error = (w[:, i] - q) / u[i, i]
            w[:, i:end] -= error[:, None] * u[None, i, i:end]
            w[:, i] = q
            errors[:, i - begin] = error
        w[:, end:] -= errors @ u[begin:end, end:]
    return w


def perplexity(model, tokens, windows):
    sum_ = 0.0
    for i in range(windows):
        window = tokens[i * LENGTH:(i + 1) * LENGTH][None]
        sum_ += F.cross_entropy(model(window).logits[0, :-1], window[0, 1:], reduction="sum").item()
    return math.exp(sum_ / (windows * (LENGTH - 1)))


@torch.no_grad()
def compare(kind, flags, folder, start, tokenizer):
    program = [os.path.abspath(sys.argv[1]), "prune", "--model", "start", "--text", "text", "--eval-text", "held", "--device", "cpu", "--samples",
               str(SAMPLES), "--length", str(LENGTH), "--batch-size", "5", "--sparsity", "0.5", "--json", "--out", kind.replace(" ", "-"), *flags]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"FAILED {' '.join(program[1:])}: {done.stderr.strip()}")
    report = json.loads(done.stdout)
    model = start()
    tokens = torch.tensor(tokenizer.encode(open(os.path.join(folder, "text")).read()))
    samples = [tokens[begin:begin + LENGTH] for begin in report["calibration"]["begins"]]
    exported = AutoModelForCausalLM.from_pretrained(os.path.join(folder, kind.replace(" ", "-"))).eval()
    theirs = {name: weight for block in linears(exported) for name, (_, weight) in block.items()}
    count = wrong = ties = 0
    worst = 0.0
    for found in linears(model):
        inputs = inputs_of(model, found, samples) if samples else {}
        for name, (_, weight) in found.items():
            if kind.startswith("sparsegpt"):
                pruned = sparsegpt(weight.float(), inputs[name], kind)
                differs = (pruned == 0) != (theirs[name] == 0)
                wrong += differs.sum().item()
                gram = inputs[name].T @ inputs[name]
                error = [(((weight - p) @ gram) * (weight - p)).sum().item() for p in (pruned, theirs[name])]
                worst = max(worst, abs(error[1] / error[0] - 1))
                weight.copy_(theirs[name])  # the next layers from equal inputs
            else:
                scores = weight.abs() * (inputs[name].pow(2).sum(0) / SAMPLES).sqrt() if samples else weight.abs()
                drop, limit = drop_by(scores, kind, 0.5)
                differs = drop != (theirs[name] == 0)
                near = differs & ((scores / limit - 1).abs() < 1e-4)
                wrong, ties = wrong + (differs & ~near).sum().item(), ties + near.sum().item()
                expected = weight.masked_fill(theirs[name] == 0, 0)
                worst = max(worst, (expected - theirs[name]).abs().max().item())
                weight.copy_(theirs[name])
            count += weight.numel()
    held = torch.tensor(tokenizer.encode(open(os.path.join(folder, "held")).read()))
    windows = report["perplexity"]["windows"]
    gap = max(abs(perplexity(start(), held, windows) / report["perplexity"]["before"] - 1),
              abs(perplexity(exported, held, windows) / report["perplexity"]["after"] - 1))
    if kind.startswith("sparsegpt"):
        good = wrong <= 1e-3 * count and worst <= 1e-3
    else:
        good = wrong == 0 and ties <= max(2, 1e-5 * count) and worst == 0
    good = good and gap <= 1e-3 and windows > 5
    print(f"{kind:<18} {count} weights, {wrong} differ, {ties} ties; {'output error' if 'sparsegpt' in kind else 'values'} {worst:.1e}, "
          f"perplexity {report['perplexity']['before']:.2f} to {report['perplexity']['after']:.2f}, {gap:.1e} off")
    return good


failed = 0
for family, make in MODELS.items():
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "text"), "w") as file:
            file.write("".join(f"clause {i}: a copy of {i * i % 17} is free; line {i % 5}\n" for i in range(60)))
        with open(os.path.join(folder, "held"), "w") as file:
            file.write("everyone may copy this text; " * 10)
        torch.manual_seed(5)
        model = make().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(os.path.join(folder, "start"))
        made = subprocess.run([os.path.abspath(sys.argv[1]), "tokenizer", "train", "--kind", "byte", "--text", "text", "--out",
                               "start/tokenizer.json"], cwd=folder, capture_output=True, text=True)
        if made.returncode:
            sys.exit(f"FAILED tokenizer: {made.stderr.strip()}")
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=os.path.join(folder, "start/tokenizer.json"))
        start = lambda: AutoModelForCausalLM.from_pretrained(os.path.join(folder, "start")).eval()
        print(family)
        cases = {**WANDA, **{kind: ["--method", "sparsegpt", "--block-size", str(BLOCK), *flags] for kind, flags in SPARSEGPT.items()}}
        for kind, flags in cases.items():
            if not compare(kind, flags, folder, start, tokenizer):
                print(f"FAILED {family} {kind}")
                failed += 1
sys.exit(1 if failed else 0)

"""`tessera train bert` with sliced backward passes and with DropBP, next to the same in PyTorch.

usage: python sparse_backward_parity.py TESSERA

Both fine-tune the same model of transformers on the same text, without dropout, in f32 on the CPU. The rows of a slice are the first
ones, and which branches are dropped is drawn here again from the formulas (nn/drop_bp.h, runtime/philox.h). Each of 20 losses agrees to
1e-6, and the weights after them to 1e-5 but for the biases of the keys, whose gradients are zeros but for rounding. Exit status 77: no transformers here, skipped.
"""
import json
import os
import subprocess
import sys
import tempfile

from needs import needs

with needs("torch, transformers, tokenizers and safetensors"):
    import torch
    import torch.nn.functional as F
    import transformers
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
STEPS, LENGTH, RATE, DECAY, CLIP, SEED = 20, 24, 2e-3, 0.01, 1.0, 3
D, FF, HEADS, LAYERS, N = 24, 40, 3, 3, 5
TEXT = "the old ship leaves the harbour at noon and the crew sings while gulls follow it"
SECOND = "encoder.layer.*.output.dense"  # the second linear layer of each feed-forward network
# name, flags; --missing-grad skip is what PyTorch does
CASES = [("dense", ""), ("original", f"--slice first --rows {N} --weight-grad none --missing-grad skip"),
         ("original, second layers", f"--slice first --rows {N} --weight-grad none --slice-layers {SECOND} --missing-grad skip"),
         ("missing as zero", f"--slice first --rows {N} --weight-grad none --missing-grad zero"),
         ("slice", f"--slice first --rows {N} --weight-grad slice"), ("full", f"--slice first --rows {N} --weight-grad full"),
         ("all rows", "--slice first --rows 100%"), ("dropbp 0.5", "--dropbp 0.5 --missing-grad skip"),
         ("dropbp 0.875", "--dropbp 0.875 --missing-grad skip"),
         ("dropbp and slice", f"--dropbp 0.5 --slice first --rows {N} --weight-grad slice --missing-grad skip")]


class FirstRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, n, weight_grad):
        ctx.save_for_backward(x, weight)
        ctx.n, ctx.weight_grad = n, weight_grad
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        rows, inputs = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = torch.zeros_like(inputs)
        dx[:ctx.n] = rows[:ctx.n] @ weight
        dweight = {"none": lambda: None, "slice": lambda: rows[:ctx.n].T @ inputs[:ctx.n], "full": lambda: rows.T @ inputs}
        return dx.view_as(x), dweight[ctx.weight_grad](), rows.sum(0), None, None


def philox(seed, offset, index):
    c = [index & 0xFFFFFFFF, index >> 32, offset & 0xFFFFFFFF, offset >> 32]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q & 0xFFFFFFFF, (p >> 32) ^ c[3] ^ k[1], p & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def dropped_branches(share, step):
    """By block: attention, feed-forward network."""
    flops = [8 * D * D + 4 * LENGTH * D, 4 * D * FF] * LAYERS
    seed = SEED ^ 0xD2095EED00000005
    words = [philox(seed, step, i // 4)[i % 4] for i in range(len(flops))]
    order = [philox(seed, step, 1 << 32 | i // 4)[i % 4] for i in range(len(flops))]
    dropped = [word < share * 2**32 for word in words]
    for i in sorted(range(len(flops)), key=lambda i: order[i]):
        if sum(f for f, gone in zip(flops, dropped) if gone) >= share * sum(flops) - 1e-9:
            break
        dropped[i] = True
    return dropped


def make_model(folder):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + sorted(set(TEXT.split()))
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    torch.manual_seed(11)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=len(words), max_position_embeddings=LENGTH, hidden_size=D, intermediate_size=FF, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, initializer_range=0.2, num_labels=2))
    model.save_pretrained(folder)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    return tokenizer


def set_layers(model, value, dropped):
    """Lets the linear layers of the feed-forward networks be sliced, and branches end in a constant."""
    def sliced(layer, name):
        if "slice" not in value or (value.get("slice-layers") == SECOND and not name.endswith("output.dense")):
            return layer.__class__.forward.__get__(layer)
        n = 10**9 if value["rows"] == "100%" else int(value["rows"])
        return lambda x: FirstRows.apply(x, layer.weight, layer.bias, n, value.get("weight-grad", "slice"))

    def constant(forward, gone):
        return lambda x: forward(x).detach() if gone else forward(x)

    for i, block in enumerate(model.bert.encoder.layer):
        out, up, down = block.attention.output.dense, block.intermediate.dense, block.output.dense
        out.forward = constant(out.__class__.forward.__get__(out), dropped[2 * i])
        up.forward = sliced(up, "intermediate.dense")
        down.forward = constant(sliced(down, "output.dense"), dropped[2 * i + 1])


def train_in_torch(folder, tokenizer, value):
    model = BertForSequenceClassification.from_pretrained(folder, attn_implementation="eager", hidden_dropout_prob=0.0,
                                                          attention_probs_dropout_prob=0.0)
    model.train()
    plain = [x for n, x in model.named_parameters() if n.endswith("bias") or "LayerNorm" in n]
    rest = [x for n, x in model.named_parameters() if not (n.endswith("bias") or "LayerNorm" in n)]
    optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}], lr=RATE)
    ids, losses = torch.tensor([tokenizer.encode(TEXT).ids]), []
    for step in range(STEPS):
        share = float(value.get("dropbp", 0))
        set_layers(model, value, dropped_branches(share, step) if share else [False] * (2 * LAYERS))
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / STEPS)
        loss = F.cross_entropy(model(input_ids=ids).logits, torch.tensor([1]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if value.get("missing-grad", "zero") == "zero":
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: x.detach() for name, x in model.state_dict().items()}


def train_in_tessera(work, folder, name, flags):
    command = [os.path.abspath(sys.argv[1]), "train", "bert", "--task", "sst2", "--data", "SST-2", "--model", folder, "--seeds", "1", "--seed",
               SEED, "--steps", STEPS, "--warmup", "0", "--batch-size", "1", "--max-length", LENGTH, "--lr", RATE, "--weight-decay", DECAY,
               "--max-grad-norm", CLIP, "--dropout", "0", "--log-every", "1", "--save-model", "--precision", "f32", "--device", "cpu", "--quiet",
               "--name", name, *flags.split()]
    done = subprocess.run([str(word) for word in command], cwd=work, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"FAILED {name}: {done.stderr.strip()}")
    run = os.path.join(work, "runs", name, f"seed-{SEED}")
    with open(os.path.join(run, "metrics.jsonl")) as file:
        losses = [line["loss"] for line in map(json.loads, file) if "loss" in line]
    return losses, load_file(os.path.join(run, "model", "model.safetensors"))


failed, dense = 0, []
with tempfile.TemporaryDirectory() as work:
    folder = os.path.join(work, "model")
    tokenizer = make_model(folder)
    os.mkdir(os.path.join(work, "SST-2"))
    for part in ("train", "dev"):
        with open(os.path.join(work, "SST-2", part + ".tsv"), "w") as file:
            file.write(f"sentence\tlabel\n{TEXT}\t1\n")
    for number, (name, flags) in enumerate(CASES):
        words = flags.split()
        value = {flag[2:]: words[i + 1] for i, flag in enumerate(words) if flag.startswith("--")}
        ours, weights = train_in_tessera(work, folder, f"run-{number}", flags)
        theirs, state = train_in_torch(folder, tokenizer, value)
        away = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        compared = [key for key in state if key in weights and not key.endswith("key.bias")]
        drift = max((weights[key] - state[key]).abs().max().item() for key in compared)
        dense = dense or theirs
        differs = max(abs(a - b) for a, b in zip(theirs, dense)) > 1e-5
        good = (len(ours) == STEPS and away <= 1e-6 and drift <= 1e-5 and len(compared) >= 15 * LAYERS and
                differs == (name not in ("dense", "all rows")))
        failed += not good
        print(f"{'ok' if good else 'FAILED'} {name}: losses within {away:.1e}, {len(compared)} weights within {drift:.1e}; loss {ours[-1]:.6f}")
sys.exit(1 if failed else 0)

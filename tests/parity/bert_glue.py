"""Fine-tunes the same encoders on the same GLUE files with `tessera train bert` and with transformers, three seeds each, and
compares what they reach.

usage: python bert_glue.py TESSERA [--tasks sst2,cola,mnli] [--json FILE]

Everything is made here: the files by `tessera data glue`, a WordPiece tokenizer of their texts by the library `tokenizers`, an
encoder with random weights by transformers, which both sides begin with. Both use AdamW (no decay on biases and norms), clipping,
warm-up and a straight line down, dropout 0.1, f32 on the CPU. Heads, orders and dropout masks are each side's own, by seed: so
single runs differ, and means are compared. They must agree within Welch's 95 % interval over the seeds, or within two standard
errors of a mean of three measurements on that many development examples, whichever is larger. Exit status 77: no transformers
here, skipped.
"""
import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

from needs import needs

with needs("torch, transformers and tokenizers"):
    import torch
    import torch.nn.functional as F
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertForSequenceClassification, BertModel

parser = argparse.ArgumentParser()
parser.add_argument("tessera")
parser.add_argument("--tasks", default="sst2,cola,mnli")
parser.add_argument("--json", default="")
args = parser.parse_args()
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

SEEDS, BATCH, LENGTH, DECAY, CLIP, TRAIN, DEV = 3, 32, 48, 0.01, 1.0, 3000, 500
# name: folder, columns of texts, column of the label, its values (none: a score), steps, learning rate, metric, part to judge by
TASKS = {
    "sst2": ("SST-2", ("sentence",), "label", ("0", "1"), 200, 1e-3, "accuracy", "dev"),
    "cola": ("CoLA", (3,), 1, ("0", "1"), 400, 1e-3, "matthews", "dev"),
    "mnli": ("MNLI", ("sentence1", "sentence2"), "gold_label", ("entailment", "neutral", "contradiction"), 500, 7e-4,
             "accuracy_matched", "dev_matched"),
    "stsb": ("STS-B", ("sentence1", "sentence2"), "score", (), 1000, 1e-3, "pearson", "dev"),
}
STUDENT = (12.706, 4.303, 3.182, 2.776)  # the 97.5 % points for 1 ... 4 degrees of freedom


def read(path, task):
    _, texts, label, names, *_ = TASKS[task]
    with open(path, encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if isinstance(label, str):
        header = rows.pop(0)
        texts, label = tuple(header.index(t) for t in texts), header.index(label)
    return [tuple(row[t] for t in texts) for row in rows], [names.index(row[label]) if names else float(row[label]) for row in rows]


def make_model(folder, texts):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator((t for pair in texts for t in pair), trainers.WordPieceTrainer(vocab_size=600, special_tokens=special))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    torch.manual_seed(11)
    model = BertModel(BertConfig(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=64, hidden_size=64, intermediate_size=128,
                                 num_hidden_layers=2, num_attention_heads=4))
    model.save_pretrained(folder)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    return tokenizer


def batch_of(tokenizer, texts):
    """Padded to the longest, cut as the library cuts."""
    tokenizer.enable_truncation(LENGTH, strategy="longest_first")
    encoded = [tokenizer.encode(*text) for text in texts]
    width = max(len(e.ids) for e in encoded)
    rows = [[list(e.ids), list(e.type_ids), [1] * len(e.ids)] for e in encoded]
    ids, types, mask = (torch.tensor([row[i] + [0] * (width - len(row[i])) for row in rows]) for i in range(3))
    return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}


def schedule(step, steps, warmup):
    """optim/schedule.h, linear."""
    return (step + 1) / warmup if step < warmup else 1 - (step - warmup) / (steps - warmup)


def measure(metric, predictions, labels):
    if metric.startswith("accuracy"):
        return statistics.fmean(p == t for p, t in zip(predictions, labels))
    if metric == "pearson":
        return statistics.correlation(predictions, labels)
    both, only_p, only_t, none = (sum(p == a and t == b for p, t in zip(predictions, labels)) for a, b in ((1, 1), (1, 0), (0, 1), (0, 0)))
    product = (both + only_p) * (both + only_t) * (none + only_p) * (none + only_t)
    return (both * none - only_p * only_t) / math.sqrt(product) if product else 0.0


def train_in_torch(folder, tokenizer, task, data, seed):
    _, _, _, names, steps, rate, metric, part = TASKS[task]
    texts, labels = read(os.path.join(data, "train.tsv"), task)
    torch.manual_seed(seed)
    model = BertForSequenceClassification.from_pretrained(folder, num_labels=len(names) or 1)
    model.train()
    flat = [x for n, x in model.named_parameters() if n.endswith("bias") or "LayerNorm" in n]
    rest = [x for n, x in model.named_parameters() if not (n.endswith("bias") or "LayerNorm" in n)]
    optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": DECAY}, {"params": flat, "weight_decay": 0.0}], lr=rate)
    order, targets = [], torch.tensor(labels)
    for step in range(steps):
        if len(order) < BATCH:  # what is left of an epoch is dropped
            order = torch.randperm(len(texts)).tolist()
        rows, order = order[:BATCH], order[BATCH:]
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(step, steps, steps * 6 // 100)
        logits = model(**batch_of(tokenizer, [texts[i] for i in rows])).logits
        loss = F.cross_entropy(logits, targets[rows]) if names else F.mse_loss(logits[:, 0], targets[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    model.eval()
    texts, labels = read(os.path.join(data, part + ".tsv"), task)
    predictions = []
    with torch.no_grad():
        for first in range(0, len(texts), 100):
            logits = model(**batch_of(tokenizer, texts[first:first + 100])).logits
            predictions += (logits.argmax(-1) if names else logits[:, 0]).tolist()
    return measure(metric, predictions, labels)


def train_in_tessera(work, folder, task, data):
    steps, rate, metric = TASKS[task][4:7]
    out = os.path.join(work, "out.json")
    command = [args.tessera, "train", "bert", "--task", task, "--data", data, "--model", folder, "--seeds", SEEDS, "--steps", steps,
               "--batch-size", BATCH, "--max-length", LENGTH, "--lr", rate, "--weight-decay", DECAY, "--max-grad-norm", CLIP,
               "--device", "cpu", "--runs", os.path.join(work, "runs"), "--quiet", "--json", out]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    with open(out) as file:
        return json.load(file)["metrics"]["eval_" + metric]["values"]


def noise(metric, ours, theirs):
    """Half the width of Welch's 95 % interval, or two standard errors of a difference of means of SEEDS measurements each."""
    a, b = statistics.variance(ours) / SEEDS, statistics.variance(theirs) / SEEDS
    freedom = (a + b) ** 2 / ((a * a + b * b) / (SEEDS - 1)) if a + b > 0 else 1
    welch = STUDENT[min(int(freedom), len(STUDENT)) - 1] * math.sqrt(a + b)
    mean = statistics.fmean(ours + theirs)
    # The variance of one measurement: p (1 - p) / n of a share, at most (1 - r^2)^2 / n of a correlation.
    one = mean * (1 - mean) / DEV if metric.startswith("accuracy") else (1 - mean * mean) ** 2 / DEV
    return max(welch, 2 * math.sqrt(2 * one / SEEDS))


def shown(values):
    return f"{statistics.fmean(values):.4f} +- {statistics.stdev(values):.4f}"


failed, results = 0, []
print(f"{'task':<6} {'metric':<17} {'steps':>5} {'tessera':>18} {'transformers':>18} {'difference':>11} {'noise':>7} {'seconds':>14}")
with tempfile.TemporaryDirectory() as work:
    subprocess.run([args.tessera, "data", "glue", "--out", work, "--train", str(TRAIN), "--dev", str(DEV), "--test", "1"], check=True,
                   stdout=subprocess.DEVNULL)
    for task in args.tasks.split(","):
        folder, _, _, names, steps, _, metric, part = TASKS[task]
        data, start = os.path.join(work, folder), os.path.join(work, "model-" + task)
        tokenizer = make_model(start, read(os.path.join(data, "train.tsv"), task)[0])
        begin = time.monotonic()
        ours = train_in_tessera(work, start, task, data)
        middle = time.monotonic()
        theirs = [train_in_torch(start, tokenizer, task, data, seed) for seed in range(SEEDS)]
        seconds = (middle - begin, time.monotonic() - middle)
        difference, allowed = statistics.fmean(ours) - statistics.fmean(theirs), noise(metric, ours, theirs)
        labels = read(os.path.join(data, part + ".tsv"), task)[1]
        guess = max(labels.count(c) for c in range(len(names))) / len(labels) if metric.startswith("accuracy") else 0.0
        print(f"{task:<6} {metric:<17} {steps:>5} {shown(ours):>18} {shown(theirs):>18} {difference:>+11.4f} {allowed:>7.4f} "
              f"{seconds[0]:>6.1f} {seconds[1]:>7.1f}", flush=True)
        results.append({"task": task, "metric": metric, "steps": steps, "tessera": ours, "transformers": theirs, "noise": allowed})
        if not abs(difference) <= allowed:
            failed += 1
            print(f"FAILED {task}: the means differ by more than the noise")
        if not min(statistics.fmean(ours), statistics.fmean(theirs)) >= guess + 0.15:
            failed += 1
            print(f"FAILED {task}: hardly better than {guess:.2f}, which says nothing; agreement says nothing")
if args.json:
    with open(args.json, "w") as file:
        json.dump(results, file, indent=1)
print(f"{len(results) - failed} passed, {failed} failed")
sys.exit(1 if failed else 0)

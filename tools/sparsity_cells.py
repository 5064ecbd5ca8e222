"""The cells of tools/sparsity_study: which models are pruned and gated, and which claims they test."""

# Share of the weights that is dropped, and the flags of `tessera prune` for it.
PATTERNS = {"50 %": (0.5, ["--sparsity", "0.5"]), "60 %": (0.6, ["--sparsity", "0.6"]), "4:8": (0.5, ["--pattern", "4:8"]),
            "2:4": (0.5, ["--pattern", "2:4"])}
METHODS = {"magnitude": ["--method", "magnitude"], "wanda": ["--method", "wanda"], "sparsegpt": ["--method", "sparsegpt"],
           "ria": ["--method", "ria"], "owl": ["--method", "wanda", "--allocation", "owl"],
           "admm": ["--method", "wanda", "--update", "admm"]}
EVERYWHERE = ("magnitude", "wanda", "sparsegpt")
AT_60 = ("ria", "owl", "admm")

# Total sparsities, and of each the shares of the weights that are tried; gates leave out the rest.
SPLITS = {0.3: (0.1, 0.2), 0.5: (0.2, 0.3, 0.4), 0.7: (0.2, 0.4, 0.5, 0.6)}
AWARE = {0.3: 0.1, 0.5: 0.2, 0.7: 0.4}  # of the weights, where pruning knows the gates
GATES = {"gate": ["--allocation", "greedy"], "wina": ["--scale", "column-norm", "--allocation", "uniform"],
         "top-k": ["--gate", "top-k", "--allocation", "uniform"]}


def inputs_for(total, weights):
    """Share s2 of the inputs with 1 - (1 - weights)(1 - s2) = total, short enough for a command line."""
    return round(1 - (1 - total) / (1 - weights), 4)


def name_of(total):
    return f"total {total:g}"


def split_name(weights):
    return f"split {weights:g}"


def task_names():
    return [*PATTERNS, *map(name_of, SPLITS), "patterns"]


def claims():
    """What papers say, as pairs of arms of which the first has the lower loss."""
    found = []
    for pattern in PATTERNS:
        for method, paper in (("wanda", "Wanda, arXiv:2306.11695"), ("sparsegpt", "SparseGPT, arXiv:2301.00774")):
            found.append({"text": f"{method} loses less than magnitude ({paper})", "task": pattern, "lower": [method], "than": ["magnitude"]})
        found.append({"text": "sparsegpt and wanda are about equal (arXiv:2306.11695)", "task": pattern, "lower": ["sparsegpt"],
                      "than": ["wanda"], "alike": True})
    for method, paper in (("ria", "RIA, ICLR 2024"), ("owl", "OWL, arXiv:2310.05175"), ("admm", "arXiv:2401.02938")):
        found.append({"text": f"{method} loses less than wanda ({paper})", "task": "60 %", "lower": [method], "than": ["wanda"]})
    for total, shares in SPLITS.items():
        task, splits = name_of(total), [split_name(weights) for weights in shares]
        many_inputs = [split_name(weights) for weights in shares if inputs_for(total, weights) > weights]
        few_inputs = [split_name(weights) for weights in shares if inputs_for(total, weights) < weights]
        found += [
            {"text": "the greedy allocation loses less than the uniform one (TEAL, arXiv:2408.14690)", "task": task, "lower": ["gate greedy"],
             "than": ["gate uniform"]},
            {"text": "thresholds of one package's text do as well as those of all", "task": task, "lower": ["gate uniform, of one package"],
             "than": ["gate uniform"], "alike": True},
            {"text": "column norms lose less than magnitudes (WINA, arXiv:2505.19427)", "task": task, "lower": ["gate wina"],
             "than": ["gate uniform"]},
            {"text": "the best split loses less than weights alone (SPDP)", "task": task, "lower": splits, "than": ["wanda"]},
            {"text": "the best split loses less than gates alone (SPDP)", "task": task, "lower": splits, "than": ["gate greedy"]},
            {"text": "more of the inputs than of the weights is the better split (SPDP)", "task": task, "lower": many_inputs,
             "than": few_inputs},
            {"text": "pruning that knows the gates loses less (DuoGPT, arXiv:2506.20194)", "task": task, "lower": ["gate-aware"],
             "than": ["sparsegpt split"]}]
    return found


class Task:
    """One call of `tessera`: its words after the program's name, what it needs first, how important it is (0 first), the least time
    in which it is worth beginning, and the folder that it makes."""

    def __init__(self, name, words, needs=(), rank=0, seconds=10.0, threads=0, makes=None):
        self.name, self.words, self.needs, self.rank, self.seconds, self.threads = name, words, tuple(needs), rank, seconds, threads
        self.makes = makes


class Cell:
    """An arm in a task: where its loss and its accuracy are found."""

    def __init__(self, task, arm, weights, inputs, loss, choice, seed=0):
        self.task, self.arm, self.weights, self.inputs, self.loss, self.choice, self.seed = task, arm, weights, inputs, loss, choice, seed


class Plan:
    """All tasks and cells of one trained model. `paths`: model, held_out, calibration, other, items, work, out. `wanted`: of the names in
    task_names() those that are measured."""

    def __init__(self, paths, options, wanted):
        self.paths, self.options, self.tasks, self.cells = paths, options, {}, []
        self.add_dense()
        for seed in range(options.calibration_seeds):
            self.add_patterns(seed)
            self.add_totals(seed)
        self.cells = [cell for cell in self.cells if not cell.task or cell.task in wanted]
        kept = {cell.loss[0] for cell in self.cells} | {cell.choice for cell in self.cells}
        if "patterns" in wanted:
            self.add_analysis()
            kept.add("patterns page")
        while needed := {need for name in kept if name for need in self.tasks[name].needs} - kept:
            kept |= needed
        self.tasks = {name: task for name, task in self.tasks.items() if name in kept}

    def claims(self):
        """Those whose arms are measured."""
        arms = {(cell.task, cell.arm) for cell in self.cells}
        return [claim for claim in claims() if all((claim["task"], arm) in arms for arm in claim["lower"] + claim["than"])]

    def add(self, name, words, **about):
        """A task is made once; what is asked for twice is the same, as important as the more important of both."""
        if name in self.tasks:
            self.tasks[name].rank = min(self.tasks[name].rank, about.get("rank", 0))
        else:
            self.tasks[name] = Task(name, [str(word) for word in words], **about)
        return name

    def texts(self, seed, samples=None, text=None):
        o = self.options
        return ["--text", text or self.paths.calibration, "--eval-text", self.paths.held_out, "--samples", samples or o.samples, "--length", o.length,
                "--eval-windows", o.windows, "--seed", seed, *o.device]

    def folder(self, name):
        return self.paths.work / name

    def choice(self, name, model, needs, rank, gates=()):
        return self.add(f"choice {name}", ["eval", "choice", self.paths.items, "--model", model, "--json", *gates, *self.options.device],
                        needs=needs, rank=rank, seconds=5)

    def add_dense(self):
        ppl = ["eval", "ppl", "--model", self.paths.model, "--length", self.options.length, "--windows", self.options.windows,
               "--batch-size", "8", "--json", *self.options.device, "--text"]
        held_out = self.add("dense", [*ppl, self.paths.held_out], rank=0, seconds=4)
        training = self.add("dense training", [*ppl, self.paths.calibration], rank=0, seconds=4)
        choice = self.choice("dense", self.paths.model, [], 0)
        self.cells.append(Cell("", "dense", 0, 0, (held_out, "nats"), choice))
        self.cells.append(Cell("", "dense, training text", 0, 0, (training, "nats"), None))

    def pruned(self, method, flags, name, seed, rank):
        """The task that prunes, and its model."""
        folder = self.folder(f"pruned {method} {name} {seed}".replace(" ", "-").replace("%", "").replace(":", "-"))
        flags = [*METHODS[method], *flags, "--batch-size", "8"]
        return self.add(f"prune {method} {name}, {seed}",
                        ["prune", "--model", self.paths.model, *flags, "--out", folder, "--json", *self.texts(seed)], rank=rank, seconds=6,
                        makes=folder), folder

    def add_patterns(self, seed):
        for pattern, (weights, flags) in PATTERNS.items():
            for method in EVERYWHERE + (AT_60 if pattern == "60 %" else ()):
                rank = 1 if method in EVERYWHERE else 2
                prune, folder = self.pruned(method, flags, pattern, seed, rank)
                choice = self.choice(f"{method} {pattern}, {seed}", folder, [prune], rank + 3)
                self.cells.append(Cell(pattern, method, weights, 0, (prune, "pruned"), choice, seed))

    def weights_alone(self, method, share, seed, rank):
        """At 0.5 and 0.6 it is the model of the pattern."""
        name = next((pattern for pattern, (weights, flags) in PATTERNS.items() if weights == share and "--sparsity" in flags), f"{share:g}")
        prune, folder = self.pruned(method, ["--sparsity", f"{share:g}"], name, seed, rank)
        return prune, folder, f"{method} {name}, {seed}"

    def calibrated(self, name, model, needs, shares, flags, seed, rank, seconds, text=None):
        """The task that calibrates gates and measures the shares, and its folder."""
        folder = self.folder(f"gates {name}".replace(" ", "-").replace("%", "").replace(",", ""))
        greedy = self.options.greedy if "greedy" in flags else []
        return self.add(f"calibrate {name}",
                        ["calibrate", "--model", model, "--out", folder, "--activation-sparsity", ",".join(f"{share:g}" for share in shares),
                         *flags, "--json", "--batch-size", "8", *greedy, *self.texts(seed, self.options.gate_samples, text)],
                        needs=needs, rank=rank, seconds=seconds, makes=folder), folder

    def gated(self, task, arm, weights, inputs, calibrate, folder, model, field, seed, rank):
        allocation = ["--allocation", "greedy"] if field == "greedy" else ["--allocation", "uniform"]
        choice = self.choice(f"{task} {arm}, {seed}", model, [calibrate], rank + 3,
                             ["--gates", folder, "--activation-sparsity", f"{inputs:g}", *allocation])
        self.cells.append(Cell(task, arm, weights, inputs, (calibrate, field, inputs), choice, seed))

    def add_totals(self, seed):
        gates = {}
        for gate, flags in GATES.items():
            gates[gate] = self.calibrated(f"{gate}, {seed}", self.paths.model, [], list(SPLITS), flags, seed, 2, 25 if gate == "gate" else 6)
        other, _ = self.calibrated(f"other text, {seed}", self.paths.model, [], list(SPLITS), ["--allocation", "uniform"], seed, 3, 6, self.paths.other)
        by_weights = {}  # share of the weights: what of the inputs goes along
        for total, shares in SPLITS.items():
            for weights in shares:
                by_weights.setdefault(weights, []).append(inputs_for(total, weights))
        split_gates = {}
        for weights, inputs in by_weights.items():
            prune, model, _ = self.weights_alone("wanda", weights, seed, 2)
            split_gates[weights] = (*self.calibrated(f"wanda {weights:g}, {seed}", model, [prune], sorted(inputs), GATES["gate"], seed, 2, 25), model)
        for total, shares in SPLITS.items():
            task = name_of(total)
            for method in ("wanda", "sparsegpt"):
                prune, folder, name = self.weights_alone(method, total, seed, 2)
                choice = self.choice(name, folder, [prune], 5)
                self.cells.append(Cell(task, method, total, 0, (prune, "pruned"), choice, seed))
            for arm, gate, field in (("gate uniform", "gate", "uniform"), ("gate greedy", "gate", "greedy"), ("gate wina", "wina", "uniform"),
                                     ("gate top-k", "top-k", "uniform")):
                self.gated(task, arm, 0, total, *gates[gate], self.paths.model, field, seed, 2)
            self.cells.append(Cell(task, "gate uniform, of one package", 0, total, (other, "uniform", total), None, seed))
            for weights in shares:
                self.gated(task, split_name(weights), weights, inputs_for(total, weights), *split_gates[weights], "greedy", seed, 3)
            self.add_aware(total, task, gates["gate"], seed)

    def add_aware(self, total, task, gates, seed):
        """Pruning that knows the gates, next to SparseGPT with as many zeros and gates calibrated after it."""
        weights, inputs = AWARE[total], inputs_for(total, AWARE[total])
        calibrate, folder = gates
        aware = self.folder(f"aware-{total:g}-{seed}")
        prune = self.add(f"prune gate-aware {total:g}, {seed}",
                         ["prune", "--model", self.paths.model, "--method", "sparsegpt", "--sparsity", f"{weights:g}", "--gates", folder,
                          "--activation-sparsity", f"{inputs:g}", "--out", aware, "--batch-size", "8", "--json", *self.texts(seed)],
                         needs=[calibrate], rank=3, seconds=10, makes=aware)
        plain, model, _ = self.weights_alone("sparsegpt", weights, seed, 3)
        for arm, name, made, path in (("gate-aware", f"aware {total:g}", prune, aware), ("sparsegpt split", f"sparsegpt {weights:g}", plain, model)):
            one, gates_of = self.calibrated(f"{name}, {seed}", path, [made], [inputs], GATES["gate"], seed, 3, 25)
            self.gated(task, arm, weights, inputs, one, gates_of, path, "greedy", seed, 3)

    def add_analysis(self):
        """Patterns of the pruned models next to chance: on the processor, so that it runs next to all else."""
        o = self.options
        made = [self.pruned(method, PATTERNS[pattern][1], pattern, 0, 1) for method, pattern in
                (("magnitude", "50 %"), ("wanda", "50 %"), ("sparsegpt", "50 %"), ("wanda", "2:4"))]
        self.add("analyze", ["sparsity", "analyze", *[folder for _, folder in made], "--out", self.paths.out / "patterns",
                             *[word for name in o.matrices for word in ("--only", name)], "--draws", o.draws, *o.analysis],
                 needs=[prune for prune, _ in made], rank=3, seconds=60, threads=o.analysis_threads)
        self.add("patterns page", ["sparsity", "page", self.paths.out / "patterns"], needs=["analyze"], rank=3, seconds=2)

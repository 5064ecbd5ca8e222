"""Many peers within few minutes of a GPU: everything is compiled first, by one process per task on all cores, then each task is
timed while nothing else runs.

A task prepares (builds, compiles, runs once) and then waits until it is told to measure, so a compilation is never paid twice and
never disturbs a timing. Whatever touches the GPU during preparation does so alone (`Gpu.alone`): Triton's autotuning is a
timing, too, and two tasks at once could need more memory than there is. What is not compiled when the time is over is recorded as
missing, with the reason.

Compile caches live in one folder at a fixed path, so that they hit on the next machine of the same GPU and PyTorch:
`pack_cache` and `unpack_cache` carry them.
"""
import contextlib
import multiprocessing
import os
import pathlib
import subprocess
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import wait

CACHE = pathlib.Path(os.environ.get("TESSERA_PEER_CACHE", "/tmp/tessera-peer-cache"))
UNPACKED = CACHE / "unpacked"  # the archives that were unpacked; its time is that of the last
CACHE_LIMIT = 15 << 20  # bytes per file of a packed cache: what a lent GPU machine hands back per file


def use_cache(threads):
    """Before torch is imported. `threads`: of each process's own pool for Triton's compiler."""
    CACHE.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(CACHE)
    os.environ["TRITON_CACHE_DIR"] = str(CACHE / "triton")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
    for name in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE", "TORCHINDUCTOR_AUTOTUNE_LOCAL_CACHE"):
        os.environ[name] = "1"


def pack_cache(archive):
    """Writes ARCHIVE.0, ARCHIVE.1, ...: what was compiled since caches were last unpacked."""
    if not CACHE.exists():
        return
    # Inductor's own entries hold the kernels, too, and put them into Triton's folder when they are read.
    newer = f"-newer '{UNPACKED}'" if UNPACKED.exists() else ""
    command = (f"cd '{CACHE}' && find . -type f {newer} -not -path './triton/*' -not -name '*.lock' -not -name {UNPACKED.name} -print0 | "
               f"tar --null -T - -cf - | xz -T0 -6 | split -b {CACHE_LIMIT} -d -a 1 - '{pathlib.Path(archive).resolve()}.'")
    subprocess.run(["bash", "-c", "set -o pipefail; " + command], check=True)
    parts = sorted(pathlib.Path(archive).parent.glob(pathlib.Path(archive).name + ".?"))
    print(f"compile cache: {sum(part.stat().st_size for part in parts) / 2**20:.1f} MiB in {len(parts)} files", flush=True)


def unpack_cache(archive):
    """Reads ARCHIVE.0, ARCHIVE.1, ... once per machine; what the folder already holds is replaced."""
    parts = sorted(pathlib.Path(archive).parent.glob(pathlib.Path(archive).name + ".?"))
    name = f"{pathlib.Path(archive).name} {sum(part.stat().st_size for part in parts)}\n"
    if parts and not (UNPACKED.exists() and name in UNPACKED.read_text()):
        CACHE.mkdir(parents=True, exist_ok=True)
        with subprocess.Popen(["tar", "-C", CACHE, "-xJf", "-"], stdin=subprocess.PIPE) as tar:
            for part in parts:
                tar.stdin.write(part.read_bytes())
            tar.stdin.close()
        with open(UNPACKED, "a") as out:
            out.write(name)


@dataclass
class Settings:
    """Of the workers: what each makes its Bench of."""
    out: str
    device: str
    dtype: str
    seconds: float
    options: dict = field(default_factory=dict)


class Gpu:
    """A worker's right to use the GPU alone during preparation."""

    def __init__(self, pipe):
        self.pipe, self.held = pipe, False

    def take(self):
        if not self.held:
            self.pipe.send(("take", None))
            self.pipe.recv()
            self.held = True

    def give(self):
        if self.held:
            self.held = False
            self.pipe.send(("give", None))

    @contextlib.contextmanager
    def alone(self):
        self.take()
        try:
            yield
        finally:
            self.give()

    @contextlib.contextmanager
    def alone_once_compiled(self, compiles):
        """The GPU is taken when torch.compile is done with a function and about to run it; at once if nothing compiles."""
        from torch._dynamo.callback import callback_handler
        callback = lambda _: self.take()
        if compiles:
            callback_handler.register_end_callback(callback)
        else:
            self.take()
        try:
            yield
        finally:
            if compiles:
                callback_handler.remove_end_callback(callback)
            self.give()


def work(task, settings, pipe):
    """A worker process."""
    try:
        import torch
        import torch._functorch.config
        from timing import Bench, reason_of
        torch._functorch.config.force_non_lazy_backward_lowering = True  # else the GPU would be held while backward compiles
        torch._dynamo.config.recompile_limit = 1000  # shapes by the dozen share one function
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # and never silently run eagerly
        bench = Bench(settings.out, settings.device, settings.dtype, settings.seconds)
        try:
            task.prepare(bench, Gpu(pipe), settings.options)
        except Exception as error:
            traceback.print_exc()
            return pipe.send(("failed", reason_of(error)))
        pipe.send(("ready", None))
        if pipe.recv() == "measure":
            task.measure(bench, settings.options)
        pipe.send(("done", None))
    except (EOFError, BrokenPipeError):
        pass  # the campaign is over
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(("failed", f"{type(error).__name__}: {str(error)[:200]}"))


def kill(process):
    """The compilers that it started notice that their parent is gone, and end by themselves."""
    process.kill()
    process.join()


ALIVE = 36  # processes that wait at a time: each holds 2 to 3 GiB of the host and, idle, 1 to 2 of the GPU


def run(tasks, settings, parallel, prepare_limit, deadline):
    """Wave by wave: prepares ALIVE tasks, `parallel` at a time, within `prepare_limit` seconds, then measures those that are ready,
    one after another, until `deadline` (of time.monotonic). Returns [(task, reason)] of those that were not measured."""
    unmeasured = []
    for first in range(0, len(tasks), ALIVE):
        unmeasured += run_wave(tasks[first:first + ALIVE], settings, parallel, prepare_limit, deadline)
    return unmeasured


def run_wave(tasks, settings, parallel, prepare_limit, deadline):
    context = multiprocessing.get_context("spawn")
    waiting, begun, ready, unmeasured = list(tasks), {}, [], []
    queue, owner = [], None  # of the GPU
    start = time.monotonic()
    end = min(deadline, start + prepare_limit)

    def stop(pipe, reason):
        nonlocal owner
        task, process = begun.pop(pipe)
        kill(process)
        if pipe in queue:
            queue.remove(pipe)
        if owner is pipe:
            owner = None
        unmeasured.append((task, reason))

    while (waiting or begun) and time.monotonic() < end:
        while waiting and len(begun) < parallel:
            ours, theirs = context.Pipe()
            task = waiting.pop(0)
            process = context.Process(target=work, args=(task, settings, theirs))
            process.start()
            theirs.close()
            begun[ours] = (task, process)
        for pipe in wait(list(begun), timeout=max(0.0, end - time.monotonic())):
            try:
                message, reason = pipe.recv()
            except EOFError:
                message, reason = "failed", "its process ended"
            if message == "take":
                queue.append(pipe)
            elif message == "give":
                owner = None
            elif message == "ready":
                ready.append((*begun.pop(pipe), pipe))
            else:
                stop(pipe, reason)
        while owner is None and queue:
            owner = queue.pop(0)
            try:
                owner.send("granted")
            except OSError:
                stop(owner, "its process ended")
    for pipe in list(begun):
        stop(pipe, f"was not compiled within {prepare_limit:.0f} s")
    unmeasured += [(task, "the time was over before it could be compiled") for task in waiting]

    print(f"{len(ready)} of {len(tasks)} tasks ready after {time.monotonic() - start:.0f} s; {len(unmeasured)} not", flush=True)
    for task, process, pipe in sorted(ready, key=lambda entry: tasks.index(entry[0])):
        begin = time.monotonic()
        try:
            left = deadline - begin
            pipe.send("measure" if left > 0 else "stop")
            message, reason = pipe.recv() if pipe.poll(max(left, 1.0)) else ("failed", "the time was over before it was measured")
        except (EOFError, BrokenPipeError):
            message, reason = "failed", "its process ended"
        if message != "done":
            unmeasured.append((task, reason))
        elif left <= 0:
            unmeasured.append((task, "the time was over before it was measured"))
        kill(process)  # and its memory is free
        print(f"({task.name}: {time.monotonic() - begin:.1f} s)", flush=True)
    return unmeasured

"""workers.py RECORDS: what the PyTorch peers do after a worker that was killed, a line that was left unfinished, and a problem in TF32."""
import multiprocessing
import os
import sys
import time

import campaign


class Killed:
    """Asks for the GPU and is gone before it is granted."""
    name = "killed"

    def prepare(self, bench, gpu, options):
        gpu.pipe.send(("take", None))
        os._exit(1)


def check_killed():
    ready = campaign.wait

    def ready_at_the_end(pipes, timeout):
        found = ready(pipes, timeout)
        for process in multiprocessing.active_children():
            process.join()
        return found

    campaign.wait = ready_at_the_end
    task, settings = Killed(), campaign.Settings("none.jsonl", "cpu", "f32", 0.01)
    unmeasured = campaign.run([task], settings, 1, 1e6, time.monotonic() + 1e6)
    assert unmeasured == [(task, "its process ended")], unmeasured


def check_unfinished(path):
    import ops
    import timing
    with open(path) as records:
        lines = records.read().splitlines()
    with open("unfinished.jsonl", "w") as out:
        out.write("\n".join([lines[0][:lines[0].index("}") + 1], *lines, lines[0][:40]]))
    assert ops.works_of("unfinished.jsonl", "cpu") == ops.works_of(path, "cpu")
    campaigns = timing.measured(path, os.environ["TESSERA_CAMPAIGN"])
    assert campaigns and timing.measured("unfinished.jsonl", os.environ["TESSERA_CAMPAIGN"]) == campaigns


def check_precision():
    import torch
    import ops
    import timing
    bench = timing.Bench("none.jsonl", "cpu", "f32", 0.01)
    for dtype, precision in (("tf32", "high"), ("f32", "highest")):
        next(ops.ways_of(bench, ("softmax", {"R": 5, "C": 7}, {}, dtype, {}), ()))
        assert torch.get_float32_matmul_precision() == precision, dtype


if __name__ == "__main__":
    check_killed()
    check_unfinished(sys.argv[1])
    check_precision()

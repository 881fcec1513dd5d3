"""flashbax (JAX on the CPU) beside relive: `sample` from a million transitions, read as torch tensors.

JAX is large, so this has an environment of its own: that of the other benchmarks, and `requirements-flashbax.txt`.

python benchmarks/bench_flashbax.py          measures, writes results/flashbax.json, and rewrites the pages
python benchmarks/bench_flashbax.py --quick  a smoke run: few rounds, nothing of record rewritten
"""

import argparse
import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

import run

SETTINGS = {
    **dict.fromkeys(run.THREAD_SETTINGS, "1"),
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}


def flashbax(data: Any) -> Any:
    """Its item buffer: `add` and `sample` are compiled, and a batch goes to torch by DLPack, without a copy."""
    jax, torch = importlib.import_module("jax"), importlib.import_module("torch")
    sampling = importlib.import_module("bench_replay_sample")
    columns = importlib.import_module("hand_written").columns(data)
    fields = {name: jax.numpy.asarray(column.numpy()) for name, column in columns.items()}
    one = {name: jax.numpy.zeros(column.shape[1:], column.dtype) for name, column in fields.items()}
    make = importlib.import_module("flashbax").make_item_buffer
    buffer = make(data.rows, min_length=1, sample_batch_size=sampling.BATCH, add_batches=True)
    state = jax.jit(buffer.add, donate_argnums=0)(buffer.init(one), fields)
    draw, split, key = jax.jit(buffer.sample), jax.jit(jax.random.split), jax.random.PRNGKey(0)

    def sample() -> Any:
        nonlocal key
        key, mine = split(key)
        return draw(state, mine).experience

    return sampling.made(data, sample, lambda batch: tuple([torch.from_dlpack(batch[name]) for name in columns]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run; nothing of record is rewritten")
    quick = parser.parse_args().quick
    os.environ.update(SETTINGS)  # before anything that reads them is imported
    harness, sampling = importlib.import_module("harness"), importlib.import_module("bench_replay_sample")
    hand, line = importlib.import_module("hand_written"), importlib.import_module("replay_data").Line
    note = "make_item_buffer, jitted sample, a key split for each batch, torch.from_dlpack of five fields"
    contenders = [
        sampling.floor(),
        line("relive", "relive", "ReplayBuffer(view=NStep(1)).sample(256)", sampling.relive_line(), "ours"),
        line(sampling.REUSE, "relive", sampling.REUSED, sampling.relive_line(reuse=True), "ours"),
        hand.line("index_select", f"index_select {sampling.EACH}", hand.by_index_select),
        line("flashbax", "flashbax", note, flashbax),
    ]
    work = harness.Workload("uniform", sampling.Transitions(sampling.ROWS), after=True)
    measured = harness.measure(work, contenders, harness.Effort.quick() if quick else harness.Effort())
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) if quick else harness.RESULTS
        title, command = "256 of 1 M transitions, obs 17, action 6", "python benchmarks/bench_flashbax.py"
        jax = {"jax": harness.version_of("jax")}
        harness.write("flashbax", title, [measured], folder, where=jax, command=command)
    if not quick:
        importlib.import_module("history").record(importlib.import_module("tables").reports(names=["flashbax"]))
        importlib.import_module("pages").main()


if __name__ == "__main__":
    main()

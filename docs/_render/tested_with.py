"""The page on what modkit was tested with: releases of torch and Python, devices, third-party libraries and models.

The sessions of nox that run the tests store their results: `nox -s "tests(torch='2.8.0')"`, `xla`, `suites`, `compat`.
"""

from typing import Any

from _render.markdown import table
from _render.stored_results import read, release


COUNTS = ("passed", "skipped", "xfailed", "failed")
SIDES = ("torch", "whole", "user")
NOT_RUN = {"XLA": "not run", "CUDA": "in part, see below", "XPU": "not run", "MTIA": "not run"}
TEXT = """\
# Tested with

modkit supports the releases of torch and Python that its tests ran on. This page shows what was run.
[Differences from torch](differences.md) lists what differs on purpose, and [Prove it on your code](prove_it.md)
repeats the comparison with your model. `tests/suites/libraries.py` names what of the suites is left out, and why.

## Versions

The complete test suite on each release. Torch is the oracle each time: a behavior test must pass on torch and on
modkit.

{versions}

Not run: free-threaded builds of Python, macOS and Windows. What pages say of them is reasoned from the code of torch and
Python, or simulated ([Platforms](files.md#platforms)).

## Devices

modkit has no code for a device except two workarounds for XLA and one for cuDNN; it calls torch. This is what was run:

{devices}

On XLA, the tests compare values with the CPU, and require that updates of averages and swaps compile nothing new and
read no tensor on the host, up to step 1,000 of every schedule. Exceptions and limits there:

- `precision="stochastic"` of 16-bit models reads its tensors on the host, because torch_xla has neither random
  generators nor `Tensor.view(dtype)`.
- torch_xla cannot read a file to the device (`map_location="xla"`). Read it to the CPU; loading moves the tensors.
- Where hooks or overrides take part in loading, torch's methods copy the tensors. Of a state dict on the device they
  share the memory, which training then frees: pass a state dict of the CPU.
- torch_xla has no gradients of batch normalization in evaluation mode, and its running variance is biased.

On CUDA (one NVIDIA H200, torch 2.11.0, Python 3.12.3, 2026-11-27), the tests that are marked `gpu` ran, and 72 of 73
passed: updates of `EMA` synchronize with the device with no option, and can be part of a CUDA graph; a swap copies
nothing; recurrent weights stay in one piece. The failure was one of the test: it took a warning of torch, on torch's
side, for an error, and has not run again since it was repaired. Besides, 42 programs ran with torch and with modkit,
with bitwise identical results and the same errors and warnings, among them mixed precision with `GradScaler`, CUDA graphs,
`make_graphed_callables`, `torch.compile` with CUDA graphs, `DataParallel`, DDP and `SyncBatchNorm` on NCCL, FSDP2 with
mixed precision and offloading, distributed checkpoints, TorchScript, cuDNN's recurrent layers, the profiler with kernels,
memory snapshots, running out of memory in the middle of `to()`, accelerate and a model of transformers. Averages on the
GPU have the bits of those on the CPU, in 28 of 28 combinations of options and dtypes; `precision="stochastic"` draws other
random numbers there.
Most of the programs are tests now (`tests/integration/torch_devices`). Of torch's own tests of `torch.nn` for a GPU, a
sample ran on each side, without a failure: 197 on torch and 180 on modkit. The sides drew different samples, because
names of tests contained those of modules, which is repaired. [Comparison](comparison.md#on-a-gpu) has the times of
averages. All of this ran before the last change of how updates gather tensors on accelerators; that is tested on the CPU.

Not run on CUDA: several GPUs. Packages of AOTInductor end the process when they are loaded on that machine, with torch,
too. `EMA.module` shares the memory of the averages, so cuDNN compacts the weights of its recurrent layers at
each call, and torch warns about it once, as it does for any deep copy.

## Test suites of third-party libraries

Each suite runs three times: on torch; *whole*, with every `torch.nn`, `torch.jit` and `torch.optim.swa_utils` in
the library and its tests replaced by modkit's; and *user*, with only the tests rewritten, as in the code of a
modkit user. The outcome of each test is compared: passed, failed or skipped, and the class of the exception. A test
that differs is repeated three times on each side. *Again* is how many
tests ran later, on modkit's side alone (*whole*, or *user* where there is no other), and when. What did not pass there ran
on torch, too, and had the same outcome, apart from the differences below. Of long suites, that is a sample of
the tests that the table counts. Suites of an earlier date without a number there have not run again.

Run with torch {torch}. A dash stands where the tests use nothing that modkit replaces, so that only *whole* compares,
and where the library itself cannot run on modkit: optimum-quanto asks whether `nn.Module` is among the bases of torch's
layers, and pyro and torchrl have metaclasses of their own. The tests of tensordict are those of its release 0.14.0, those of torchrl are of its development branch, and torchao is its
development branch without compiled kernels:

{suites}

{differing}

Libraries whose distribution has no tests were covered by probes. A probe called public functions of the library with
models built on `torch.nn` and on `modkit.nn`, and compared the results bit by bit: 204 probes of torchmetrics 1.9.0, kornia 0.9.0, torchvision 0.28.0, x-transformers 2.31.10, captum 0.9.0, safetensors 0.8.0, beartype 0.23.1, hydra-zen 0.17.2, ipython 9.18.1, jaxtyping 0.3.11, jedi 0.20.1, jsonargparse 4.53.0, onnxruntime 1.32.0, pydantic 2.14.3, tensorboard 2.21.0; 0 differed. They ran once, and are in the history of the repository.

### torch's own tests

Tests of torch run in the same way, with the names replaced in them and in the models that they share
(`torch.testing._internal`). They are those of torch 2.6, and come from three smaller repositories:
[Ascend/pytorch](https://github.com/Ascend/pytorch) has those of the development branch, adapted to a device,
[MetaX-MACA/mcPytorch](https://github.com/MetaX-MACA/mcPytorch) those of torch 2.4, and
[yakov-helm/pytorch_exp](https://github.com/yakov-helm/pytorch_exp) those of torch 2.1. Tests that need a device, or something that torch {torch} does not have, fail or are skipped on both sides.

{torch_tests}

{torch_differing}

Not run: torch's own tests of ONNX; tensor parallelism, whose adapted tests need the device; and FSDP1 and most of `DistributedDataParallel`, whose tests need a GPU.

## Tools

The probes above include tools that look at the user's code: notebooks with `%autoreload 2` (ipython), completion (jedi),
checked types (beartype, jaxtyping, pydantic), command lines and configurations (jsonargparse, hydra-zen), exported models
(onnxruntime runs what the dynamo exporter of torch writes) and graphs (tensorboard). Tests compare the tools of torch and
Python in the same way:

| tool | compared with torch |
| --- | --- |
| `torch.profiler` | Python stacks, shapes and counts of operations, modules, memory by category, execution traces |
| `ModuleTracker`, `ModTracker`, `MemTracker`, `DebugMode`, `FlopCounterMode` | modules of each operation, memory, operations |
| `torch.export` | `.module()`, unflattened and swapped modules, hooks, packages of AOTInductor |
| `inspect`, `pydoc`, `pdb`, `cProfile`, `unittest.mock`, `doctest`, `rlcompleter` | signatures, sources, pages of help, steps, call counts |
| `python -O`, `-OO`, `-W error`, `-bb`, `-X dev`, `-I` | output of a program, with its errors |
| `torchrun` with restarts | a killed worker: weights, averages and optimizer after the restart |

## Training scripts

Public training scripts, unchanged except for `torch.nn`, `torch.jit` and `torch.optim.swa_utils`, which modkit replaces in
the script and in the modules of its repository. Each runs on small random data from one seed, on torch {scripts_torch} and on
modkit. Compared bit by bit are the loss of each backward pass, each loss that is printed, and at the end the states of
all modules, all optimizers and the random generators. Two libraries have their training loop in a method, which a program
of a few lines calls. The Lightning script names a GPU in one line, which was changed to the CPU, with fewer epochs and
batches. For yolov5, `nms` of torchvision was a function in Python on both sides, because the compiled operators of
torchvision could not be loaded:

{scripts}

To {averaged} of them, an average was added with the lines of the [tutorial](tutorial.md), or for
Lightning of [its callback](callbacks.md#lightning), saved in the middle of the run, and
resumed in a new process. Averages, weights, optimizers and random states at the end are bitwise those of the
uninterrupted run:

{resumed}

`python -m tests.suites.training_scripts FOLDER` repeats this with the checkouts in a folder.

Five repositories that have averages of their own ran with their code on torch {averages_torch} ({averages_date}), on
small networks. In the middle, `modkit.EMA` took the run over from their state. The difference is the largest between
both averages after any further step, relative to the largest element of the tensor:

{own_averages}

`python -m tests.suites.own_averages FOLDER` repeats this.

## Model files in packages

The commands ran on the model files that packages ship, with torch {files_torch} on {files_date}. No code of the packages
ran. *Convert* writes safetensors, with the key that the command names where a file has more than a model; *diff*
compares the values of both files; *load* compares `modkit.load_checkpoint` with
`torch.load(weights_only=True, map_location="cpu")`, bit by bit. Files from before torch 1.6 have no checksums, which
`verify` says; files that torch refuses are refused. `python -m tests.suites.packaged_files` repeats this:

{files}

## Functions and models

`modkit compat` calls some 300 functions with `torch` and with `modkit`, and compares values bit by bit, exceptions by
type and text, and warnings. A case with a listed difference must give exactly what its row in
[Differences from torch](differences.md) says.

{releases}

It also builds models of libraries on both, and compares structure, initial weights, outputs, gradients, state dicts,
pickle, `torch.compile`, `torch.fx` and `torch.export`:

{models}"""


def page() -> str:
    """Return the page in Markdown."""
    suites = read("library_suites")
    compat = read("modkit_compat")
    scripts = read("training_scripts")
    averages = read("own_averages")
    files = read("packaged_files")
    runs = sorted(compat["behaviors"].values(), key=lambda run: release(run["torch"]))
    return TEXT.format(
        versions=versions_table(),
        devices=devices_table(),
        torch=suites["torch"],
        suites=suites_table(suites["suites"]),
        differing=differing(suites["suites"]),
        torch_tests=torch_tests_table(suites["torch's tests"]),
        torch_differing=differing(suites["torch's tests"]),
        scripts_torch=scripts["torch"],
        scripts=scripts_table(scripts["scripts"]),
        averaged=sum("average" in row for row in scripts["scripts"].values()),
        resumed=resumed_table(scripts["scripts"]),
        averages_torch=averages["torch"],
        averages_date=averages["date"],
        own_averages=own_averages_table(averages["rows"]),
        files_torch=files["torch"],
        files_date=files["date"],
        files=files_table(files["rows"]),
        releases=behaviors_table(runs),
        models=models_table(compat["models"]),
    )


def versions_table() -> str:
    """Return the runs of the tests, sorted by torch and Python."""
    runs: list[dict[str, Any]] = read("test_runs")["tests"]
    rows = [
        [run["torch"], run["python"], f"{run['passed']:,}", run["failed"], run["date"]]
        for run in sorted(runs, key=by_version)
    ]
    return table(["torch", "Python", "passed", "failed", "date"], rows)


def by_version(run: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the releases of torch and Python of a run, as a sort key."""
    return release(run["torch"]), release(run["python"])


def devices_table() -> str:
    """Return the runs on devices, and the devices that the tests did not run on."""
    runs: list[dict[str, Any]] = read("test_runs").get("devices", [])
    lines: list[list[object]] = [["CPU", "the releases above", "", "", "", ""]]
    for run in sorted(runs, key=lambda run: str(run["device"])):
        counts = [f"{run[name]:,}" for name in ("passed", "failed")]
        lines.append([run["device"], run["torch"], run["python"], *counts, run["date"]])
    tested = {line[0] for line in lines}
    lines += [[name, note, "", "", "", ""] for name, note in NOT_RUN.items() if name not in tested]
    return table(["device", "torch", "Python", "passed", "failed", "date"], lines)


def behaviors_table(runs: list[dict[str, Any]]) -> str:
    """Return how many of the functions of `modkit compat` were equal on each release of torch."""
    counts = ("cases", "equal", "listed", "unlisted")
    rows = [
        [run["torch"], run["Python"], *(run["areas"]["all"][name] for name in counts), run["date"]]
        for run in runs
    ]
    return table(["torch", "Python", *counts, "date"], rows)


def own_averages_table(repositories: dict[str, Any]) -> str:
    """Return the repositories whose averages were taken over, with the largest difference."""
    rows = [
        [
            name,
            row["what"].removesuffix("."),
            row["steps"],
            row["tensors"],
            f"{row['difference']:.1e}",
        ]
        for name, row in repositories.items()
    ]
    return table(["repository", "average", "steps", "tensors", "difference"], rows, numbers=False)


def files_table(packages: dict[str, Any]) -> str:
    """Return the packages whose model files were read, with the outcomes of each command."""
    commands = ("inspect", "verify", "convert", "diff", "load")
    rows = []
    for name, row in packages.items():
        texts = [", ".join(f"{n} {what}" for what, n in row.get(c, {}).items()) for c in commands]
        rows.append([name, row["files"], *(text or "-" for text in texts)])
    return table(["package", "files", *commands], rows)


def models_table(models: dict[str, Any]) -> str:
    """Return the models that were compared, with the number of checks."""
    rows = []
    for name, run in models.items():
        equal, errors, differ = run["counts"]
        rows.append([f"{name} {run['library']}", equal + errors, differ])
    return table(["model", "checks that are equal", "that differ"], rows, numbers=True)


def totals(suites: dict[str, Any]) -> list[int]:
    """Return the sums of tests, of passed tests on each side, and of differing tests."""
    counts = [0] * 5
    for row in suites.values():
        counts = [total + number for total, number in zip(counts, numbers(row), strict=True)]
    return counts


def numbers(row: dict[str, Any]) -> list[int]:
    """Return these numbers for one library."""
    sides = row["sides"]
    passed = [0 if nothing_swapped(row, side) else sides[side].get("passed", 0) for side in SIDES]
    return [sum(sides["torch"].values()), *passed, len(row["differing"])]


def nothing_swapped(row: dict[str, Any], side: str) -> bool:
    """Return True if a side did not run, or no module imported modkit, so that it ran on torch."""
    return side not in row["sides"] or row.get("swapped modules", {}).get(side) == 0


def suites_table(suites: dict[str, Any]) -> str:
    """Return the table of suites, with a row of totals."""
    rows = [[f"{name} {row['version']}", *cells(row), *dates(row)] for name, row in suites.items()]
    rows.append(
        [f"**{len(suites)} libraries**", *(f"{count:,}" for count in totals(suites)), "", ""]
    )
    sides = ("passed on torch", "passed, whole", "passed, user")
    return table(["library", "tests", *sides, "differing", "date", "again"], rows, numbers=True)


def torch_tests_table(suites: dict[str, Any]) -> str:
    """Return the table of torch's own tests, which have no side of a user."""
    rows = []
    for name, row in suites.items():
        tests, torch, modkit, _, differ = cells(row)
        repository, _, commit = row["repository"].partition("@")
        source = f"{repository} {commit[:9]}"
        area = name.removeprefix("torch-").removesuffix(f"-{row['version']}")
        rows.append([area, source, tests, torch, modkit, differ, *dates(row)])
    tests, torch, modkit, _, differ = (f"{count:,}" for count in totals(suites))
    rows.append([f"**{len(suites)} areas**", "", tests, torch, modkit, differ, "", ""])
    headings = ["area", "source", "tests", "passed on torch", "passed on modkit", "differing"]
    return table([*headings, "date", "again"], rows, numbers=True)


def dates(row: dict[str, Any]) -> list[str]:
    """Return when all sides of a suite ran, and how many tests of one ran again on their own, and when."""
    again = row.get("again")
    return [row["date"], f"{sum(again['outcomes'].values()):,}, {again['date']}" if again else ""]


def cells(row: dict[str, Any]) -> list[str]:
    """Return the numbers of one library as text, a dash where a side has nothing to swap."""
    tests, *passed, differ = numbers(row)
    texts = [
        "-" if nothing_swapped(row, side) else f"{count:,}"
        for side, count in zip(SIDES, passed, strict=True)
    ]
    return [f"{tests:,}", *texts, f"{differ:,}"]


def differing(suites: dict[str, Any]) -> str:
    """Return the differing tests, grouped by their cause."""
    causes: dict[str, list[str]] = {}
    for name, row in suites.items():
        for kind in ("differing", "unsteady"):
            for one in row[kind]:
                cause = one["cause"] or "unexplained"
                causes.setdefault(cause, []).append(f"`{one['test'].rpartition('::')[2]}` ({name})")
    lines = [f"- {', '.join(tests)}: {cause}." for cause, tests in causes.items()]
    return "\n".join(["Differing tests, by cause:", "", *lines]) if lines else "No test differed."


def scripts_table(scripts: dict[str, Any]) -> str:
    """Return the training scripts, with the lines that differ between torch and modkit."""
    rows = []
    for row in scripts.values():
        where = f"{row['repository']}, {short_path(row)}, commit {row['commit'][:7]}"
        changed = len(row["lines"]) + len(row["lines of files"])
        counts = [row["losses"], row["modules of modkit"], changed]
        rows.append([row["kind"], where, *counts, verdict(row)])
    heading = ["trains", "script", "losses", "modules of modkit", "lines that change", "result"]
    return table(heading, rows)


def short_path(row: dict[str, Any]) -> str:
    """Return the file of a script and its folder."""
    return "/".join(row["script"].split("/")[-2:])


def verdict(row: dict[str, Any]) -> str:
    """Return what differs, or that nothing does."""
    return f"differs: {', '.join(row['differing'])}" if row["differing"] else "equal"


def resumed_table(scripts: dict[str, Any]) -> str:
    """Return the scripts that an average was added to."""
    rows = [
        [f"{row['repository']}, {short_path(row)}", *average_cells(row["average"])]
        for row in scripts.values()
        if "average" in row
    ]
    return table(["script", "lines added", "backward passes", "resumed before", "result"], rows)


def average_cells(average: dict[str, Any]) -> list[object]:
    """Return the cells of a run with an average."""
    before = average["losses"] - average["of them resumed"] + 1
    return [average["lines"], average["losses"], f"number {before}", verdict(average)]

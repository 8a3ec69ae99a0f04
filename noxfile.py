# /// script
# dependencies = ["nox>=2025.2"]
# ///
"""Sessions: `nox -l` lists them, `nox -s NAME` runs one and passes on arguments after `--`.

All sessions that need torch share one environment, because torch is large. It is filled on demand
with the pins of constraints.txt and reused. `nox --no-venv -s NAME` uses the current environment.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import nox
from nox.virtualenv import ALL_VENVS, VirtualEnv


ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
# The groups of the tools are in pyproject.toml, those of the libraries under test beside the suites.
SUITES = nox.project.load_toml(ROOT / "tests" / "suites" / "pyproject.toml")
GROUPS = {
    "dependency-groups": {**PYPROJECT["dependency-groups"], **SUITES["dependency-groups"]},
}
CONSTRAINTS = ROOT / "constraints.txt"
INTEGRATION = ROOT / "tests" / "integration"


def shared_environment(location: str, **options: object) -> VirtualEnv:
    """Use one environment for all sessions, independent of the session's name."""
    shared = Path(location).with_name("shared")
    return VirtualEnv(str(shared), venv_backend="virtualenv", **options)  # type: ignore[arg-type]


ALL_VENVS["shared"] = shared_environment

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "shared"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint", "typing"]

# The last of each supported release: what differs between releases is told apart by their numbers.
TORCH_RELEASES = ("2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
# Pins that another release of torch may refuse: some need an older setuptools.
NOT_PINNED = ("torch==", "setuptools==")

# Most tensors of the tests are tiny: starting a second thread costs more than it saves.
# Modules are compiled, and their asserts rewritten, in the first run alone.
TEST_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
# One folder or file per mechanism, of those that take seconds.
SMOKE = (
    *("tests/parity/hooks", "tests/parity/module/test_conversion.py"),
    "tests/parity/module/test_load_state_dict.py",
    *("tests/parity/module/test_traversal.py", "tests/parity/module/test_registration.py"),
    *("tests/parity/fixes/test_load.py", "tests/parity/fast_inference/test_scope.py"),
    *(
        "tests/parity/averaging/test_update_parameters.py",
        "tests/parity/averaging/test_averaged_state.py",
    ),
    *("tests/unit/averaging/test_ema_update.py", "tests/unit/averaging/test_ema_swap.py"),
    *("tests/unit/files/test_checkpoint_files.py", "tests/unit/files/test_atomic_write.py"),
    *("tests/parity/jit/test_defects.py", "tests/unit/cli/test_inspect.py"),
)
# Files of what users reach, whose docstrings are complete. Others have a line, or none.
DOCUMENTED = tuple(
    f"src/modkit/{file}"
    for file in (
        *("averaging/batch_norm.py", "averaging/callback.py", "averaging/checkpoints.py"),
        *("averaging/ema.py", "averaging/posthoc.py", "averaging/schedules.py"),
        *("distributed.py", "errors.py", "_fast_inference/__init__.py", "files/checkpoints.py"),
        *("files/inspect.py", "integrations", "jit/_save_and_load.py", "jit/_script_module.py"),
        *("jit/_script_trace_freeze.py", "migrations/declarations.py", "migrations/files.py"),
        *("migrations/state_dicts.py", "migrations/steps.py", "models"),
        *("nn/_attributes.py", "nn/_conversion.py", "nn/_hooks.py", "nn/_load_matching.py"),
        *("nn/_load_state_dict.py", "nn/_traversal.py", "optim"),
    )
)
# Tests of code that reads and writes files, or uses signals.
PORTABLE = (
    *("tests/unit/files", "tests/unit/jit", "tests/parity/jit/test_files.py"),
    *("tests/parity/jit/test_archive_defects.py", "tests/unit/cli/test_average.py"),
    *("tests/unit/cli/test_inspect.py", "tests/unit/averaging/test_interrupts.py"),
)
# One process per core. A file stays in one process: the blocks of a page depend on each other.
# In the order of the folders: by number of tests, the files with few long ones would come last.
IN_PARALLEL = ("-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder")
TESTS_FAILED = 1
# The part of the public symbols whose type a type checker knows.
TYPES_KNOWN = 0.99
NO_TESTS_COLLECTED = 5
WRITE_CHECKPOINTS = """
import torch, modkit
for name in "first", "second":
    modkit.save_checkpoint(modkit.nn.Linear(3, 2).state_dict(), f"{name}.pt")
"""


def install(session: nox.Session, *groups: str, extras: str = "", project: bool = True) -> None:
    """Install modkit and the dependency groups, unless this environment has them already."""
    if session.venv_backend == "none":
        return
    wanted = [*nox.project.dependency_groups(GROUPS, *groups)]
    if project:
        wanted += ["--editable", f".{extras}"]
    recipe = "\n".join([*wanted, CONSTRAINTS.read_text(), str(PYPROJECT["project"])])
    stamp = Path(session.virtualenv.location) / f"installed-{'-'.join(groups)}{extras}.txt"
    if stamp.exists() and stamp.read_text() == recipe:
        return
    session.install("--constraint", str(CONSTRAINTS), *wanted)
    stamp.write_text(recipe)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small network on handwritten digits; `-- --backend torch` runs it on torch."""
    install(session, extras="[demo]")
    session.run("python", "examples/train_digits.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests, and every code block of README, docs and docstrings."""
    install(session, "test", extras="[cli,demo]")
    session.run("pytest", *IN_PARALLEL, *session.posargs, env=TEST_ENVIRONMENT)


def tests_on(torch: str) -> None:
    """Add a session, in an environment of its own; `--force-python 3.13` picks another Python."""

    @nox.session(name=f"tests(torch='{torch}')", default=False, venv_backend="uv|virtualenv")
    def run(session: nox.Session) -> None:
        """Run the tests on this release of torch, and put the figures into the docs."""
        folder = Path(session.create_tmp())
        results, constraints = folder / "results.xml", folder / "constraints.txt"
        pins = CONSTRAINTS.read_text().splitlines()
        constraints.write_text("\n".join(pin for pin in pins if not pin.startswith(NOT_PINNED)))
        if session.venv_backend != "none":
            groups = nox.project.dependency_groups(GROUPS, "test")
            # Utilities of some releases of torch need setuptools, which they do not require.
            wanted = (*groups, "setuptools", f"torch=={torch}")
            session.install("--constraint", f"{constraints}", *wanted, "--editable", ".[cli,demo]")
        arguments = (*IN_PARALLEL, f"--junitxml={results}", *session.posargs)
        # Failures of the whole suite are recorded, too, and end the session after that.
        codes = [0] if session.posargs else [0, TESTS_FAILED]
        session.run("pytest", *arguments, env=TEST_ENVIRONMENT, success_codes=codes)
        if not session.posargs:
            session.run("python", "docs/render.py", "--record", f"{results}")


for release in TORCH_RELEASES:
    tests_on(release)


@nox.session(default=False)
def smoke(session: nox.Session) -> None:
    """Run half a minute of tests that cover most: modules, hooks, averages, files, jit, cli."""
    install(session, "test", extras="[cli,demo]")
    session.run("pytest", *IN_PARALLEL, *SMOKE, *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(default=False)
def coverage(session: nox.Session) -> None:
    """Run the tests and report the lines and branches of modkit that none of them reaches."""
    install(session, "test", extras="[cli,demo]")
    session.run("coverage", "run", "-m", "pytest", *session.posargs, env=TEST_ENVIRONMENT)
    session.run("coverage", "report")


@nox.session(name="property", default=False)
def property_(session: nox.Session) -> None:
    """Run the Hypothesis tests: random module trees and operations on torch and modkit."""
    install(session, "test", extras="[cli,demo]")
    session.run(
        "pytest",
        *("-m", "property", "tests/property"),
        *session.posargs,
        env={**TEST_ENVIRONMENT, "HYPOTHESIS_PROFILE": "ci"},
        success_codes=[0, NO_TESTS_COLLECTED],
    )


@nox.session(default=False)
def lockstep(session: nox.Session) -> None:
    """Run 2,000,000 random operations on torch and modkit; `-- --operations 50000 --seed 7` for others."""
    install(session, "test", extras="[cli,demo]")
    session.run("python", "-m", "tests.property.long_run", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(default=False)
def pairs(session: nox.Session) -> None:
    """Let every feature meet every situation, ten minutes; `-- --only applied` for some pairs.

    The counts of a complete run go to docs/_render/results/pairs.json and docs/test_evidence.md.
    """
    install(session, "test", "ecosystem", extras="[cli,demo]")
    session.run("python", "-m", "tests.pairs", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(default=False)
def portable(session: nox.Session) -> None:
    """Run the tests of files without what macOS and Windows lack; tests/simulated_platform.py says what.

    It needs Linux: there, ``/proc`` says which files are open or mapped.
    """
    install(session, "test", extras="[cli,demo]")
    for platform in ("macos", "windows"):
        session.run(
            *("python", "-m", "pytest", "-p", "tests.simulated_platform"),
            *(session.posargs or PORTABLE),
            env={**TEST_ENVIRONMENT, "SIMULATED_PLATFORM": platform},
        )


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Read 100,000 corrupt and hostile files; `-- --seed 7 --files 1000` picks others."""
    install(session, "test", extras="[cli,demo]")
    session.run("python", "-m", "tests.fuzz.fuzz_files", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(default=False)
def stress(session: nox.Session) -> None:
    """Run the tests that take long, such as a minute of 16 threads and 10,000 cycles of each kind."""
    install(session, "test", extras="[cli,demo]")
    session.run("pytest", "-m", "slow", "tests", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(default=False, venv_backend="virtualenv")
def mutation(session: nox.Session) -> None:
    """Plant bugs, then run a sample of mutmut's mutants; `-- --planted` for the first part only.

    The bugs are planted in a copy of the project. The sample takes an hour: `-- --count 20` is shorter.
    """
    install(session, "test", "mutation", extras="[cli,demo]")
    session.run("python", "-m", "tests.mutation.run", env=TEST_ENVIRONMENT)
    if "--planted" not in session.posargs:
        session.run("python", "-m", "tests.mutation.sample", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(default=False)
def distributed(session: nox.Session) -> None:
    """Run the distributed tests, including those of `nox -s tests`."""
    install(session, "test", extras="[cli,demo]")
    # The default marks in pyproject.toml exclude some of them.
    every = ("-m", "not gpu", "tests/distributed")
    session.run("pytest", *every, *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(default=False, venv_backend="virtualenv", python="3.11")
def xla(session: nox.Session) -> None:
    """Run the tests on XLA, a real device with a client for the CPU; put the figures into the docs.

    torch_xla is built for one release of torch and few of Python, so the environment is separate.
    """
    folder = Path(session.create_tmp())
    results, constraints = folder / "results.xml", folder / "constraints.txt"
    pins = CONSTRAINTS.read_text().splitlines()
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith(NOT_PINNED)))
    if session.venv_backend != "none":
        wanted = (*nox.project.dependency_groups(GROUPS, "test", "xla"), "--editable", ".")
        session.install("--constraint", f"{constraints}", *wanted)
    environment = {"PJRT_DEVICE": "CPU", **TEST_ENVIRONMENT}
    arguments = ("-m", "xla", "tests/xla", f"--junitxml={results}", *session.posargs)
    # Failures of the whole folder are recorded, too, and end the session after that.
    codes = [0] if session.posargs else [0, TESTS_FAILED]
    session.run("pytest", *arguments, env=environment, success_codes=codes)
    if not session.posargs:
        session.run("python", "docs/render.py", "--record", f"{results}", "--device", "XLA")


@nox.session(default=False, venv_backend="virtualenv")
def ecosystem(session: nox.Session) -> None:
    """Run the tests with transformers, timm, diffusers and others, in an environment of their own."""
    install(session, "test", "ecosystem")
    if session.venv_backend != "none":
        # Without its dependencies: brevitas requires setuptools<81.
        session.install("--no-deps", "brevitas==0.13.4")
    # Folders torch_* need torch alone, and LightZero has a session of its own.
    folders = sorted(str(file.parent) for file in INTEGRATION.glob("*/__init__.py"))
    folders = [
        name for name in folders if Path(name).name.split("_")[0] not in ("torch", "lightzero")
    ]
    # Pages whose code blocks use these libraries.
    pages = [str(page) for page in ROOT.glob("docs/*.md") if "if(missing(" in page.read_text()]
    session.run("pytest", *folders, *pages, *session.posargs, env=TEST_ENVIRONMENT)
    session.run("pytest", "-m", "distributed", *folders, *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(default=False, venv_backend="virtualenv")
def compat(session: nox.Session) -> None:
    """Run `modkit compat` with this torch and on models of other libraries; write docs/tested_with.md."""
    install(session, "test", "ecosystem", extras="[cli]")
    session.run("python", "docs/render.py", "--renew", "modkit_compat", env=TEST_ENVIRONMENT)


@nox.session(default=False, venv_backend="virtualenv", python="3.11")
def suites(session: nox.Session) -> None:
    """Run the suites of third-party libraries on torch and on modkit; `-- --only opacus` for one.

    The report is docs/_render/results/library_suites.json and docs/tested_with.md.
    """
    install(session, "suites")
    session.run("python", "-m", "tests.suites", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(default=False, venv_backend="virtualenv", python="3.11")
def lightzero(session: nox.Session) -> None:
    """Compare modkit's EfficientZero networks with LightZero's; `-- --record` renews their record."""
    install(session, "test", "lightzero")
    if session.venv_backend != "none":
        # Without their requirements: outdated NumPy and gym, and a simulator for every game.
        session.install("--no-deps", "LightZero==0.1.0", "DI-engine==0.5.3")
    if "--record" in session.posargs:
        session.run("python", "tests/data/record_efficientzero.py", env=TEST_ENVIRONMENT)
        return
    folders = ("tests/integration/lightzero", "tests/unit/models")
    session.run("pytest", *folders, *session.posargs, env=TEST_ENVIRONMENT)


@nox.session
def lint(session: nox.Session) -> None:
    """Check format, style, language, the import contract and pyproject.toml."""
    install(session, "lint", project=False)
    session.run("ruff", "format", "--check")
    session.run("ruff", "check")
    session.run("ruff", "check", "--preview", "--select", "DOC201,DOC402,DOC501", *DOCUMENTED)
    session.run("flake8", *DOCUMENTED)
    session.run("codespell")
    session.run("lint-imports", env={"PYTHONPATH": "src"})
    session.run("validate-pyproject", "pyproject.toml")


@nox.session
def typing(session: nox.Session) -> None:
    """Check types with mypy and pyright, and that 99 % of the public symbols have known types."""
    install(session, "test", "typing", extras="[cli,demo]")
    session.run("mypy")
    session.run("pyright")
    # The exit code is 1 below 100 %. Integrations derive classes from libraries that are not installed.
    command = ("pyright", "--verifytypes", "modkit", "--ignoreexternal", "--outputjson")
    options: Any = {"env": {"PYTHONPATH": "src"}, "success_codes": [0, 1], "silent": True}
    output = str(session.run(*command, **options))
    report = json.loads(output[output.index("{") : output.rindex("}") + 1])["typeCompleteness"]
    if report["completenessScore"] < TYPES_KNOWN:
        unknown = [found["name"] for found in report["symbols"] if not found["isTypeKnown"]]
        session.error(f"{report['completenessScore']:.1%} of types are known: {', '.join(unknown)}")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Compare the time of modkit with torch's and with the budgets; `-- --only WORD` picks rows.

    Without arguments, `peers` follows.
    """
    install(session, "bench", extras="[cli]")
    # Both files go to build/, which git ignores; a second `--json` replaces the first.
    files = ("--json", "build/bench.json", "--markdown", "build/bench.md")
    session.run("python", "-m", "benchmarks", "--check", *files, *session.posargs)
    if not session.posargs:
        session.notify("peers", [])


@nox.session(default=False, venv_backend="virtualenv")
def peers(session: nox.Session) -> None:
    """Time the weight averages of modkit and of other libraries; `-- --json FILE` keeps the rows."""
    install(session, "peers")
    session.run("python", "-m", "benchmarks.averaging_peers", *session.posargs)


@nox.session(default=False)
def times(session: nox.Session) -> None:
    """Measure absolute times with pytest-benchmark; `-- -k state_dict` picks operations."""
    install(session, "test", "bench", extras="[cli]")
    session.run("pytest", "benchmarks", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation site into docs/_build/html; a warning is an error."""
    install(session, "docs")
    session.run(
        *("sphinx-build", "-n", "-W", "--keep-going", "-b", "html"), "docs", "docs/_build/html"
    )


@nox.session(default=False, venv_backend="virtualenv")
def build(session: nox.Session) -> None:
    """Build sdist and wheel into dist/, check both, and resolve every extra on every Python."""
    install(session, "build", project=False)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("python", "-m", "build")
    files = sorted(str(file) for file in (ROOT / "dist").iterdir())
    session.run("check-wheel-contents", "dist")
    session.run("twine", "check", "--strict", *files)
    resolve = ("uv", "pip", "compile", "--quiet", "--no-header", "pyproject.toml")
    for extra in PYPROJECT["project"]["optional-dependencies"]:
        for python in nox.project.python_versions(PYPROJECT):
            arguments = ("--extra", extra, "--python-version", python)
            session.run(*resolve, *arguments, silent=True)
    session.notify("wheel")


@nox.session(default=False, venv_backend="uv|virtualenv", reuse_venv=False)
def wheel(session: nox.Session) -> None:
    """Install the wheel of `nox -s build` into a new environment, and run each command."""
    file = next((ROOT / "dist").glob("torch_modkit-*.whl"), None)
    if file is None:
        session.error("dist/ has no wheel: run `nox -s build` first")
    pins = ("--constraint", f"{CONSTRAINTS}")
    session.chdir(session.create_tmp())
    session.install(*pins, f"{file}")
    refused = session.run("modkit", "--version", silent=True, success_codes=[1])
    if "[cli]" not in str(refused):
        session.error(f"the missing extra is not named: {refused}")
    session.install(*pins, f"{file}[cli]")
    session.run("python", "-c", WRITE_CHECKPOINTS)
    session.run("modkit", "--version")
    session.run("modkit", "compat", "--help")
    session.run("modkit", "average", "first.pt", "second.pt", "-o", "mean.pt", "--overwrite")
    session.run("modkit", "verify", "mean.pt")
    session.run("python", "-m", "modkit", "inspect", "mean.pt", "--json")

"""The libraries whose suites run, with the selected tests and the reasons for exclusions."""

from typing import NamedTuple


# torch: nothing is swapped. whole: library and tests. user: only the tests.
SIDES = ("torch", "whole", "user")


class Library(NamedTuple):
    """One library, at one version.

    ``root`` is where its package lies in the archive, ``tests`` are the files and folders that
    pytest is given, ``user`` the paths that are rewritten where the library is not. ``left_out``
    has test ids, which may be the start of others, with reasons; ``sample`` has the start of ids of
    which one test in so many runs; ``causes`` has the differences that modkit documents.
    ``repository`` is an owner, name and revision on GitHub, for tests that no distribution has;
    ``packages`` are installed packages that are rewritten with the library, for those that are
    built; ``plugins`` are names of plugins in tests/suites/plugin; ``sides_left_out`` has the sides that
    the library does not run on, with reasons; ``processes`` are workers of pytest-xdist; ``device`` is what
    torch's tests of many devices run on.
    """

    name: str
    version: str
    tests: tuple[str, ...]
    user: tuple[str, ...]
    root: str = "."
    left_out: dict[str, str] = {}
    sample: dict[str, int] = {}
    causes: dict[str, str] = {}
    environment: dict[str, str] = {}
    seconds: int = 1800
    repository: str = ""
    packages: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    sides_left_out: dict[str, str] = {}
    processes: int = 0
    device: str = "cpu"

    @property
    def sides(self) -> list[str]:
        """Return the sides that the library runs on."""
        return [side for side in SIDES if side not in self.sides_left_out]


_OUTSIDE = "needs weights or data from a hub"
_PATCHED = (
    "a method that is assigned to `modkit.nn.Module` does not hold for torch's layers, a listed "
    "difference; with the library untouched the tests agree"
)
_METACLASS = (
    "`PyroModule` has a metaclass that does not derive from `type(nn.Module)`, a listed difference"
)
_ENVIRONMENTS = (
    "`EnvBase` has a metaclass that does not derive from `type(nn.Module)`, a listed difference"
)
_COMPILED_SCRIPT = (
    "compiles a module of TorchScript, and fails: `torch.compile` refuses torch's by its class, and "
    "modkit's where it finds nothing to compile, a listed difference"
)
_MRO = "every quantized layer asks for `nn.Module` among the bases of torch's layers, a listed difference"
_TABLE_BY_MRO = (
    "a table of hooks has `nn.Module` as a key, which is looked up among the bases of torch's layers, a "
    "listed difference; with the library untouched the tests agree"
)
_MINUTES = "takes minutes"
_TIMM = (
    *("checkpoint_loading", "checkpoint_saver", "factory", "input_conv", "layers", "layers_drop"),
    *(
        "layers_pool",
        "layers_pos_embed",
        "multilabel",
        "optim",
        "prune",
        "scheduler",
        "task",
    ),
    "utils",
)
_PEFT = (
    *("bufferdict", "custom_models", "initialization", "loraplus", "low_level_api", "mapping"),
    *("mixed", "osf"),
)
_LIGHTNING = (
    *("callbacks/test_finetuning_callback.py", "callbacks/test_model_summary.py"),
    *("callbacks/test_pruning.py", "callbacks/test_stochastic_weight_avg.py"),
    *("callbacks/test_weight_averaging.py", "core", "models/test_hooks.py"),
    *("models/test_torchscript.py", "utilities/test_dtype_device_mixin.py"),
    *("utilities/test_model_helpers.py", "utilities/test_model_summary.py"),
    "utilities/test_parameter_tying.py",
)
_ACCELERATE = ("accelerator", "big_modeling", "hooks", "modeling_utils", "offload", "utils")

LIBRARIES = (
    Library(
        "opacus",
        "1.6.0",
        ("opacus/tests",),
        ("opacus/tests",),
        left_out={"opacus/tests/accountants_test.py": "computes with numbers, without modules"},
        sample={
            "opacus/tests/privacy_engine_test.py": 8,
            "opacus/tests/batch_memory_manager_test.py": 3,
        },
    ),
    Library(
        "linear_operator",
        "0.6.1",
        ("test",),
        ("test", "linear_operator/test"),
        sample={"test/operators": 4},
    ),
    Library(
        "gpytorch",
        "1.15.2",
        ("test",),
        ("test", "gpytorch/test"),
        left_out={"test/examples": "trains for minutes", "test/kernels/keops": "needs KeOps"},
        sample={"test/variational": 2},
    ),
    Library(
        "skorch",
        "1.4.0",
        ("skorch/tests",),
        ("skorch/tests",),
        left_out={
            "skorch/tests/llm": _OUTSIDE,
            "skorch/tests/test_hf.py": _OUTSIDE,
            "skorch/tests/callbacks/test_logging.py::TestWandb": "needs an account",
            "skorch/tests/test_history.py::TestDistributedHistoryMultiprocessing": "no modules, minutes",
        },
        sample={"skorch/tests/test_net.py": 2},
    ),
    Library(
        "e3nn",
        "0.6.0",
        ("tests",),
        ("tests", "e3nn/util/test.py"),
        left_out={"tests/math/soft_one_hot_test.py::test_with_compile": "no modules, a minute"},
        sample={"tests/nn": 8, "tests/o3": 10, "tests/math": 16},
        causes={"tests/nn/so3act_test.py::test_identity": _COMPILED_SCRIPT},
    ),
    Library(
        "torch-pruning",
        "1.6.1",
        ("tests",),
        ("tests",),
        left_out={
            "tests/test_isomorphic.py::test_pruner_TransposeConv": _MINUTES,
            "tests/test_pruner.py::test_pruner_TransposeConv": _MINUTES,
        },
    ),
    Library(
        "timm",
        "1.0.31",
        tuple(f"tests/test_{name}.py" for name in _TIMM),
        ("tests",),
        sample={"tests/test_optim.py": 20, "tests/test_layers_pos_embed.py": 10},
    ),
    Library(
        "curvlinops-for-pytorch",
        "3.0.1",
        ("test",),
        ("test",),
        sample={
            "test/test_inverse.py": 300,
            "test/test_kfac.py": 60,
            "test/test_ekfac.py": 60,
            "test/test_submatrix.py": 20,
            "test/test_": 4,
        },
    ),
    Library(
        "accelerate",
        "1.15.0",
        tuple(f"tests/test_{name}.py" for name in _ACCELERATE),
        ("tests", "src/accelerate/test_utils"),
        root="src",
        causes={
            # `init_empty_weights` of the rewritten library patches modkit's Module, not the layers.
            "tests/test_big_modeling.py::BigModelingTester::test_init_empty_weights": _PATCHED,
            "tests/test_accelerator.py::AcceleratorTester::test_free_memory": (
                "compares the free memory of the machine, and uses no class of modkit"
            ),
        },
    ),
    Library("zuko", "1.6.0", ("tests",), ("tests",)),
    Library("segmentation-models-pytorch", "0.6.0", ("tests",), ("tests",)),
    Library(
        "einops",
        "0.8.2",
        ("einops/tests",),
        ("einops/tests",),
        environment={"EINOPS_TEST_BACKENDS": "numpy,torch"},
    ),
    Library(
        "neuraloperator",
        "2.0.0",
        ("neuralop",),
        ("neuralop/tests", "neuralop/**/tests"),
        sample={"neuralop": 4},
    ),
    Library("nflows", "0.14", ("tests",), ("tests",)),
    Library("normflows", "1.7.3", ("normflows",), ("normflows/**/*_test.py",)),
    Library("norse", "1.1.0", ("norse",), ("norse/**/test",), sample={"norse": 4}),
    Library(
        "pytorch-ignite",
        "0.5.5",
        tuple(f"tests/ignite/{name}" for name in ("base", "engine", "handlers", "contrib/engines")),
        ("tests",),
        left_out={
            f"tests/ignite/handlers/test_{name}_logger.py": "needs an account or a server"
            for name in ("clearml", "mlflow", "neptune", "polyaxon", "visdom", "wandb")
        },
        sample={"tests/ignite": 3},
    ),
    Library("poutyne", "1.19.0", ("tests",), ("tests",)),
    Library("pytorch-accelerated", "0.1.61", ("test",), ("test",)),
    Library("stable-baselines3", "2.9.2", ("tests",), ("tests",), sample={"tests": 16}),
    Library(
        "torchopt",
        "0.7.3",
        ("tests",),
        ("tests",),
        root="tests",
        repository="metaopt/torchopt@v0.7.3",
        packages=("torchopt",),
        sample={"tests/test_nn.py": 1, "tests/test_import.py": 1, "tests": 20},
    ),
    Library(
        "tensordict",
        "0.14.3",
        ("test/nn",),
        ("test",),
        root="test",
        repository="pytorch/tensordict@v0.14.0",
        packages=("tensordict",),
        causes={
            "test/nn/test_nn.py::test_input": (
                "tensordict refuses a class in place of a module by `type(module) is type`, which a "
                "metaclass makes False, a listed difference"
            )
        },
    ),
    Library(
        "optimum-quanto",
        "0.2.7",
        ("test/nn", "test/quantize"),
        ("test",),
        left_out={"test/nn/test_qconv2d.py": "convolves 16-bit numbers on the CPU for minutes"},
        sample={"test/nn/test_qmodule.py": 1, "test/nn": 3},
        sides_left_out={"whole": _MRO},
    ),
    Library(
        "compressed-tensors",
        "0.20.0",
        tuple(
            f"tests/test_{name}" for name in ("compressors", "offload", "quantization", "transform")
        ),
        ("tests",),
        root="src",
        left_out={
            "tests/test_compressors/model_compressors/test_transformers_integration.py": _OUTSIDE,
            "tests/test_quantization/lifecycle/test_apply.py": _OUTSIDE,
        },
        sample={
            "tests/test_compressors/test_pack_quant.py": 8,
            "tests/test_transform/factory/test_correctness.py": 8,
            "tests": 2,
        },
    ),
    Library(
        "pyro-ppl",
        "1.9.1",
        ("tests/nn", "tests/contrib/easyguide", "tests/contrib/bnn", "tests/contrib/gp"),
        ("tests",),
        causes={
            "tests/nn/test_module.py::test_mixin_factory": (
                "`PyroModule[Net]` of a class of the user is a metaclass conflict, a listed difference"
            )
        },
        repository="pyro-ppl/pyro@1.9.1",
        sides_left_out={"whole": _METACLASS},
    ),
    Library(
        "torchao",
        "0.19.0 (development)",
        (
            "test/quantization/pt2e",
            *(f"test/quantization/test_{name}.py" for name in ("observer", "qat", "quant_api")),
            *(f"test/prototype/{name}" for name in ("module_swap_quantization", "pat")),
            *(
                f"test/prototype/test_{name}.py"
                for name in ("quantized_training", "smoothquant", "tensor_conversion")
            ),
            *("test/core", "test/test_model_architecture.py", "test/test_utils.py"),
        ),
        ("test",),
        repository="pytorch/ao@36027d82d1ad9949597ea16002ff4940374b1b94",
        left_out={"test/quantization/pt2e/test_x86inductor_fusion.py": _MINUTES},
        sample={
            "test/quantization/pt2e/test_arm_inductor_quantizer.py": 8,
            "test/quantization/pt2e/test_x86inductor_quantizer.py": 8,
            "test/quantization/pt2e/test_quantize_pt2e_qat.py": 6,
            "test/quantization/pt2e/test_quantize_pt2e.py": 3,
            "test/quantization/test_q": 4,
        },
    ),
    Library(
        "torch-geometric",
        "2.9.0 (development)",
        ("test/nn", "test/explain", "test/graphgym", "test/profile", "test/test_onnx.py"),
        ("test",),
        repository="pyg-team/pytorch_geometric@5c6461b2305ad068a6d61165b3c55852a11aaa41",
        causes={"test/nn/test_to_hetero": _PATCHED},
    ),
    Library(
        "peft",
        "0.20.1 (development)",
        tuple(f"tests/test_{name}.py" for name in _PEFT),
        ("tests",),
        root="src",
        repository="huggingface/peft@5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40",
        plugins=("no_hub",),
        left_out={
            f"tests/test_{test}": _OUTSIDE
            for test in (
                "initialization.py::TestCustomModelConfigWarning",
                "initialization.py::TestLowCpuMemUsage",
                "initialization.py::TestScaling",
                "low_level_api.py::TestGetBaseModelStateDict",
                "low_level_api.py::TestInjectAdapterFromStateDict",
            )
        },
        # `init_empty_weights` of the rewritten library patches modkit's Module, not the layers.
        causes={
            "tests/test_custom_models.py::TestPeftCustomModel::test_load_model_low_cpu": _PATCHED
        },
        sample={
            "tests/test_custom_models.py": 50,
            "tests/test_initialization.py": 4,
        },
    ),
    Library(
        "lightning",
        "2.6.2 (development)",
        tuple(f"tests/tests_pytorch/{name}" for name in _LIGHTNING),
        ("tests",),
        root="src",
        repository="Lightning-AI/pytorch-lightning@7f0c3436cd3f6ad3753125672024fc415cbcb414",
        # Tests with several ranks take minutes.
        environment={"PYTEST_ADDOPTS": "-k 'not ddp and not spawn and not fsdp and not deepspeed'"},
        left_out={
            "tests/tests_pytorch/models/test_hparams.py": (
                "has a model with a metaclass of its own, a metaclass conflict, a listed difference"
            ),
        },
        sample={
            "tests/tests_pytorch/callbacks/test_pruning.py": 8,
            "tests/tests_pytorch/callbacks/test_stochastic": 2,
            "tests/tests_pytorch/core": 4,
        },
    ),
    Library(
        "vector-quantize-pytorch",
        "1.32.0 (development)",
        ("tests",),
        ("tests",),
        repository="lucidrains/vector-quantize-pytorch@0d7d1aa83334b6f2f8a40306bece75cdaa13d065",
    ),
    Library(
        "pytorch-metric-learning",
        "2.8.1",
        ("tests",),
        ("tests",),
        root="src",
        repository="KevinMusgrave/pytorch-metric-learning@v2.8.1",
        environment={"TEST_DEVICE": "cpu", "TEST_DTYPES": "float32"},
        sample={"tests": 4},
    ),
    Library(
        "catalyst",
        "22.4",
        ("tests",),
        ("tests",),
        repository="catalyst-team/catalyst@v22.04",
        sample={"tests/catalyst/metrics": 10, "tests/contrib": 3},
    ),
    Library(
        "torchrl",
        "0.14.1",
        (
            "test/modules",
            "test/objectives/test_dqn.py",
            "test/test_exploration.py",
            "test/test_trainer.py",
        ),
        ("test",),
        root="test",
        repository="pytorch/rl@ae9719f17b1517af5c2523a36c4616f003ee55cf",
        packages=("torchrl",),
        sample={"test/modules": 40, "test/objectives": 40, "test": 20},
        sides_left_out={"whole": _ENVIRONMENTS},
    ),
    Library(
        "torchmetrics",
        "1.9.0",
        ("tests/unittests/bases", "tests/unittests/wrappers", "tests/unittests/utilities"),
        ("tests",),
        root="src",
        repository="Lightning-AI/torchmetrics@v1.9.0",
        sample={
            "tests/unittests/utilities": 16,
            "tests/unittests/bases": 4,
            "tests/unittests/wrappers": 8,
        },
    ),
    Library(
        "speechbrain",
        "1.1.0",
        ("tests/unittests",),
        ("tests",),
        repository="speechbrain/speechbrain@v1.1.0",
        sample={
            "tests/unittests/test_data_pipeline.py": 20,
            "tests/unittests/test_checkpoints.py": 1,
            "tests": 8,
        },
        causes={
            "tests/unittests/test_checkpoints.py::test_torch_defaults": _TABLE_BY_MRO,
            "tests/unittests/test_pretrainer.py::test_pretrainer": _TABLE_BY_MRO,
        },
    ),
    Library(
        "fvcore",
        "0.1.6 (development)",
        ("tests",),
        ("tests",),
        repository="facebookresearch/fvcore@3378afe0d71dc2aa95e358bc78dc9b67cb48825a",
    ),
    Library(
        "snntorch",
        "0.4.11 (development)",
        ("tests",),
        ("tests",),
        repository="snntorch/snntorch@7edd96905c60a3d97d1ccb5ff37d2d4d2e7b5608",
    ),
    Library(
        "nncf",
        "3.2.0 (development)",
        tuple(
            f"tests/torch/function_hook/test_{name}.py"
            for name in ("function_hook_mode", "hook_storage", "serialization", "train", "wrapper")
        ),
        ("tests",),
        root="src",
        repository="openvinotoolkit/nncf@ef8e1dbd826a66c47f1be13b3137baff92f644a4",
    ),
    Library(
        "mmengine",
        "0.11.0rc0 (development)",
        (
            *("tests/test_model", "tests/test_registry/test_registry.py"),
            *("tests/test_hooks/test_ema_hook.py", "tests/test_runner/test_checkpoint.py"),
        ),
        ("tests",),
        repository="open-mmlab/mmengine@254342938d9bde1775c39ea7d5181c5d294026c4",
        sample={"tests/test_model": 2},
    ),
    Library(
        "backpack-for-pytorch",
        "1.7.1 (development)",
        (
            *("test/converter", "test/custom_module", "test/utils", "test/test_batch_first.py"),
            *("test/bugfixes_test.py", "test/interface_test.py", "test/layers_test.py"),
        ),
        ("test",),
        repository="f-dangel/backpack@366bcd603cb48e561155919537565e03f4574825",
        sample={"test/utils": 4},
    ),
    Library(
        "captum",
        "0.8.0 (development)",
        tuple(
            f"tests/{name}" for name in ("attr", "concept", "metrics", "module", "robust", "utils")
        ),
        ("tests",),
        repository="pytorch/captum@faac08773131888714b15709b28494ebeea7f6eb",
        left_out={
            f"tests/attr/test_llm_attr{part}.py": _OUTSIDE for part in ("", "_hf_compatibility")
        },
        sample={"tests": 8},
    ),
    # Most of its tests compare a text with that of another torch, and fail on each side.
    Library(
        "torchinfo",
        "1.8.0 (development)",
        ("tests/torchinfo_test.py", "tests/exceptions_test.py", "tests/half_precision_test.py"),
        ("tests",),
        repository="TylerYep/torchinfo@5c4164f1e2e185ce33c597dbe00535bf8ed2b930",
    ),
)

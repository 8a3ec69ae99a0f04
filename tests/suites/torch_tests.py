"""The tests of torch that run with modkit in the place of torch.nn, by area.

They come from torch's repository at 2.6, and from three that are smaller: one has the tests of the
development branch, adapted to a device, one those of torch 2.4, and one those of torch 2.1.
"""

from tests.suites.libraries import Library


_RECENT = "Ascend/pytorch@9e73e708ab9350d203475609f36f8a43f6a0c2ab"
_OF_2_1 = "yakov-helm/pytorch_exp@c5e2a7738220d39b8602869406a76e2787ac5c6b"
_OF_2_4 = "MetaX-MACA/mcPytorch@b3db5eed6a6e330133cd3d4b173f8da392aa6bcb"
_OF_2_6 = "pytorch/pytorch@v2.6.0"
_VERSIONS = {_RECENT: "development", _OF_2_1: "2.1", _OF_2_4: "2.4", _OF_2_6: "2.6"}


def _tests(
    area: str,
    repository: str,
    names: tuple[str, ...],
    sample: dict[str, int] | None = None,
    causes: dict[str, str] | None = None,
    device: str = "cpu",
) -> Library:
    version = _VERSIONS[repository]
    return Library(
        f"torch-{area}-{version}",
        version,
        tuple(f"test/{name}" for name in names),
        ("test",),
        root="test",
        sample={f"test/{start}": rate for start, rate in (sample or {}).items()},
        causes={f"test/{start}": cause for start, cause in (causes or {}).items()},
        seconds=1200,
        repository=repository,
        packages=("torch.testing._internal",),
        plugins=("torch_tests",),
        device=device,
        # Of the tests of a GPU, those alone that use it.
        environment={} if device == "cpu" else {"PYTEST_ADDOPTS": f"-k {device}"},
        processes=0 if device == "cpu" else 8,
        sides_left_out={"user": "the library is torch"},
    )


_DYNAMO = (
    *("activation_checkpointing", "aot_autograd", "autograd_function", "compile", "ctx_manager"),
    *("decorators", "deprecated_inline_inbuilt_nn_modules", "export", "export_mutations"),
    *("guard_control", "higher_order_ops", "hooks", "input_attr_tracking", "misc", "model_output"),
    *("modules", "optimizers", "recompiles", "repros", "subgraphs", "unspec"),
)
_FSDP = ("autograd", "clip_grad_norm_", "comm", "frozen", "state", "state_dict")
_PIPELINING = ("backward", "pipe", "schedule", "transformer", "unflatten")
_MEMBERS = (
    "containers",
    "lazy_modules",
    "module_hooks",
    "modules_api",
    "parametrization",
    "pruning",
)

_EXPORT = (
    *("converter", "db", "experimental", "export", "functionalized_assertions", "hop"),
    *("lift_unlift", "pass_infra", "passes", "serdes", "serialize", "sparse", "tools"),
    *("tree_utils", "unflatten", "verifier"),
)
# The others need a GPU, or compile functions without a module.
_INDUCTOR = (
    *("binary_folding", "control_flow", "custom_post_grad_passes", "efficient_conv_bn_eval"),
    *("fused_attention", "fx_fusion", "group_batch_fusion", "inductor_freezing"),
    *("mkldnn_pattern_matcher", "pattern_matcher", "split_cat_fx_passes", "standalone_compile"),
    *("torchinductor", "unbacked_symints"),
)
_NN = (
    *("dropout", "embedding", "init", "load_state_dict", "multihead_attention", "pooling"),
    "packed_sequence",
)

TORCH_TESTS = (
    _tests(
        "dynamo",
        _RECENT,
        tuple(f"dynamo/test_{name}.py" for name in _DYNAMO),
        {
            "dynamo/test_modules.py": 1,
            "dynamo/test_hooks.py": 1,
            "dynamo/test_export.py": 12,
            "dynamo/test_misc.py": 40,
            "dynamo/test_repros.py": 16,
            "dynamo/test_higher_order_ops.py": 24,
            "dynamo/test_": 3,
        },
    ),
    _tests("fx", _RECENT, ("fx",), {"fx/test_z3_gradual_types.py": 8}),
    _tests(
        "distributed",
        _RECENT,
        (
            *(f"distributed/fsdp2/test_fully_shard_{name}.py" for name in _FSDP),
            *(f"distributed/pipelining/test_{name}.py" for name in _PIPELINING),
        ),
    ),
    _tests(
        "distributed",
        _OF_2_1,
        (
            *(f"distributed/_composable/test_{name}.py" for name in ("checkpoint", "contract")),
            *("distributed/_composable/test_replicate.py", "distributed/algorithms/test_join.py"),
            "distributed/checkpoint/test_file_system_checkpoint_cpu.py",
            "distributed/optim/test_apply_optimizer_in_backward.py",
            "distributed/optim/test_named_optimizer.py",
        ),
    ),
    _tests("members", _RECENT, tuple(f"nn/test_{name}.py" for name in _MEMBERS)),
    _tests(
        "quantization",
        _OF_2_1,
        ("quantization/eager", "quantization/fx", "ao/sparsity"),
        {"quantization/fx/test_quantize_fx.py": 12, "quantization/fx": 6, "quantization": 3},
    ),
    _tests("package", _OF_2_1, ("package",)),
    _tests(
        "stateless",
        _OF_2_1,
        ("test_stateless.py", "test_subclass.py", "test_module_init.py"),
        {"": 4},
    ),
    _tests(
        "functorch",
        _RECENT,
        ("functorch/test_eager_transforms.py", "functorch/test_vmap_add_batch_dim_api.py"),
    ),
    _tests(
        "optim",
        _RECENT,
        tuple(f"optim/test_{name}.py" for name in ("optim", "swa_utils", "lrscheduler")),
        {"optim/test_optim.py": 4},
    ),
    _tests(
        "profiler",
        _RECENT,
        tuple(f"profiler/test_{name}.py" for name in ("profiler_tree", "memory_profiler")),
    ),
    _tests(
        "export",
        _OF_2_4,
        tuple(f"export/test_{name}.py" for name in _EXPORT),
        {"export/test_export.py": 12, "export/test_sparse.py": 40, "": 6},
    ),
    _tests(
        "inductor",
        _OF_2_4,
        tuple(f"inductor/test_{name}.py" for name in _INDUCTOR),
        {
            "inductor/test_torchinductor.py": 40,
            "inductor/test_mkldnn_pattern_matcher.py": 8,
            "inductor": 2,
        },
    ),
    _tests(
        "jit",
        _OF_2_6,
        ("test_jit.py",),
        {"": 6},
        {
            "test_jit.py::TestFreezing::test_freeze_module_with_nestedaliasingscalar": (
                "expects that `script` makes several modules of one that is shared; it stays one, "
                "a listed difference"
            ),
            "test_jit.py::TestScriptModuleInstanceAttributeTypeAnnotation": (
                "expects no warning, where torch warns that TorchScript is deprecated at each call "
                "and modkit once in a process, a listed difference"
            ),
        },
    ),
    *(
        _tests(
            "nn",
            source,
            ("test_nn.py", *(f"nn/test_{name}.py" for name in _NN)),
            {"test_nn.py": 5, "nn/test_load_state_dict.py": 1, "": 6},
        )
        for source in (_OF_2_4, _OF_2_6)
    ),
    *(_tests("modules", source, ("test_modules.py",), {"": 4}) for source in (_OF_2_4, _OF_2_6)),
    # Only run when it is named, since it needs a GPU.
    _tests(
        "nn-cuda",
        _OF_2_6,
        ("test_nn.py", "test_modules.py"),
        {"": 4},
        device="cuda",
    ),
)

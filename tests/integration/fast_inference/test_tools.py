"""Tools that look at classes, hooks and traces find inside `modkit.fast_inference` what they find outside."""

import io
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import modkit
from tests.cases import for_each
from tests.helpers import freeze, seed_everything
from tests.integration.fast_inference.zoo import Entry, named
from tests.integration.image_networks import image_net, images, scaled_net


# Warnings of the tools about their own code, inside and outside.
pytestmark = pytest.mark.filterwarnings("ignore")


def need(name: str) -> ModuleType:
    """Import a library, or skip the test."""
    return pytest.importorskip(
        name, reason=f"needs {name.partition('.')[0]}: nox -s ecosystem installs it"
    )


def attributes(model: torch.nn.Module) -> list[tuple[str, str, list[str]]]:
    """List the class of every module and the names of its attributes, in order."""
    return [
        (path, type(module).__name__, list(module.__dict__))
        for path, module in model.named_modules(remove_duplicate=False)
    ]


def both(build: Callable[[], torch.nn.Module], probe: Callable[[Any], Any]) -> list[Any]:
    """Run the probe plainly and inside the scope; return what each found and left behind."""
    found = []
    for scope in (nullcontext, modkit.fast_inference):
        seed_everything()
        model = build()
        with scope(model):
            result = freeze(probe(model))
        found.append((result, attributes(model), freeze(dict(model.state_dict()))))
    return found


def torchinfo_summary(net: torch.nn.Module) -> object:
    """Put hooks on every layer, and count its parameters and operations."""
    columns = ("input_size", "output_size", "num_params", "kernel_size", "mult_adds")
    summary = need("torchinfo").summary(
        net, input_data=images(1), col_names=columns, row_settings=("var_names",), verbose=0
    )
    return str(summary), summary.total_mult_adds, summary.total_params


def lightning_summary(net: torch.nn.Module) -> object:
    """Put hooks on every layer of a network in a LightningModule."""
    lightning = need("lightning.pytorch")
    holder = lightning.LightningModule()
    holder.net, holder.example_input_array = net, images(1)
    holder.forward = net.forward
    return str(need("lightning.pytorch.utilities.model_summary").ModelSummary(holder, max_depth=-1))


def thop_profile(net: torch.nn.Module) -> object:
    """Count operations by exact class, with a hook and two buffers for each layer."""
    return need("thop").profile(net, (images(1),), verbose=False)


def ptflops_count(net: torch.nn.Module, backend: str) -> object:
    """Count operations by class, with patched functions and an attribute for each layer."""
    table = io.StringIO()
    counts = need("ptflops").get_model_complexity_info(
        net, (3, 10, 10), as_strings=False, backend=backend, ost=table
    )
    return counts, table.getvalue()


def torch_pruning_count(net: torch.nn.Module) -> object:
    """Count operations by class with hooks."""
    return need("torch_pruning.utils").count_ops_and_params(net, images(1))


def fvcore_count(net: torch.nn.Module) -> object:
    """Count operations from a trace, by module and by operator."""
    fvcore = need("fvcore.nn")
    counts = fvcore.FlopCountAnalysis(net, images(1))
    return counts.total(), dict(counts.by_module()), dict(counts.by_operator())


def torch_flop_counter(net: torch.nn.Module) -> object:
    """Count operations with a dispatch mode that follows modules with global hooks."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False, depth=9) as counter:
        net(images(1)).sum().backward()
    return {
        path: {str(op): n for op, n in row.items()} for path, row in counter.flop_counts.items()
    }


def module_tracker(net: torch.nn.Module) -> object:
    """Follow which modules are running with global hooks."""
    from torch.utils.module_tracker import ModuleTracker

    seen: list[list[str]] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda *_: seen.append(sorted(tracker.parents))
    )
    try:
        with ModuleTracker() as tracker:
            net(images(1))
    finally:
        handle.remove()
    return seen


def captum_attribution(net: torch.nn.Module, method: str) -> object:
    """Attribute a score to the input: by gradients, and by rules for classes with hooks."""
    return getattr(need("captum.attr"), method)(net).attribute(images(), target=1)


def captum_layer_attribution(net: torch.nn.Module, method: str) -> object:
    """Attribute a score to the output of a layer, read with hooks."""
    layer = net.get_submodule("conv")
    return getattr(need("captum.attr"), method)(net, layer).attribute(images(), target=1)


def torch_pruning_prune(net: torch.nn.Module) -> object:
    """Prune channels with all that depends on them, found by tracing gradients."""
    tp = need("torch_pruning")
    graph = tp.DependencyGraph().build_dependency(net, example_inputs=images())
    group = graph.get_pruning_group(net.conv, tp.prune_conv_out_channels, idxs=[0, 2, 5])
    group.prune()
    return str(group), repr(net), net(images())


def backpack_second_order(net: torch.nn.Module) -> object:
    """Compute gradients of each sample with extensions by exact class."""
    backpack, extensions = need("backpack"), need("backpack.extensions")
    extended = backpack.extend(net.get_submodule("body").train())
    loss = backpack.extend(torch.nn.MSELoss())
    with backpack.backpack(extensions.BatchGrad()):
        out = extended(torch.randn(2, 8, 4, 4))
        loss(out, torch.zeros_like(out)).backward()
    return {name: p.grad_batch for name, p in extended.named_parameters()}


def opacus_samples(net: torch.nn.Module) -> object:
    """Compute gradients of each sample with hooks by class."""
    wrapped = need("opacus.grad_sample").GradSampleModule(net.get_submodule("body").train())
    wrapped(torch.randn(2, 8, 4, 4)).sum().backward()
    result = {name: p.grad_sample for name, p in wrapped.named_parameters()}
    wrapped.to_standard_module()
    return result


def peft_lora(net: torch.nn.Module) -> object:
    """Replace layers by adapters around them, train them, and merge them again."""
    peft = need("peft")
    config = peft.LoraConfig(r=2, target_modules=["conv", "head"], init_lora_weights=False)
    model = peft.get_peft_model(net, config)
    kinds = type(net.conv).__name__, type(net.head).__name__
    model(images()).square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    outputs = [model(images())]
    merged = model.merge_and_unload()
    return kinds, gradients, outputs, type(merged.conv).__name__, merged(images())


def accelerate_offload(net: torch.nn.Module) -> object:
    """Replace the forward of instances by one that fetches weights from the meta device."""
    accelerate = need("accelerate")
    accelerate.cpu_offload(net, execution_device=torch.device("cpu"))
    output = net(images())
    devices = {name: p.device.type for name, p in net.named_parameters()}
    accelerate.hooks.remove_hook_from_submodules(net)
    return output, devices, net(images())


def accelerate_hook(net: torch.nn.Module) -> object:
    """Put a hook around the forward of one instance."""
    hooks, seen = need("accelerate.hooks"), []

    class Noting(hooks.ModelHook):
        def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(module).__name__)
            return tuple(x + 1 for x in args), kwargs

    hooks.add_hook_to_module(net.get_submodule("body.0"), Noting())
    output = net(images())
    hooks.remove_hook_from_module(net.get_submodule("body.0"))
    return seen, output, net(images())


def brevitas_quantize(net: torch.nn.Module) -> object:
    """Replace each layer by its quantized one."""
    quantized = need("brevitas.graph.quantize").layerwise_quantize(net)
    return [type(module).__name__ for module in quantized.modules()], quantized(images())


def torchao_quantize(net: torch.nn.Module) -> object:
    """Swap the weights of linear layers for a subclass of Tensor."""
    quantization = need("torchao.quantization")
    quantization.quantize_(net, quantization.Int8WeightOnlyConfig())
    kind = type(net.head.weight).__name__
    result = kind, net(images())
    net.head = torch.nn.Linear(16, 3)
    return result


def eager_quantization(net: torch.nn.Module) -> object:
    """Replace linear layers by dynamically quantized ones, in place."""
    ao = need("torch.ao.quantization")
    ao.quantize_dynamic(net, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
    result = [type(module).__name__ for module in net.modules()], net(images())
    net.head = torch.nn.Linear(16, 3)
    return result


def eager_fusion(net: torch.nn.Module) -> object:
    """Put one layer for three in their place."""
    ao = need("torch.ao.quantization")
    fused = ao.fuse_modules(net, [["conv", "bn", "relu"], ["body.0", "body.1"]], inplace=True)
    return [type(module).__name__ for module in fused.modules()], fused(images())


def fx_fusion(net: torch.nn.Module) -> object:
    """Trace a copy and fold its normalization."""
    from torch.fx.experimental import optimization

    fused = optimization.fuse(net)
    return [type(module).__name__ for module in fused.modules()], fused.code, fused(images())


def ema_pytorch_copy(net: torch.nn.Module) -> object:
    """Average with a deep copy of the network."""
    ema = need("ema_pytorch").EMA(net, beta=0.9, update_every=1, update_after_step=0)
    with torch.no_grad():
        net.get_parameter("head.weight").add_(1.0)
    ema.update()
    return ema(images()), attributes(ema.ema_model)


GRADIENTS: Final = ("Saliency", "IntegratedGradients", "InputXGradient")
RULES: Final = ("DeepLift", "LRP", "GuidedBackprop", "Deconvolution")
LAYERS: Final = ("LayerGradCam", "LayerConductance", "LayerDeepLift")
# These are given a network that has parameters of its own beside the layers.
COUNTERS: Final = ("torchinfo_summary", "thop_profile", "fvcore_count")
PROBES: Final[dict[str, Callable[[Any], object]]] = {
    **{
        probe.__name__: probe
        for probe in (
            torchinfo_summary,
            lightning_summary,
            thop_profile,
            torch_pruning_count,
            fvcore_count,
            torch_flop_counter,
            module_tracker,
            torch_pruning_prune,
            backpack_second_order,
            opacus_samples,
            peft_lora,
            accelerate_offload,
            accelerate_hook,
            brevitas_quantize,
            torchao_quantize,
            eager_quantization,
            eager_fusion,
            fx_fusion,
            ema_pytorch_copy,
        )
    },
    **{f"ptflops_{name}": partial(ptflops_count, backend=name) for name in ("pytorch", "aten")},
    **{f"captum_{name}": partial(captum_attribution, method=name) for name in GRADIENTS + RULES},
    **{f"captum_{name}": partial(captum_layer_attribution, method=name) for name in LAYERS},
}


@for_each("name", PROBES)
def test_tool(name: str) -> None:
    """A tool finds, computes and leaves behind the same on torch and on modkit, outside and inside."""
    build = scaled_net if name in COUNTERS else image_net
    on_torch, on_modkit = (
        both(lambda nn=nn: build(nn).eval(), PROBES[name]) for nn in (torch.nn, modkit.nn)
    )
    plain, *others = *on_torch, *on_modkit

    assert others == [plain] * 3
    assert plain[0] not in (None, freeze([]), freeze({}))


def test_feature_extractor_of_torchvision() -> None:
    """Torchvision's extractor traces the model inside the scope, and its graph computes the same."""
    entry = named("torchvision-resnet18")[0]

    def probe(model: torch.nn.Module) -> object:
        extraction = need("torchvision.models.feature_extraction")
        names = extraction.get_graph_node_names(model)
        extractor = extraction.create_feature_extractor(model, ["layer1", "layer3.0.relu"])
        return names, extractor(entry.inputs()["0"])

    plain, inside = both(entry.build, probe)

    assert plain == inside


def test_intermediate_features_of_timm() -> None:
    """Intermediate features, a new classifier and reparameterized layers of timm are the same."""
    entry = named("timm-repvgg_a0")[0]

    def probe(model: torch.nn.Module) -> object:
        x = entry.inputs()["0"]
        features = model.forward_features(x)
        model.reset_classifier(7)
        outputs = [features, model(x)]
        reparameterized = need("timm.utils.model").reparameterize_model(model, inplace=True)
        return [*outputs, reparameterized(x), repr(reparameterized)]

    plain, inside = both(entry.build, probe)

    assert plain == inside


@pytest.mark.parametrize(
    "entry", named("transformers-BertForMaskedLM", "transformers-LlamaForCausalLM"), ids=str
)
def test_features_of_transformers(entry: Entry) -> None:
    """Hidden states, resized embeddings and gradient checkpointing of transformers are the same."""

    def probe(model: torch.nn.Module) -> object:
        inputs = entry.inputs()
        model.set_attn_implementation("eager")
        with torch.no_grad():
            hidden = model(**inputs, output_hidden_states=True, output_attentions=True)
            first: list[Tensor] = [*hidden.hidden_states, *hidden.attentions]
            model.resize_token_embeddings(44)
            model.tie_weights()
            second = model(**inputs).logits
        model.gradient_checkpointing_enable()
        model.train()
        model(**inputs).logits.sum().backward()
        gradients = [p.grad for p in model.parameters()]
        model.gradient_checkpointing_disable()
        return first, second, gradients, model.eval()(**inputs).logits

    plain, inside = both(entry.build, probe)

    assert plain == inside


def test_attention_processors_of_diffusers() -> None:
    """Other attention processors and slices of diffusers, set inside the scope, are used."""
    entry = named("diffusers-UNet2DConditionModel")[0]

    def probe(model: torch.nn.Module) -> object:
        outputs = [entry.call(model)["sample"]]
        model.set_attn_processor(need("diffusers.models.attention_processor").AttnProcessor())
        outputs.append(entry.call(model)["sample"])
        model.set_attention_slice(1)
        outputs.append(entry.call(model)["sample"])
        model.fuse_qkv_projections()
        outputs.append(entry.call(model)["sample"])
        model.unfuse_qkv_projections()
        return outputs

    plain, inside = both(entry.build, probe)

    assert plain == inside


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_save_pretrained(library: str, tmp_path: Any) -> None:
    """A model saved inside the scope loads bitwise identically."""
    name = {"diffusers": "diffusers-UNet2DModel", "transformers": "transformers-BertForMaskedLM"}
    entry = named(name[library])[0]

    def probe(model: torch.nn.Module) -> object:
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        files = {path.name: path.stat().st_size for path in sorted(tmp_path.iterdir())}
        return files, next(iter(entry.call(loaded).values())), attributes(loaded)

    plain, inside = both(entry.build, probe)

    assert plain == inside

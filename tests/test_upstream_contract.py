"""Everything of Megatron's and torch's inside that megagate leans on, by the file that leans on it.

An upgrade that changes one of these fails here, with the name of the file to look at, and not in the middle of a run.
`make test` needs no other list of them.
"""

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megatron.core.datasets.utils
import megatron.core.dist_checkpointing
import megatron.training.initialize
import megatron.training.training
import numpy as np
import pytest
import torch.distributed.checkpoint
import torch.utils._device
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon
from megatron.core import optimizer as megatron_optimizer
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder, _MMapBinReader
from megatron.core.dist_checkpointing import gpt_checkpoint_interop
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
from megatron.core.enums import Fp8Recipe
from megatron.core.extensions import transformer_engine
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.fusions import fused_cross_entropy
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.inference.sampling.torch_sampling import TorchSampling
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.pipeline_parallel import combined_1f1b
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.timers import Timers
from megatron.core.tokenizers.text.libraries import HuggingFaceTokenizer, SentencePieceTokenizer, TikTokenTokenizer
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
from megatron.core.transformer.attention import Attention, SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_logging import MetricEntry, MoEMetricsTracker
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import arguments as megatron_arguments
from megatron.training import async_utils as training_async
from megatron.training import checkpointing, global_vars
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.datasets import data_samplers
from megatron.training.datasets.fim_dataset import GPTFIMDataset
from megatron.training.models import HybridModelConfig
from megatron.training.models.gpt import GPTModelBuilder
from megatron.training.theoretical_memory_usage import report_theoretical_memory
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch.utils.tensorboard.writer import FileWriter as SummaryFileWriter

from megagate.checkpoint import torch_adam
from megagate.checkpoint.fit import CONTEXT_ARGUMENTS, MODEL_ARGUMENTS
from megagate.checkpoint.names import NORM_NAMES
from megagate.checkpoint.pickles import INDEX_CLASSES
from megagate.checkpoint.torch_dist import TensorWriter
from megagate.data.index_file import write_index_of_lengths
from megagate.model.backends import functions, torch_backend
from megagate.model.router import GLOBAL_LOSS
from megagate.platform import cpu
from megagate.pretrain.arguments import DEFAULTS, NOT_AVAILABLE
from megagate.pretrain.backend import WITHOUT_FP8
from megagate.pretrain.gate_checks import IN_THE_WAY
from megagate.pretrain.refusals import RECIPES, alignment
from megagate.pretrain.sampler import CyclicSampler
from megagate.pretrain.validation import WholeSetSampler


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def source(function: Any) -> str:
    return inspect.getsource(function)


@pytest.fixture(scope="module", autouse=True)
def as_it_ships() -> Iterator[None]:
    """Megatron's training loop without what an earlier test of this process may have put in its place."""
    with contextlib.ExitStack() as stack:
        for patch in cpu.TRAINING_PATCHES + cpu.RESUME_PATCHES:
            stack.enter_context(cpu.without(patch.name))
        yield


def test_the_version_that_was_read() -> None:
    """Every check below was made against this release; a newer one needs a look at each file named here."""
    assert version("megatron-core").startswith("0.19.")


def test_model_attention() -> None:
    """megagate/model/attention.py overrides two methods and relies on how Megatron calls them."""
    assert {"hidden_states", "key_value_states", "output_gate", "split_qkv"} <= parameters(
        SelfAttention.get_query_key_value_tensors
    )
    assert parameters(Attention._apply_output_gate) == {"self", "x", "gate"}
    forward = source(Attention.forward)
    assert "query, key, value, gate = qkv_output" in forward
    assert "core_attn_out = self._apply_output_gate(core_attn_out, gate)" in forward
    assert "if self.config.attention_output_gate:" in forward
    assert {"linear_qkv", "core_attention", "linear_proj", "q_layernorm", "k_layernorm"} <= {
        field.name for field in dataclasses.fields(SelfAttentionSubmodules)
    }
    constructor = source(Attention.__init__)
    assert "self.world_size = world_size" in constructor
    # megagate/model/backends/attention.py is built with a config whose groups are the ranks, where there are fewer.
    assert "tmp_config.num_query_groups = world_size" in constructor
    # Parameters of a gate's own: whose gradients are summed, and which decay.
    finalize = source(importlib.import_module("megatron.core.distributed.finalize_model_grads"))
    assert '(config.sequence_parallel and getattr(param, "sequence_parallel", False))' in finalize
    assert "len(param.shape) == 1" in source(get_standard_config_overrides)


def test_model_backends_and_specs() -> None:
    """megagate/model/backends and specs.py: the stack's own final norm, the provider, the expert layers."""
    assert "post_layer_norm" in parameters(HybridStack.__init__)
    assert "if self.post_process and self.post_layer_norm:" in source(HybridStack.forward)
    assert {"layer_norm", "core_attention", "column_parallel_linear", "row_parallel_linear"} <= set(
        vars(LocalSpecProvider)
    )
    assert {"backend", "num_experts", "moe_grouped_gemm"} <= parameters(get_moe_module_spec_for_backend)
    assert {"attention_layer", "mlp_layer", "moe_layer"} <= {
        field.name for field in dataclasses.fields(HybridStackSubmodules)
    }
    assert {"input_", "group"} <= parameters(gather_from_sequence_parallel_region)


def test_transformer_engine() -> None:
    """megagate/model/backends/te_backend.py and pretrain/backend.py; tests/te has what needs the package itself."""
    assert {"HAVE_TE", "fused_permute_with_probs", "fused_topk_with_score_function"} <= set(vars(transformer_engine))
    assert hasattr(tensor_parallel_layers, "_grad_accum_fusion_available")
    assert {"fuse_layernorm_and_linear", "column_parallel_layer_norm_linear"} <= set(vars(LocalSpecProvider))
    assert {"layer_norm", "core_attention", "grouped_mlp_modules", "row_parallel_linear"} <= set(vars(TESpecProvider))
    assert "sharded_state_dict_keys_map" in {field.name for field in dataclasses.fields(TransformerLayerSubmodules)}
    # megagate/model/attention.py multiplies the gate's rows of linear_qkv as Megatron's linear layers do.
    assert {"gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "tp_group"} <= parameters(
        linear_with_grad_accumulation_and_async_allreduce
    )
    # Attention in FP8 has no flag of Megatron's; the config takes what the arguments hold.
    assert "if hasattr(args, f.name):" in source(core_transformer_config_from_args)
    assert {"fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_recipe", "transformer_impl"} <= {
        field.name for field in dataclasses.fields(TransformerConfig)
    }
    # megagate/pretrain/refusals.py
    assert set(RECIPES) < {recipe.value for recipe in Fp8Recipe}
    assert all(get_fp8_align_size(Fp8Recipe(recipe)) == alignment(recipe) for recipe in RECIPES)
    # megagate/checkpoint/names.py
    assert ShardedObject("norm._extra_state", None, (1,), (0,)).unique_key == "norm._extra_state/shard_0_1"


def test_model_builder_and_initialization() -> None:
    """megagate/model/builder.py and initialization.py: hooks before wrapping, shards with offsets, expert marks."""
    assert {"pre_wrap_hooks", "hybrid_stack_spec"} <= {field.name for field in dataclasses.fields(HybridModelConfig)}
    assert {"args", "config"} <= parameters(hybrid_config_from_args)
    assert {"key", "data", "global_shape", "global_offset", "local_shape", "prepend_axis_num"} <= {
        field.name for field in dataclasses.fields(ShardedTensor)
    }
    for linear in (ColumnParallelLinear, RowParallelLinear):
        assert 'setattr(self.weight, "allreduce", not use_expert_pgs)' in source(linear.__init__)
        assert "self.is_expert = is_expert" in source(linear.__init__)


def test_model_yarn() -> None:
    """megagate/model/yarn.py is built in the place of Megatron's."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
    from megatron.core.models.hybrid import hybrid_model

    built = source(hybrid_model.HybridModel).partition("YarnRotaryEmbedding(")[2]
    assert built.split()[:2] == ["kv_channels=self.config.kv_channels,", "rotary_percent=rotary_percent,"]
    assert "self.dim = kv_channels\n" in source(YarnRotaryEmbedding.__init__)
    assert {"kv_channels", "rotary_percent"} <= parameters(YarnRotaryEmbedding)


def test_model_delta_net() -> None:
    """megagate/model/delta_net.py, initialization.py and platform/cpu.py: Megatron's layer and what it calls."""
    fields = {field.name for field in dataclasses.fields(gated_delta_net.GatedDeltaNetSubmodules)}
    assert fields == {"in_proj", "out_norm", "out_proj"}
    assert "gdn_layer" in {field.name for field in dataclasses.fields(HybridStackSubmodules)}
    constructor = source(gated_delta_net.GatedDeltaNet.__init__)
    for attribute in ("tp_group", "tp_size", "out_norm", "value_head_dim", "A_log", "A_init_range", "conv1d"):
        assert f"self.{attribute} = " in constructor
    # Initial weights are drawn in the same way by name.
    reset = source(gated_delta_net.GatedDeltaNet.reset_parameters)
    assert "uniform_(*self.A_init_range)" in reset
    assert "self.A_log.data.copy_(torch.log(A))" in reset
    assert "if self.conv_init is not None:" in reset
    # It has no sum over tensor-parallel ranks of its own for the output norm.
    assert "reduce" not in inspect.getsource(importlib.import_module(gated_delta_net.GatedDeltaNet.__module__))
    # The CPU platform answers these two calls.
    forward = source(gated_delta_net.GatedDeltaNet.forward)
    assert "qkv, _ = causal_conv1d(" in forward
    assert "core_attn_out, _ = self.gated_delta_rule(" in forward
    assert "query_key = l2norm(query_key.contiguous())" in source(
        gated_delta_net.GatedDeltaNet._prepare_input_for_gated_delta_rule
    )


def test_model_router() -> None:
    """megagate/model/router.py scales a loss on its way into the gradient; builder.py sets how metrics are reduced."""
    assert list(inspect.signature(TopKRouter.attach_and_log_load_balancing_loss).parameters)[:5] == [
        "self",
        "activation",
        "aux_loss_coeff",
        "aux_loss",
        "aux_loss_name",
    ]
    assert GLOBAL_LOSS in source(TopKRouter)
    router_module = inspect.getsource(importlib.import_module(TopKRouter.__module__))
    assert {"tp_cp_group", "tp_dp_cp_group"} <= set(re.findall(r"self\.(\w+_group) =", router_module))
    experts = get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=2)
    assert experts.keywords["submodules"].router is TopKRouter
    assert {"reduce_group", "avg_group", "needs_dp_avg"} <= {field.name for field in dataclasses.fields(MetricEntry)}
    assert {"name", "num_layers"} <= parameters(MoEMetricsTracker.ensure_initialized)


def test_model_stack() -> None:
    """megagate/model/backends/torch_backend.py forks the random state around the layers, which Megatron does not."""
    assert "fork" not in source(HybridStack.forward)


def test_model_backends_functions() -> None:
    """megagate/model/backends/functions.py: Megatron looks these functions up by name, with these parameters."""
    assert "_apply_rotary_pos_emb_bshd(" in source(rope_utils.apply_rotary_pos_emb)
    assert "tensor_parallel.vocab_parallel_cross_entropy(" in source(LanguageModule.compute_language_model_loss)
    assert "= sort_chunks_by_idxs(" in source(MoEAlltoAllTokenDispatcher.dispatch_postprocess)
    expected = {
        functions.rotate_by_megatron: "t freqs rotary_interleaved mla_rotary_interleaved mscale multi_latent_attention",
        vocab_parallel_cross_entropy: "vocab_parallel_logits target label_smoothing tp_group",
        sort_chunks_by_idxs: "input split_sizes sorted_idxs probs fused",
    }
    assert {megatrons for megatrons, _ in functions.REPLACED.values()} == set(expected)
    for function, names in expected.items():
        assert list(inspect.signature(function).parameters) == names.split()


def test_pretrain_dispatcher() -> None:
    """megagate/pretrain/dispatcher.py and refusals.py: what Megatron has of DeepEP, and where its fusions stop."""
    assert isinstance(fused_a2a.HAVE_DEEP_EP, bool)
    assert "self.tp_size * self.ep_size > 1" in source(MoEFlexTokenDispatcher)
    assert "grad_input.to(torch.bfloat16)" in source(fused_cross_entropy)
    assert "cross_entropy_fusion_impl == 'te'" in source(megatron_arguments.validate_args)


def test_model_backends_experts() -> None:
    """megagate/model/backends/experts.py stands for Megatron's experts, whose linear layers only multiply."""
    assert list(inspect.signature(SequentialMLP.forward).parameters)[1:] == [
        "permuted_local_hidden_states",
        "tokens_per_expert",
        "permuted_probs",
    ]
    assert "explicit_expert_comm" in source(ColumnParallelLinear.forward)
    assert "explicit_expert_comm" in source(RowParallelLinear.forward)


def test_pretrain_entry() -> None:
    """megagate/pretrain: the training loop, the batch helpers, and the parser that reads sys.argv."""
    assert list(inspect.signature(megatron.training.training.pretrain).parameters)[:4] == [
        "cfg_container",
        "train_valid_test_dataset_provider",
        "model_type",
        "forward_step_func",
    ]
    assert {"args", "model_cfg"} <= parameters(pretrain_cfg_container_from_args)
    assert "parser.parse_args()" in source(megatron_arguments.parse_args)
    assert "args = arguments.parse_args(ignore_unknown_args=True)" in source(megatron.training.ft_integration.setup)
    assert {"batch", "has_cu_seqlens", "broadcast_src_rank", "mtp_on_this_rank", "micro_batch_size"} <= parameters(
        get_batch_on_this_tp_rank
    )
    assert {"batch", "is_hybrid_cp", "cp_group"} <= parameters(get_batch_on_this_cp_rank)
    assert "from megatron.core.datasets.utils import compile_helpers" in source(
        megatron.training.initialize._compile_dependencies
    )
    # A fresh vocabulary padding is written into the arguments before the model's configuration is made of them.
    assert "args.padded_vocab_size is not None" in source(hybrid_config_from_args)


def test_pretrain_data() -> None:
    """megagate/pretrain: what the order of the samples follows from; see also test_data_record.py."""
    from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset

    assert "threshold = 0.80" in source(gpt_dataset.GPTDataset._build_document_sample_shuffle_indices)
    assert parameters(blended_megatron_dataset_builder._get_size_per_split_per_dataset) == {
        "normalized_weights",
        "target_size_per_split",
        "surplus",
    }


def test_pretrain_gate_optimizer() -> None:
    """megagate/pretrain/gate_optimizer.py wraps a function of the training loop, and finds what optimizers update."""
    assert "optimizer = get_megatron_optimizer(" in source(megatron.training.training.setup_model_and_optimizer)
    assert {"config", "model_chunks"} <= parameters(megatron.training.training.get_megatron_optimizer)
    shards = source(DistributedOptimizer._get_main_param_and_optimizer_states)
    assert "group_index, group_order = self.model_param_group_index_map[model_param]" in shards
    assert 'main_param = self.optimizer.param_groups[group_index]["params"][group_order]' in shards
    groups = source(DistributedOptimizer._build_model_and_main_param_groups)
    assert '["param_map"][model_param]["param"]' in groups
    assert "model_param.view(-1)[param_range.start : param_range.end]" in groups
    assert "self.model_param_gbuf_map[param]" in source(DistributedOptimizer._get_model_param_range_map)
    assert "param.main_param = main_param" in source(Float16OptimizerWithFloat16Params.__init__)
    assert {"register_step_pre_hook", "register_step_post_hook"} <= set(vars(torch.optim.Optimizer))
    # Muon asks for the shapes by the name of a function, and keeps them with the parameter.
    tagging = source(megatron_optimizer._get_megatron_emerging_optimizer)
    assert "qkv_split_shapes = _get_qkv_split_shapes(model_chunk.config)" in tagging
    assert "param.qkv_split_shapes = qkv_split_shapes" in tagging
    assert 'getattr(p, "qkv_split_shapes", None)' in source(TensorParallelMuon.orthogonalize)


def test_pretrain_flops() -> None:
    """megagate/pretrain/flops.py adds the gate to a count that knows it in the formula of other models only."""
    original = inspect.unwrap(megatron.training.training.num_floating_point_operations)
    assert list(inspect.signature(original).parameters) == [
        "args",
        "batch_size",
        "seqlen_squared_sum_in_batch",
        "total_real_tokens_in_batch",
    ]
    before, _, after = source(original).partition("def transformer_flops():")
    assert "gate" not in before.replace("Gated Delta", "").replace("gated delta", "")
    assert "if is_hybrid_model(args):" in after
    # It prints that it knows no hybrid model, instead of numbers without the gate.
    assert report_theoretical_memory(argparse.Namespace(hybrid_layer_pattern="*-")) is None


def test_pretrain_life_of_a_run() -> None:
    """megagate/pretrain/{stop,spikes,supervised}.py and checkpoint/save.py work between the steps of the loop."""
    training = megatron.training.training
    duration = "train_time > args.exit_duration_in_mins"
    for function in (training.evaluate, training.checkpoint_and_decide_exit):
        assert duration in source(function) and "(time.time() - _TRAIN_START_TIME) / 60.0" in source(function)
    loop = re.sub(r"\s+", " ", source(training.train))
    returned = "loss_dict, skipped_iter, should_checkpoint, should_exit, exit_code, grad_norm, num_zeros_in_grad,"
    assert returned in loop and ") = train_step(" in loop and "iteration=iteration" in loop
    assert "if (iteration + 1) in args.iterations_to_skip" in loop
    assert "args.curr_iteration = iteration" in loop
    assert "sys.exit(exit_code)" in loop
    assert "build_pretraining_data_loader(" in source(training.build_train_valid_test_data_loaders)
    assert "save_checkpoint(" in source(training.save_checkpoint_and_time)
    saving = source(checkpointing.save_checkpoint)
    saved, moved = saving.index("dist_checkpointing.save("), saving.index("with maybe_msc.open(tracker_filename, 'w')")
    finalized = saving.index("async_save_request.add_finalize_fn(iter_finalize_fn)")
    assert saved < moved < finalized < saving.index("schedule_async_save(async_save_request)")


def test_model_gpt() -> None:
    """megagate/model/gpt.py makes the spec of a stage; pretrain/batch.py makes its plan for the overlapped schedule."""
    assert "transformer_layer_spec(self._model_config, vp_stage=vp_stage)" in source(GPTModelBuilder.build_model)
    assert "return_schedule_plan=True" in source(combined_1f1b.combined_forward_backward_step)
    assert list(inspect.signature(GPTModel.build_schedule_plan).parameters)[1:4] == [
        "input_ids",
        "position_ids",
        "attention_mask",
    ]


def test_checkpoint_background() -> None:
    """What megagate/checkpoint/background.py looks after is started by these names."""
    caller = async_utils.PersistentAsyncCaller
    assert "target=PersistentAsyncCaller.async_loop" in source(caller._get_process)
    assert "PersistentAsyncCaller._persistent_process = None" in source(caller.close)
    assert "init_persistent_async_worker(args.rank, 'forkserver')" in source(
        megatron.training.initialize.initialize_megatron
    )
    assert source(filesystem_async.get_write_results_queue).count("_results_queue") >= 4
    assert "get_write_results_queue()" in source(filesystem_async.FileSystemWriterAsync.prepare_write_data)
    assert 'async_modules["get_write_results_queue"]' in source(training_async.init_persistent_async_worker)


def test_pretrain_gate_checks() -> None:
    """megagate/pretrain/gate_checks.py refuses what is wrong for now: see whether it still is."""
    forward = source(Attention.forward)
    assert forward.index("self.config.flash_decode:") < forward.index("return output, bias")
    assert forward.index("return output, bias") < forward.index("self._apply_output_gate(")
    assert "gate" not in source(SelfAttention._clip_linear_qkv)
    assert "self.scale_mode" in source(AdaptiveMuon)  # what Megatron's subclass never sets
    assert "self.scale_mode" not in source(TensorParallelAdaptiveMuon) + source(TensorParallelMuon)
    assert "if config.bf16:" in source(LayerWiseDistributedOptimizer.__init__)
    # Of the fused rotary embedding of whole linear_qkv outputs there is no flag.
    parser = megatron_arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    assert "--fused-single-qkv-rope" not in parser._option_string_actions


def test_platform_cpu() -> None:
    """megagate/platform/cpu.py: where Megatron asks for CUDA, and torch's table of tensor factories."""
    assert "allow_no_cuda" in parameters(megatron.training.initialize.initialize_megatron)
    assert hasattr(megatron.training.training, "initialize_megatron")
    assert callable(torch.utils._device._device_constructors)


@pytest.mark.parametrize("name", torch_adam.MENDS)
def test_checkpoint_torch_adam(name: str) -> None:
    """megagate/checkpoint/torch_adam.py wraps these methods."""
    owner, _ = torch_adam.MENDS[name]
    assert callable(vars(owner)[name])


def test_data_tokenizer() -> None:
    text_to_ids = {
        SentencePieceTokenizer: "self.tokenizer.encode_as_ids(text)",
        HuggingFaceTokenizer: "self.tokenizer(text).input_ids",
        TikTokenTokenizer: 'self.tokenizer.encode(text, allowed_special="all")',
    }
    for wrapper, call in text_to_ids.items():
        assert call in inspect.getsource(wrapper), wrapper
    assert "self._tokenizer.text_to_ids(text)" in inspect.getsource(MegatronTokenizerText.tokenize)


def test_index_file(tmp_path: Path) -> None:
    """megagate/data/index_file.py writes what Megatron's builder writes of documents of one sequence."""
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    for length in (3, 1, 0, 7):
        builder.add_document(np.arange(length), [length])
    builder.finalize(str(tmp_path / "a.idx"))
    with open(tmp_path / "b.idx", "wb") as file:
        write_index_of_lengths(file, DType.code_from_dtype(np.uint16), np.array([3, 1, 0, 7], np.int32))
    assert (tmp_path / "a.idx").read_bytes() == (tmp_path / "b.idx").read_bytes()


def test_checkpoint_torch_dist(tmp_path: Path) -> None:
    """megagate/checkpoint/torch_dist.py writes torch's format and leaves the checksums out, which torch never reads."""
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION

    assert CURRENT_DCP_VERSION == "1.0.0"
    writer = TensorWriter(tmp_path)
    writer.write("stacked", torch.ones(2, 3), 1, 2)
    writer.write("stacked", torch.zeros(2, 3), 0, 2)
    writer.close()
    state = {"stacked": torch.full((2, 2, 3), 5.0)}
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["stacked"].tolist() == [[[0.0] * 3] * 2, [[1.0] * 3] * 2]
    assert "ShardedObject(" in source(load_common_state_dict) and '"common_state"' in source(load_common_state_dict)


def test_checkpoint_names_and_warm_start() -> None:
    """megagate/checkpoint/names.py replaces functions where Megatron looks them up; warm_start.py makes shards."""
    assert "dist_checkpointing.load(" in source(checkpointing._load_global_dist_base_checkpoint)
    assert checkpointing.dist_checkpointing is megatron.core.dist_checkpointing
    module = "from megatron.core.dist_checkpointing.gpt_checkpoint_interop import"
    assert f"{module} gpt_compatible_layer_maps" in source(checkpointing._maybe_setup_gpt_to_hybrid_load)
    loading = source(checkpointing.load_checkpoint)
    assert "retarget_sharded_state_dict_to_gpt_checkpoint(sub_sd, gpt_compat_layer_maps)" in loading
    assert module in loading
    assert "(not args.finetune or gpt_compat_load_optim)" in loading  # why fit.py sets no_load_optim
    fields = {field.name for field in dataclasses.fields(gpt_checkpoint_interop.GPTCompatLayerMaps)}
    assert fields == {"attention_to_gpt", "mlp_to_gpt", "fresh_init", "num_gpt_layers"}
    fused = set(get_gpt_layer_local_submodules().sharded_state_dict_keys_map.items())
    assert fused < set(NORM_NAMES)
    assert set(NORM_NAMES) - fused == {("input_layernorm.", "self_attention.in_proj.layer_norm_")}
    assert "in_proj=TELayerNormColumnParallelLinear" in source(hybrid_layer_specs)
    names = [field.name for field in dataclasses.fields(ShardedTensorFactory)]
    assert names[:5] == ["key", "data", "build_fn", "merge_fn", "replica_id"]
    assert {"key", "data", "rank_offsets", "replica_id", "prepend_axis_num"} <= parameters(
        ShardedTensor.from_rank_offsets
    )


def test_datasets() -> None:
    """megagate/pretrain/checked_datasets.py builds the index cache, and drops what only the building of it reads."""
    building = source(GPTDataset._build_document_sample_shuffle_indices)
    epoch = source(GPTDataset._get_num_tokens_per_epoch)
    uses = building.count("self.indices") + epoch.count("self.indices")
    assert source(GPTDataset).count("self.indices") == uses == 2
    for name in ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy"):
        assert f'get_path_to("{name}")' in building


def test_plan() -> None:
    """megagate/plan reads Megatron's layout of buffers, and lets it set up a model for a process group that is not."""
    from megatron.core.optimizer.param_layout import BufferKey, PerBufferParamLayout
    from megatron.training.models import dist_utils

    assert {"params", "bucket_size", "data_parallel_world_size", "ddp_config"} <= parameters(
        DistributedOptimizer.compute_full_param_layout
    )
    assert "is_expert_parallel" in {field.name for field in dataclasses.fields(BufferKey)}
    assert {"param_index_map", "bucket_indices"} <= {field.name for field in dataclasses.fields(PerBufferParamLayout)}
    wrapping = source(dist_utils)
    assert "max(40000000, 1000000 * pg_collection.dp_cp.size())" in wrapping
    assert "if disable_bucketing or pp_rank > 0" in wrapping
    assert "if args.fake_process_group:" in source(megatron.training.initialize)
    assert "self.start_param_sync_for_bucket_group_subset()" in source(DistributedOptimizer)


def test_reading() -> None:
    """megagate/pretrain/checked_datasets.py asks for the pages of a sample; what is read is tested there."""
    assert "_MMapBinReader(" in source(IndexedDataset.initialize)
    assert "numpy.memmap(self._bin_file_reader" in source(_MMapBinReader.__init__)


def test_fill_in_the_middle() -> None:
    """megagate/pretrain/fim.py gives each sample a generator of its own."""
    drawing = source(GPTFIMDataset).count("self.np_rng.")
    assert drawing == source(GPTFIMDataset._permute).count("self.np_rng.") + 1
    assert "self._fim_split_and_permute_sequence(" in source(GPTFIMDataset._query_document_sample_shuffle_indices)


def test_sampler() -> None:
    """megagate/pretrain/sampler.py stands for the random sampler."""
    made = {"dataset", "total_samples", "consumed_samples", "micro_batch_size", "data_parallel_rank"}
    made |= {"data_parallel_size", "data_sharding"}
    assert parameters(data_samplers.MegatronPretrainingRandomSampler) == parameters(CyclicSampler) == made
    assert "MegatronPretrainingRandomSampler(" in source(data_samplers.build_pretraining_data_loader)


def test_validation() -> None:
    """megagate/pretrain/validation.py stands for the sampler of whole validation sets, and says how many batches."""
    made = {"total_samples", "data_parallel_rank", "data_parallel_size"}
    assert parameters(data_samplers.MegatronFullValidationSampler) == parameters(WholeSetSampler) == made
    loaders = source(data_samplers.build_pretraining_data_loader)
    assert "if split == Split.valid and args.full_validation:\n        batch_sampler = MegatronFull" in loaders
    loop = megatron.training.training
    iterators = source(loop.build_train_valid_test_data_iterators)
    assert "local_eval_iters = [len(dl) for dl in valid_dataloaders]" in iterators
    assert "args.eval_iters = [None] * len(valid_dataloaders)" in iterators
    evaluation = source(loop.evaluate_and_print_results)
    assert "data_iterators = data_iterator if args.multiple_validation_sets else [data_iterator]" in evaluation
    assert "eval_iters = torch.tensor(args.eval_iters, dtype=torch.long, device='cuda')" in evaluation
    assert list(inspect.signature(loop.evaluate_and_print_results).parameters)[:3] == [
        "prefix",
        "forward_step_func",
        "data_iterator",
    ]
    assert "if idx is None:\n            loss_mask = torch.zeros_like(loss_mask)" in source(GPTDataset.__getitem__)


def test_byte_tokenizer() -> None:
    """megagate/pretrain/arguments.py has Megatron build it."""
    assert "build_tokenizer(args)" in source(global_vars._build_tokenizer)


def test_checkpoint_load() -> None:
    """megagate/checkpoint/load.py reads the arguments and the index of a distributed checkpoint."""
    assert parameters(load_common_state_dict) == {"checkpoint_dir"}
    for module, names in INDEX_CLASSES.items():
        assert all(hasattr(importlib.import_module(module), name) for name in names)


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("pretrain/arguments.py DEFAULTS", DEFAULTS),
        ("pretrain/arguments.py NOT_AVAILABLE", NOT_AVAILABLE),
        ("pretrain/gate_checks.py IN_THE_WAY", IN_THE_WAY),
        ("platform/cpu.py ARGUMENTS", cpu.ARGUMENTS),
        (
            "pretrain/backend.py WITHOUT_FP8",
            set(WITHOUT_FP8) - {"fp8_dot_product_attention", "fp8_multi_head_attention"},
        ),
        ("model/backends/torch_backend.py ARGUMENTS", torch_backend.ARGUMENTS),
        ("checkpoint/fit.py MODEL_ARGUMENTS", MODEL_ARGUMENTS),
        ("checkpoint/fit.py CONTEXT_ARGUMENTS", CONTEXT_ARGUMENTS),
    ],
)
def test_arguments_exist(table: str, names: Any) -> None:
    """A renamed argument would turn a default or a refusal into nothing."""
    parser = megatron_arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    destinations = {action.dest for action in parser._actions}
    assert set(names) <= destinations, table


def test_evaluate_decoder_and_sampling() -> None:
    """The decoder gives the attention a cache of all keys before the rotary embedding, and one mask for all layers."""
    context = StaticInferenceContext(2, 8)
    assert context.sequence_len_offset == 0 and not context.key_value_memory_dict
    context.increment_sequence_len_offset(3)
    assert context.sequence_len_offset == 3
    adjust = source(Attention._adjust_key_value_for_inference)
    assert "key = inference_key_memory[:sequence_end, batch_start:batch_end, ...]" in adjust
    forward = source(Attention.forward)
    assert forward.index("_adjust_key_value_for_inference(") < forward.index("apply_rotary_pos_emb(")
    assert 'raise NotImplementedError("GDN does not support inference' in source(gated_delta_net.GatedDeltaNet.forward)
    assert {"temperature", "top_k", "top_p"} <= parameters(TorchSampling.filter_logits)


def test_telemetry() -> None:
    """megagate/telemetry hangs on modules and on functions of the training loop by what they are called with."""
    training = megatron.training.training
    loop = source(training.train)
    assert "= train_step(" in loop
    assert "iteration=iteration," in loop
    assert "report_memory_flag = training_log(" in loop
    assert list(inspect.signature(training.training_log).parameters)[3] == "iteration"
    assert "print_rank_last(log_string)" in source(training.training_log)
    assert "] iteration" in re.sub(r"f?['\"]|\n *log_string \+= ", "", source(training.training_log))
    run = re.sub(r"\s+", " ", source(Attention._run_core_attention))
    assert re.search(r"core_attention\)?\( query, key, value, attention_mask,", run), run
    assert "self.routing(logits, padding_mask=padding_mask)" in source(TopKRouter.forward)
    assert torch._C._current_graph_task_id() == -1
    timers = Timers(log_level=1, log_option="max")
    assert {"_log_level", "_timers", "_log_levels"} <= vars(timers).keys()
    timers("shown", log_level=1).start()
    timers("hidden", log_level=2).start()
    assert timers._timers.keys() == {"shown"}
    assert timers._timers["shown"]._started
    assert "self._file_name = " in source(EventFileWriter.__init__)
    assert "self.event_writer = EventFileWriter(" in source(SummaryFileWriter.__init__)

"""Private names in compat/ exist, with the parameters that the library uses, and phases of hangs.

Names that an import statement reaches need no entry: importing their file fails."""

import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_template
from dist_template.compat import stacks
from tests.support import house

COMPAT = Path(dist_template.__file__).parent / "compat"
FILES = """lightning torch deepspeed transformers torchrun lightning_cli fake_tensors recording
    published pipelining monitors""".split()

# The first part of a place stands for a package.
SHORT = {"L": "lightning.pytorch", "F": "lightning.fabric", "D": "torch.distributed"}
SHORT |= {"Z": "deepspeed", "H": "transformers", "E": "torch.distributed.elastic"}
SHORT |= {"C": "lightning.pytorch.trainer.connectors", "M": "transformers.core_model_loading"}
SHORT |= {"P": "lightning.fabric.strategies.launchers.subprocess_script"}
SHORT |= {"S": "transformers.distributed.sharding_utils", "O": "deepspeed.runtime.zero"}
# "module:object.attribute" of a function -> its parameters
FUNCTIONS = {
    "L.loops.fit_loop:_FitLoop._should_accumulate": "self",
    "L.loops.training_epoch_loop:_TrainingEpochLoop._should_check_val_fx": "self data_fetcher",
    "L.loops.training_epoch_loop:_TrainingEpochLoop._broadcast_sigterm_tensor": "self",
    "C.signal_connector:_SignalConnector.register_signal_handlers": "self",
    "C.checkpoint_connector:_CheckpointConnector.dump_checkpoint": "self weights_only",
    "F.utilities.distributed:_set_num_threads_if_needed": "num_processes",
    "L.strategies:ModelParallelStrategy._setup_distributed": "self",
    "L.strategies:DeepSpeedStrategy._init_deepspeed_distributed": "self",
    "L.strategies:DeepSpeedStrategy._init_optimizers": "self",
    "L.strategies:DeepSpeedStrategy._initialize_deepspeed_train": "self model",
    "L.core.optimizer:_init_optimizers_and_lr_schedulers": "model",
    "L.loops.training_epoch_loop:_TrainingEpochLoop._get_monitor_value": "self key",
    "L.callbacks:EarlyStopping._validate_condition_metric": "self logs",
    "L.callbacks:ModelCheckpoint._save_topk_checkpoint": "self trainer monitor_candidates",
    "C.data_connector:_resolve_overfit_batches": "combined_loader mode",
    "C.logger_connector.logger_connector:_LoggerConnector.log_metrics": "self metrics step",
    "L:LightningModule.configure_gradient_clipping": "self optimizer gradient_clip_val "
    "gradient_clip_algorithm",
    "L.plugins.precision:DeepSpeedPrecision._clip_gradients": "self model optimizer clip_val "
    "gradient_clip_algorithm",
    "P:_ChildProcessObserver": "main_pid child_processes sleep_period",
    "P:_ChildProcessObserver._terminate_all": "self",
    "jsonargparse._typehints:ActionTypeHint._check_type": "self value append cfg mode",
    "jsonargparse._typehints:adapt_class_type": "value serialize instantiate_classes sub_add_kwargs"
    " prev_val partial_skip_args typehint",
    "L.cli:LightningCLI._get": "self config key default",
    "L.cli:LightningCLI._dump_config": "self",
    "L.cli:LightningCLI._parser": "self subcommand",
    "L.cli:LightningCLI._parse_ckpt_path": "self",
    "argparse:ArgumentParser._get_formatter": "self",
    "E.agent.server.local_elastic_agent:LocalElasticAgent._monitor_workers": "self worker_group",
    "E.agent.server.local_elastic_agent:LocalElasticAgent._shutdown": "self death_sig timeout",
    "E.multiprocessing.api:_terminate_process_handler": "signum frame",
    "D.checkpoint.state_dict_loader:_load_state_dict": "state_dict storage_reader process_group "
    "coordinator_rank no_dist planner",
    "D.checkpoint:FileSystemReader._get_metadata_path": "self rank",
    "D.distributed_c10d:_set_pg_timeout": "timeout group",
    "D.distributed_c10d:_get_default_store": "",
    "D.fsdp._fully_shard._fsdp_state:FSDPState._root_post_backward_final_callback": "self",
    "D.pipelining._backward:stage_backward_input": "stage_outputs_or_loss output_grads input_values"
    " weights",
    "D.pipelining._backward:construct_reverse_graph": "roots",
    "D.pipelining._backward:reverse_closure": "roots target_nodes reverse_edges_dict",
    "D.pipelining._backward:_get_grad_fn_or_grad_acc": "t",
    "D.pipelining:PipelineStage._setup_forward_recv_info": "self num_microbatches has_backward",
    "D.pipelining:PipelineStage._setup_backward_recv_info": "self num_microbatches",
    "D.pipelining:PipelineStage.backward_maybe_with_nosync": "self backward_type bwd_kwargs"
    " last_backward",
    "torch.utils.data.dataloader:_BaseDataLoaderIter._next_data": "self",
    "torch.amp:GradScaler._get_scale_async": "self",
    "torch.utils._pytree:tree_map": "func tree rests is_leaf",
    "torch.utils._pytree:tree_leaves": "tree is_leaf",
    "Z.runtime.engine:DeepSpeedEngine._copy_recovery_script": "self save_path",
    "Z.runtime.engine:DeepSpeedEngine._start_timers": "self timer_names",
    "Z.runtime.engine:DeepSpeedEngine._stop_timers": "self timer_names",
    "O.stage_1_and_2:DeepSpeedZeroOptimizer._update_scale": "self has_overflow",
    "O.stage3:DeepSpeedZeroOptimizer_Stage3._update_scale": "self has_overflow",
    "O.stage_1_and_2:DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state": "self",
    "H.masking_utils:find_packed_sequence_indices": "position_ids",
    "H.integrations.moe:_grouped_mm": "input weight offs",
    "S:DtensorShardOperation": "param",
    "S:DtensorShardOperation.shard_tensor": "self source tensor_idx device dtype",
    "S:DtensorShardOperation._slice_and_cat": "self source intervals device dtype",
    "S:DtensorShardOperation._get_sub_mesh": "self mesh_dim",
    "H.modeling_utils:get_torch_context_manager_or_global_device": "",
    "M:rename_source_key": "source_key weight_renamings weight_converters base_model_prefix "
    "meta_state_dict reverse",
    "M:convert_and_load_state_dict_in_model": "model state_dict load_config disk_offload_index",
    "M:revert_weight_conversion": "model state_dict",
    "M:build_glob_alternation": "globs",
    "H.modeling_utils:remove_tied_weights_from_state_dict": "state_dict model",
    "H.modeling_utils:PreTrainedModel._get_dtype_plan": "self dtype",
    "D.device_mesh:DeviceMesh._get_root_mesh": "self",
    "torch.nn.init:_no_grad_trunc_normal_": "tensor mean std a b generator",
    "torch.nn.init:orthogonal_": "tensor gain generator",
    "torch.nn.init:sparse_": "tensor sparsity std generator",
    "H.distributed.mixin:apply_fully_sharded_data_parallelism": "model mesh_manager fsdp_plan "
    "ep_plan",
}

# "module:class" or "module" -> what its source reads or sets
ATTRIBUTES = {
    "L:Trainer": "_signal_connector _checkpoint_connector _logger_connector _evaluation_loop",
    "L.loops.evaluation_loop:_EvaluationLoop": "_results _logged_outputs _has_run",
    "L.loops.training_epoch_loop:_TrainingEpochLoop": "batch_progress",
    "L.trainer.setup": "_val_check_time_interval",
    "L.loops.fit_loop:_FitLoop": "_data_fetcher",
    "L.strategies:DDPStrategy": "_ddp_kwargs _timeout",
    "L.strategies:ModelParallelStrategy": "_device_mesh _process_group_backend _timeout",
    "L.strategies:DeepSpeedStrategy": "_config_initialized _timeout",
    "L.plugins.precision:DeepSpeedPrecision": "_desired_dtype",
    "L.core.optimizer:LightningOptimizer": "_optimizer",
    "P:_ChildProcessObserver": "_child_processes",
    "L.loggers:WandbLogger": "_wandb_init _experiment",
    "L.loggers:TensorBoardLogger": "_log_graph",
    "argparse:ArgumentParser": "_actions",
    "jsonargparse._typehints": "_typehint",
    "E.agent.server.local_elastic_agent:LocalElasticAgent": "_pcontext",
    "E.agent.server.api:SimpleElasticAgent": "_remaining_restarts _shutdown_timeout",
    "D.launcher.api": "LocalElasticAgent",
    "E.multiprocessing.subprocess_handler.subprocess_handler": "Popen",
    "torch.optim:Optimizer": "_optimizer_step_pre_hooks _optimizer_step_post_hooks hooked",
    "torch.optim.optimizer": "_global_optimizer_pre_hooks _global_optimizer_post_hooks",
    "torch.optim.lr_scheduler:LRScheduler": "_wrapped_by_lr_sched _opt_called",
    "torch.optim": "_muon",
    "torch.optim._muon": "_zeropower_via_newtonschulz _adjust_lr",
    "torch.autograd": "_profiler_enabled",
    "torch.amp:GradScaler": "_per_optimizer_states found_inf_per_device",
    "torch.nn.init:orthogonal_": "is_meta",
    "torch.nn:Module": "_non_persistent_buffers_set",
    "torch.nn:RNNBase": "_flat_weight_refs",
    "D.distributed_c10d": "_world pg_map",
    "D.fsdp._fully_shard._fsdp_state:FSDPState": "_state_ctx _fsdp_param_groups",
    "torch._dynamo.config": "skip_fwd_side_effects_in_bwd_under_checkpoint",
    "Z.comm.torch": "__compatible_ops__",
    "O.partition_parameters": "linear_bk",
    "Z.runtime.torch_autocast": "TORCH_AUTOCAST_INITIALIZED",
    "L.utilities.combined_loader:CombinedLoader": "_mode",
    "O.parameter_offload": "fwd_pre_hook get_param_coordinator",
    "Z.utils.tensor_fragment": "_hp_mapping lp_fragment_address",
    "O.stage_1_and_2": "_hp_optimizer_states_linked",
    "H.configuration_utils": "_attn_implementation _experts_implementation",
    "H.integrations.moe": "use_experts_implementation",
    "H.models.llama4.modeling_llama4": "attn_temperature_tuning use_rope floor_scale attn_scale"
    " eager_attention_forward",
    "H.modeling_utils": "_keys_to_ignore_on_save _from_config _no_split_modules _init_weights",
    "H.modeling_utils:PreTrainedModel": "_supports_attention_backend _supports_sdpa _is_stateful",
    "H.distributed.fsdp": "CPUOffloadPolicy",
    "peft.tuners.tuners_utils:BaseTunerLayer": "_disable_adapters",
}
# Checked by importing compat/torch.py, and built-in attributes of tensors.
IMPORTED = {"_optimizer", "_dynamo", "_pytree", "_version", "_EmptyStateDictLoadPlanner"}
IMPORTED |= {"_subclasses", "_python_dispatch", "_schema", "_getframe"}


def found(place: str) -> Any:
    module, _, path = place.partition(":")
    first, dot, rest = module.partition(".")
    one: Any = import_module(SHORT.get(first, first) + dot + rest)
    for name in filter(None, path.split(".")):
        one = getattr(one, name)
    return one


@pytest.mark.parametrize("place", FUNCTIONS)
def test_the_function_is_there_with_its_parameters(place: str) -> None:
    assert " ".join(inspect.signature(found(place)).parameters) == FUNCTIONS[place]


@pytest.mark.parametrize("place", ATTRIBUTES)
def test_the_attributes_are_there(place: str) -> None:
    source = inspect.getsource(found(place))
    for name in ATTRIBUTES[place].split():
        assert re.search(rf"\b{name}\b", source), name


@pytest.mark.parametrize("file", FILES)
def test_every_private_name_of_the_file_is_checked_here(file: str) -> None:
    listed = set(IMPORTED)
    for place in FUNCTIONS:
        listed.update(re.split(r"[.:]", place))
    for names in ATTRIBUTES.values():
        listed.update(names.split())
    used = set[str]()
    for line in house.private_names(COMPAT / f"{file}.py"):
        dotted = line.split(": ")[1]
        used.update(part for part in dotted.split(".") if house.is_private(part))
    assert [name for name in used - listed if not hasattr(torch.ops.aten, name)] == []


LIBRARIES = [find_spec(name) for name in ("torch", "lightning.pytorch", "deepspeed")]
FOLDERS = [Path(str(spec.origin)).parent for spec in LIBRARIES if spec]
FOLDERS += [COMPAT]
KNOWN = [(part, function) for part, function, _ in stacks.PHASES if part[:1] != "<"]


def sources(part: str) -> list[Path]:
    name = f"/{part.strip('/')}"
    return [path for each in FOLDERS for path in each.rglob("*.py") if name in f"{path}"]


@pytest.mark.parametrize(("part", "function"), KNOWN)
def test_a_phases_function_is_there(part: str, function: str) -> None:
    """Functions without a file are hooks of Lightning."""
    defined = re.compile(rf"^ *def {function or '[a-z_]+'}\(", re.MULTILINE)
    files = sources(part or "lightning/pytorch/")
    assert any(defined.search(file.read_text(encoding="utf-8")) for file in files)


def test_the_places_where_a_rank_waits_are_there() -> None:
    assert [part for part in stacks.WAITING if not sources(part)] == []

"""A checkpoint in any format is read whole by one process, runs nothing, and is exported."""

import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dist_template import InputError
from dist_template.checkpoint import formats
from dist_template.checkpoint.formats import read_full
from dist_template.checkpoint.optimizer import by_name, numbered
from dist_template.checkpoint.plain_types import TYPE
from dist_template.checkpoint.stored import flat_range
from dist_template.text.model.quantize import quantize
from dist_template.wings.ship.export import command as export
from tests.support import pairs
from tests.support.parity import MODELS
from tests.support.runs import OURS, SMALL_LLAMA, newest, only_run, refused, run

REST = {"global_step": 2, "loops": {"fit_loop": {}}, "DataModule": {"consumed_samples": 16}}
# Of the two parameter groups; their order is not the model's.
NAMES = [["second.weight", "first.weight"], ["first.bias", "second.bias"]]
RANKS = 2


class Tiny(nn.Module):
    """Odd sizes, so that no number of ranks divides them, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 7)
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.register_buffer("counts", torch.arange(3))


class Trained(NamedTuple):
    model: Tiny
    optimizer: torch.optim.AdamW

    @property
    def state(self) -> Any:
        """The optimizer's state by parameter name."""
        return by_name(self.optimizer.state_dict(), sum(NAMES, []))


@pytest.fixture
def trained() -> Trained:
    """A model and its optimizer, fused as in training, after two steps."""
    torch.manual_seed(0)
    model = Tiny()
    parameters = dict(model.named_parameters())
    groups: Any = [{"params": [parameters[name] for name in group]} for group in NAMES]
    groups[1]["weight_decay"] = 0.0
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        model.second(model.first(torch.ones(2, 3))).square().sum().backward()
        optimizer.step()
    return Trained(model, optimizer)


def write_file(path: Path, trained: Trained) -> None:
    states: Any = {"optimizer_states": [trained.optimizer.state_dict()]}
    states["parameter_names"] = [sum(NAMES, [])]
    torch.save({"state_dict": trained.model.state_dict(), **states, **REST}, path / formats.FILE)


def write_distributed(path: Path, trained: Trained) -> None:
    """As MeshStrategy does: torch's flattened optimizer state, and Lightning's rest in meta.pt."""
    flat: dict[str, Any] = {}
    for name, values in trained.state["state"].items():
        flat |= {f"state.{name}.{key}": value for key, value in values.items()}
    for group in trained.state["param_groups"]:
        for name in group["params"]:
            settings = {f"param_groups.{name}.{key}": value for key, value in group.items()}
            settings.pop(f"param_groups.{name}.params")
            flat |= settings
    tensors = {"state_dict": trained.model.state_dict(), "optimizer_0": flat}
    dcp.save(tensors, checkpoint_id=path, no_dist=True)
    torch.save(REST, path / "meta.pt")


def partitions(tensors: list[Tensor], stage: int) -> list[Tensor]:
    """Each rank's: ZeRO-1 and 2 shard a group's flat tensor, ZeRO-3 each parameter, padded."""
    flats = [tensor.detach().flatten() for tensor in tensors]
    if stage < 3:
        flat = torch.cat(flats)
        return list(pad(flat, (0, -len(flat) % (2 * RANKS))).chunk(RANKS))
    padded = [pad(flat, (0, -len(flat) % RANKS)).chunk(RANKS) for flat in flats]
    return [torch.cat(of_rank) for of_rank in zip(*padded, strict=True)]


def write_zero(path: Path, trained: Trained, stage: int) -> None:
    weights, state = dict(trained.model.named_parameters()), trained.state
    module = dict(trained.model.state_dict())
    frozen = weights.pop("frozen").detach()
    for name, weight in weights.items():
        module[name] = torch.empty(0) if stage == 3 else weight.detach().to(torch.bfloat16)
    shapes = [{name: weights[name].shape for name in group} for group in NAMES]
    model: Any = {"module": module, "buffer_names": ["counts"], "param_shapes": shapes}
    model |= {"shared_params": {}, **REST}
    groups = [g | {"params": [number]} for number, g in enumerate(state["param_groups"])]
    (path / "checkpoint").mkdir(parents=True)
    (path / "latest").write_text("checkpoint")
    for rank in range(RANKS):
        flat: dict[int, dict[str, Tensor]] = {}
        for number, group in enumerate(NAMES):
            flat[number] = {"step": torch.tensor(2.0)}
            for kind in ("exp_avg", "exp_avg_sq"):
                moments = [state["state"][name][kind] for name in group]
                flat[number][kind] = partitions(moments, stage)[rank]
        base = {"state": flat, "param_groups": groups}
        fp32 = [partitions([weights[name] for name in group], stage)[rank] for group in NAMES]
        own = {"fp32_flat_groups": fp32, "optimizer_state_dict": base, "partition_count": RANKS}
        file = name = f"zero_pp_rank_{rank}_mp_rank_00"
        if stage < 3:
            own = {"single_partition_of_fp32_groups": fp32, "base_optimizer_state": base}
            own["partition_count"] = [RANKS, 1]
            file = "mp_rank_00"
        torch.save({"optimizer_state_dict": own}, path / f"checkpoint/{name}_optim_states.pt")
        if stage == 3:
            model["frozen_param_shapes"] = {"frozen": frozen.shape}
            model["frozen_param_fragments"] = {"frozen": partitions([frozen], stage)[rank]}
        torch.save(model, path / f"checkpoint/{file}_model_states.pt")


WRITERS: Any = {"file": write_file, "distributed": write_distributed}
WRITERS |= {f"zero{stage}": partial(write_zero, stage=stage) for stage in (2, 3)}


@pytest.fixture(params=WRITERS)
def checkpoint(request: pytest.FixtureRequest, trained: Trained, tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    path.mkdir()
    WRITERS[request.param](path, trained)
    return path


def test_every_format_reads_as_the_same_state(checkpoint: Path, trained: Trained) -> None:
    full = read_full(checkpoint)
    assert {key: full[key] for key in REST} == REST
    for name, tensor in trained.model.state_dict().items():
        read = full["state_dict"][name]
        assert torch.equal(read, tensor) and read.dtype == tensor.dtype, name
    (state,) = full["optimizer_states"]
    back = numbered(state, NAMES, trained.optimizer.param_groups)
    expected = trained.optimizer.state_dict()
    assert [g["params"] for g in back["param_groups"]] == [[0, 1], [2, 3]]
    assert [g["weight_decay"] for g in back["param_groups"]] == [0.1, 0.0]
    for number, values in expected["state"].items():
        for key, value in values.items():
            assert torch.equal(back["state"][number][key], value), (number, key)


def test_slices_are_those_of_the_full_tensor(checkpoint: Path, trained: Trained) -> None:
    """Of rows and columns, as a rank's shard has, and of the flattened tensor, as ZeRO-3's has."""
    found = formats.format_of(checkpoint)
    assert found is not None
    stored = found.read(checkpoint, True)
    moments = stored["optimizer_states"][0]["state"]["second.weight"]["exp_avg"]
    full = trained.state["state"]["second.weight"]["exp_avg"]
    assert torch.equal(moments[2:6, 1:3], full[2:6, 1:3])
    for name, tensor in trained.model.state_dict().items():
        last, read = tensor.numel() - 1, stored["state_dict"][name]
        assert torch.equal(read[1:3], tensor[1:3]) and read[0:0].numel() == 0, name
        assert torch.equal(flat_range(read, 2, last), tensor.flatten()[2:last]), name
        assert torch.equal(flat_range(read, last, last + 9), tensor.flatten()[last:]), name


def test_a_header_has_the_shapes_and_the_entries_of_the_whole(checkpoint: Path) -> None:
    """They are compared with the module's before anything is loaded."""
    found, full = formats.format_of(checkpoint), read_full(checkpoint)
    assert found is not None
    metadata, shapes = found.header(checkpoint, None)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in full["state_dict"].items()}
    assert {key: metadata[key] for key in REST} == REST
    assert not {"state_dict", "optimizer_states", "module", "optimizer"} & metadata.keys()


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_checkpoint_runs(checkpoint: Path, tmp_path: Path) -> None:
    proof = tmp_path / "it ran"
    for file in (*checkpoint.rglob("*.pt"), *checkpoint.glob(".metadata")):
        before = file.read_bytes()
        if file.name == ".metadata":
            file.write_bytes(pickle.dumps(Touch(proof)))
        else:
            torch.save(torch.load(file) | {"more": Touch(proof)}, file)
        with pytest.raises(InputError, match="cannot be read"):
            read_full(checkpoint)
        assert not proof.exists(), file.name
        file.write_bytes(before)
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    read_full(checkpoint)


def itself() -> list[Any]:
    """A list that contains itself, which a pickle can say."""
    found: list[Any] = []
    found.append(found)
    return found


# Entries of another type than Lightning writes; a callback or Lightning failed on them.
WRONG_ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "version of codes": ({"pytorch-lightning_version": "\x1b[2J"}, r"version is '\\x1b\[2J'"),
    "version of a list": ({"pytorch-lightning_version": [1]}, "version is a list, and not a str"),
    "step of a text": ({"global_step": "x"}, "its global_step is a str, and not a int"),
    "loops of a number": ({"loops": 3}, "its loops is a int, and not a dict"),
    "loop of a number": ({"loops": {"fit_loop": 3}}, "its loops have a int in place of a state"),
    "callbacks of a list": ({"callbacks": [1]}, "its callbacks is a list"),
    "callback of a text": ({"callbacks": {"X": "x"}}, "its callbacks have a str in place"),
    "schedules of a text": ({"lr_schedulers": "x"}, "its lr_schedulers is a str"),
    "optimizer of a number": ({"optimizer_states": [3]}, "optimizer_states have a int in place"),
    "groups of a number": (
        {"optimizer_states": [{"state": {}, "param_groups": 4}]}, "no states and groups"
    ),
    "an entry in itself": ({"x": itself()}, "it contains itself, or has too many levels"),
    "sparse weights": (
        {"state_dict": {"a": torch.eye(3).to_sparse()}}, "has a as torch.sparse_coo"
    ),
    "a time that is none": (
        {"x": {TYPE: "timedelta", "value": "abc"}}, "a timedelta in it cannot be read"
    ),
    "texts of a terabyte": (
        {"x": {TYPE: "texts", "value": [["a"], "<U270000000000"]}}, "a texts in it cannot be read"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_ENTRIES)
def test_an_entry_of_another_type_is_named(name: str, tmp_path: Path) -> None:
    entries, sentence = WRONG_ENTRIES[name]
    file = tmp_path / "given.ckpt"
    torch.save({"state_dict": {"a": torch.zeros(1)}, "global_step": 1} | entries, file)
    with pytest.raises(InputError, match=sentence):
        read_full(file)


DEEPSEEK, TIED_LLAMA = MODELS["deepseek_v3"], SMALL_LLAMA[:-1] + ", tie_word_embeddings: true}"


@pytest.fixture
def quick(flags: list[str]) -> list[str]:
    return [*flags, "--trainer.max_steps=2", "--trainer.limit_val_batches=0"]


def exported(flags: list[str], output: Path, *more: str) -> Path:
    ours = [flag for flag in flags if not flag.startswith("--trainer.")]
    export.main(["export", *ours, "--checkpoint=last", f"--output={output}", *more], OURS)
    return output


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(60).view(2, 30)).logits


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [DEEPSEEK, TIED_LLAMA], ids=["moe", "tied"])
def test_the_exported_folder_gives_the_trained_modules_logits(
    quick: list[str], tmp_path: Path, capsys: Any, architecture: str
) -> None:
    """As anyone would load it, and from the checkpoint's own tensors by no code of ours."""
    quick = [*quick, f"--model.architecture={architecture}"]
    assert run("fit", *quick) == 0
    folder = exported(quick, tmp_path / "out")
    assert "100.0% of the greedy tokens equal\n" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(folder)
    trained = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    state = torch.load(newest(only_run(tmp_path)) / "checkpoint.pt")["state_dict"]
    trained.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    assert torch.equal(logits(model), logits(trained))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode([72, 105]) == "Hi"
    assert model.generation_config.eos_token_id == model.config.eos_token_id
    assert [p.name for p in tmp_path.glob("*out*")] == ["out"], "nothing unfinished is left"


@pytest.mark.slow
def test_a_reward_model_is_exported_as_a_class_of_transformers(tmp_path: Path, capfd: Any) -> None:
    """Its head is trained beside adapters, and saved with them."""
    flags = [*pairs.flags(tmp_path, pairs.LENGTHS), f"--run.root={tmp_path / 'runs'}"]
    flags += ["--data.seq_len=61", "--data.global_batch_size=2", "--data.micro_batch_size=1"]
    flags += ["--model.preference.loss=reward", f"--model.architecture={DEEPSEEK}"]
    flags += ["--model.adapter.rank=2", "--model.optim.learning_rate=0.05"]
    trainer = ["--trainer.accelerator=cpu", "--trainer.max_steps=2", "--trainer.logger=false"]
    assert run("fit", *flags, *trainer) == 0
    folder = exported(flags, tmp_path / "merged", "--adapter=merged", "--dtype=bfloat16")
    assert "pipeline_tag: text-classification" in (folder / "README.md").read_text()
    kind = transformers.AutoModelForSequenceClassification
    model: Any = kind.from_pretrained(folder, dtype="float32")
    state = torch.load(newest(only_run(tmp_path)) / "checkpoint.pt")["state_dict"]
    trained = state["model.score.weight"]
    assert torch.equal(model.score.weight, trained.bfloat16().float()) and model.num_labels == 1
    adapted = exported(flags, tmp_path / "peft")
    assert "largest difference to the trained model's logits" in capfd.readouterr().out
    saved = load_file(adapted / "adapter_model.safetensors")
    assert saved["base_model.model.score.weight"].equal(trained)
    error = refused("serve", [str(adapted), "--port=0"], capfd)
    assert "adapters of a reward model: give a folder of export --adapter merged" in error


ADAPTED = {  # the base, and flags
    "deepseek": (DEEPSEEK, "--model.adapter.targets=[q_a_proj, gate_up_proj, down_proj]"),
    "llama in 4 bits": (SMALL_LLAMA, "--model.adapter.quantize=nf4"),
    "tied llama": (TIED_LLAMA, "--model.adapter.trainable=[norm, embed_tokens]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADAPTED)
def test_adapter_and_merged_weights_are_equal(quick: list[str], tmp_path: Path, kind: str) -> None:
    from peft import PeftModel

    architecture, flag = ADAPTED[kind]
    base = tmp_path / "base"
    torch.manual_seed(1)
    fields = yaml.safe_load(architecture) | {"vocab_size": 257, "max_position_embeddings": 64}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(base)
    quick += [f"--model.pretrained={base}", "--model.adapter.targets=[q_proj, down_proj]"]
    quick += ["--model.optim.learning_rate=0.05", "--model.optim.warmup=0"]
    quick += ["--model.adapter.trainable=[norm]", flag]
    assert run("fit", *quick) == 0
    plain = AutoModelForCausalLM.from_pretrained(base).requires_grad_(False)
    if "nf4" in flag:
        quantize(plain)
    untrained = logits(plain)
    merged = exported(quick, tmp_path / "merged", "--adapter=merged")
    merged = logits(AutoModelForCausalLM.from_pretrained(merged))
    adapted = PeftModel.from_pretrained(plain, str(exported(quick, tmp_path / "peft")))
    assert (merged - untrained).abs().max() > 1e-3, "training must have changed something"
    assert torch.allclose(logits(adapted), merged, atol=1e-5)

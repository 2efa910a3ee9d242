"""A checkpoint of weights or of adapters is exported with the logits that were trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.support import pairs
from tests.support.library import quantize
from tests.support.parity import MODELS
from tests.support.runs import OURS, SMALL_LLAMA, newest, only_run, refused, run
from tests.support.wings import export

pytestmark = pytest.mark.slow
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

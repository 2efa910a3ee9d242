"""Help of every verb; how files and flags compose; configurations by name; folders of runs."""

import json
import re
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from dist_template.cli import config_file
from dist_template.cli.verbs import verbs
from dist_template.cluster import redaction
from dist_template.errors import InputError
from tests.support.runs import FIT_CONFIGS, PACKAGE, PROJECT, SHIPPED, logged, only_run, run, small


def shown(capsys: Any, *words: str | Path) -> str:
    """What a verb prints instead of its work, with --help or --print_config."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run(*map(str, words))
    shown = capsys.readouterr()
    assert stopped.value.code in (0, None), shown.err
    return shown.out


@pytest.mark.parametrize("verb", verbs())
def test_help_begins_with_the_verbs_own_flags(verb: str, capsys: Any) -> None:
    page = shown(capsys, verb, "--help")
    assert page.startswith(f"usage: python -m {PACKAGE} {verb} ")
    assert len(page.split("\n\n")[0].splitlines()) < 9, "the usage is short"
    assert verb == "fit" or len(page.splitlines()) < 50
    if verb in ("validate", "test", "predict", "prepare", "export", "rehearse"):
        rest = f"Every other key is fit's: see `python -m {PACKAGE} fit --help`"
        assert rest in " ".join(page.split())


def test_help_of_fit_has_sections_and_explains_every_knob_of_ours(capsys: Any) -> None:
    page = shown(capsys, "fit", "--help")
    _, _, sections = page.split("\n\n", 2)[1].partition(": ")
    assert {"trainer", "model", "data", "cluster", "numerics"} < set(sections.split())
    for part in page.split("\n  --"):
        name, _, text = part.partition("\n")
        explained = f"{name.partition(' ')[2]} {text}".partition("(type:")[0].split()
        is_ours = part.startswith(("data.", "model.", "run."))
        assert not is_ours or "help" in name or len(explained) > 3, f"no help: --{part}"
    for verb, section in (("fit", "run"), ("test", "model.optim"), ("prepare", "data")):
        keys = re.findall(r"^  --([\w.]+)", shown(capsys, verb, "--help", section), re.MULTILINE)
        assert len(keys) > 4 and all(f"{key}.".startswith(f"{section}.") for key in keys)


def parsed(capsys: Any, *flags: str | Path) -> Any:
    return yaml.safe_load(shown(capsys, "fit", *flags, "--print_config"))


@pytest.mark.parametrize("path", FIT_CONFIGS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_shipped_file_parses_and_stays_in_its_place(path: Path, capsys: Any) -> None:
    assert parsed(capsys, f"--config={path}")
    text, folder = path.read_text(), path.parent.name
    allowed = {"strategy": {"strategy"}}
    allowed["cluster"] = {"accelerator", "devices", "num_nodes", "precision"}
    if keys := allowed.get(folder):
        content = yaml.safe_load(text)
        assert set(content) - {folder} == {"trainer"} and set(content["trainer"]) <= keys
    assert text.startswith("# "), "the first line says what the file is for"
    assert folder != "strategy" or ("\n# When: " in text and "\n# Communication" in text)


def test_later_files_and_flags_win(tmp_path: Path, capsys: Any) -> None:
    for name, seq_len in (("a", 64), ("b", 128)):
        (tmp_path / f"{name}.yaml").write_text(f"data: {{seq_len: {seq_len}}}")
    both = [f"--config={tmp_path}/a.yaml", f"--config={tmp_path}/b.yaml"]
    assert parsed(capsys, *both)["data"]["seq_len"] == 128
    assert parsed(capsys, *both, "--data.seq_len=256")["data"]["seq_len"] == 256


ZERO = {"stage": 3, "offload_parameters": True, "config": "own.json", "timeout": "00:01:00"}
MESH = {"tp_size": 4, "tp_plan": {"a": "b"}, "cpu_offload": True, "timeout": "00:01:00"}
EARLIER = {"fsdp2": ("ZeroStrategy", ZERO), "zero2": ("MeshStrategy", MESH)}


@pytest.mark.parametrize("name", EARLIER)
def test_a_strategy_file_replaces_an_earlier_one(name: str, tmp_path: Path, capsys: Any) -> None:
    own = tmp_path / "own.yaml"
    kind, arguments = EARLIER[name]
    strategy = {"class_path": kind, "init_args": arguments}
    own.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    both = parsed(capsys, "--config", own, "-c", f"strategy/{name}")
    assert both["trainer"] == parsed(capsys, f"--config=strategy/{name}")["trainer"]


def test_a_file_and_a_flag_may_change_one_size_of_a_strategy(tmp_path: Path, capsys: Any) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("trainer: {strategy: {init_args: {dp_replicate_size: 4}}}")
    hsdp = "--config=strategy/hsdp"
    changed = parsed(capsys, hsdp, "--config", own, "--trainer.strategy.fsdp_size=8")
    before = parsed(capsys, hsdp)["trainer"]["strategy"]["init_args"]
    sizes = {"dp_replicate_size": 4, "fsdp_size": 8}
    assert changed["trainer"]["strategy"]["init_args"] == before | sizes
    assert parsed(capsys, hsdp, "--trainer.strategy=ddp")["trainer"]["strategy"] == "ddp"


FSDP2 = SHIPPED / "strategy" / "fsdp2.yaml"
OWN = "# Mine.\ntrainer: {strategy: {class_path: MeshStrategy, init_args: {tp_size: 2}}}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder with one configuration of its own, the current folder."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text("# My model.\nmodel: {}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SPELLINGS = ["strategy/fsdp2", "strategy/fsdp2.yaml", "configs/strategy/fsdp2"]
SPELLINGS += [f"{folder}configs/strategy/fsdp2.yaml" for folder in ("", "./", "{}/")]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_name_is_the_projects_file_else_the_librarys(project: Path, spelling: str) -> None:
    assert config_file.locate(spelling.format(project)) == FSDP2
    assert config_file.read(spelling.format(project)) == yaml.safe_load(FSDP2.read_text())
    assert run("config", "copy", "strategy/fsdp2") == 0
    own = project / "configs" / "strategy" / "fsdp2.yaml"
    own.write_text(OWN)
    assert config_file.locate(spelling.format(project)).samefile(own)
    assert config_file.read(spelling.format(project)) == yaml.safe_load(OWN)


def test_a_path_that_exists_wins(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (project / "strategy").mkdir()
    (project / "strategy" / "fsdp2").write_text("run: {name: a}")
    assert config_file.read("strategy/fsdp2") == {"run": {"name": "a"}}
    other = tmp_path_factory.mktemp("other") / "configs"
    other.mkdir()
    (other / "mine.yaml").write_text("run: {name: b}")
    assert config_file.read(f"{other}/mine.yaml") == {"run": {"name": "b"}}
    assert config_file.locate("mine") == Path("configs/mine.yaml")
    missing = f"{other}/quickstart.yaml"  # of another project: not replaced by this one's
    assert config_file.locate(missing) == Path(missing)


NOWHERE = {
    "strategy/fspd2": "did you mean strategy/fsdp2 or ",
    "configs/strategy/zero.yaml": "did you mean strategy/zero",
    "fsdp2": r"did you mean strategy/fsdp2\?",
    "min": r"did you mean mine\?",
    "nothing/like/it": "; `python -m",
}


@pytest.mark.parametrize("name", NOWHERE)
def test_a_name_that_is_nowhere_is_refused(project: Path, name: str) -> None:
    start = f"^--config {name} cannot be read, seen from {project}: No such file"
    sentence = f"{start}.*{NOWHERE[name]}.*config list` has every name$"
    with pytest.raises(InputError, match=sentence):
        config_file.read(name)


@pytest.mark.slow
def test_other_verbs_read_names(project: Path, flags: list[str], capfd: Any) -> None:
    (project / "launch").symlink_to(PROJECT / "launch")
    launched = [*flags, "-c", "preset/debug", "--config=strategy/ddp", "--on=torchrun"]
    assert run("launch", *launched, "--dry-run") == 0
    assert "--config=strategy/ddp" in capfd.readouterr().out  # found on each machine
    machine = ["--nodes=1", "--devices=8", "--memory=80GB"]
    assert run("plan", *flags, "--config=strategy/fsdp2", *machine) == 0
    assert "--config strategy/ddp" in capfd.readouterr().out


def test_config_lists_shows_and_copies(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def config(*words: str) -> str:
        assert run("config", *words) == 0
        return capsys.readouterr().out

    def listed() -> dict[str, str]:
        return {line.split()[0]: line for line in config("list").splitlines()}

    shipped = {file.relative_to(SHIPPED).with_suffix("") for file in SHIPPED.rglob("*.yaml")}
    found = listed()
    assert found.keys() == {name.as_posix() for name in shipped} | {"mine"}
    assert found["mine"].split() == ["mine", "yours", "My", "model."]
    assert config("show", "strategy/fsdp2") == f"# {FSDP2}\n{FSDP2.read_text()}"

    written = config("copy", "configs/strategy/fsdp2.yaml")
    assert "to configs/strategy/fsdp2.yaml: from now on --config strategy/fsdp2" in written
    copy = project / "configs" / "strategy" / "fsdp2.yaml"
    assert copy.read_text() == FSDP2.read_text()
    copy.write_text(OWN)
    assert "overridden Mine." in listed()["strategy/fsdp2"]
    assert config("show", "strategy/fsdp2") == f"# {copy}\n{OWN}"
    for name in ("strategy/fsdp2", str(FSDP2)):
        assert run("config", "copy", name) == 2
        assert "config copy: configs/strategy/fsdp2.yaml is yours" in capsys.readouterr().err
        assert copy.read_text() == OWN


class Trained(NamedTuple):
    folder: Path
    flags: list[str]
    printed: str


@pytest.fixture(scope="module")
def trained(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    flags = small(corpus, cache, folder)
    with redirect_stdout(StringIO()) as printed:
        assert run("fit", *flags) == 0
    return Trained(only_run(folder), flags, printed.getvalue())


@pytest.mark.slow
def test_a_run_records_what_ran_and_where(trained: Trained) -> None:
    folder, _, printed = trained
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"]["seq_len"] == 32
    assert config["last_checkpoint"]["dirpath"] == "{run}/checkpoints"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__ and environment["command"]
    assert (folder / "samples.txt").read_text().startswith("--- step 10")
    assert list(folder.glob("events.*")), "TensorBoard names it by this folder"
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["best-step00000020.ckpt", "step00000020.ckpt"]
    assert str(folder) in printed and "unigram" in printed
    assert "\r" not in printed, "a log file gets lines"
    learned = logged(folder, "eval/bits_per_byte")
    assert learned[20] < learned[0]


@pytest.mark.slow
def test_test_and_predict_use_the_checkpoint(trained: Trained, capfd: Any) -> None:
    assert run("test", *trained.flags, "--ckpt_path=last") == 0
    assert "bits_per_byte" in capfd.readouterr().out
    assert run("predict", *trained.flags, "--ckpt_path=last", "--data.prompts=[the quick]") == 0
    (line,) = (trained.folder / "predictions.jsonl").read_text().splitlines()
    assert json.loads(line)["prompt"] == "the quick" and json.loads(line)["continuation"]


@pytest.mark.slow
def test_an_evaluation_takes_the_newest_runs_best(trained: Trained, capfd: Any) -> None:
    best = trained.folder / "checkpoints" / "best-step00000020.ckpt"
    loss = f"loss {logged(trained.folder, 'eval/loss')[20]:.4f}"
    for given, is_kept in (["--ckpt_path=best"], True), ([], True), ([], False):
        if not is_kept:
            shutil.rmtree(best)
        assert run("validate", *trained.flags, *given) == 0
        shown = capfd.readouterr().out
        place = best if is_kept else best.parent
        assert f"validate: the weights come from {place}\n" in shown and loss in shown
    assert run("validate", *trained.flags, "--ckpt_path=best") == 2
    assert "has no best-*.ckpt: give `last`" in capfd.readouterr().err


HIDDEN = redaction.HIDDEN
RECORDED = "NCCL_DEBUG TORCH_NCCL_BLOCKING_WAIT PYTHONPATH MKL_NUM_THREADS".split()
NOT_RECORDED = "WANDB_API_KEY HF_TOKEN TORCH_REGISTRY NCCL_OWN_PLUGIN_LOGIN".split()
NOT_RECORDED += "DS_STORAGE_PASSWORD PYTHON_KEYRING_BACKEND".split()
OF_A_RANK = "CUDA_VISIBLE_DEVICES OMP_NUM_THREADS TORCHELASTIC_RESTART_COUNT".split()


def test_variables_are_those_of_an_allow_list() -> None:
    names = [*RECORDED, *NOT_RECORDED, *OF_A_RANK]
    given: dict[str, str] = dict.fromkeys(names, "http://me:s3cr3t@host/x")
    kept = dict.fromkeys(RECORDED, f"http://{HIDDEN}@host/x")
    assert redaction.recorded_variables(given) == kept
    keys = "api_key --a.init_args.api_key WANDB_API_KEY hf_token dbPassword pw".split()
    keys += "client_secret_value private_key_pem Authorization cookie webhook_url api_keys".split()
    keys += "aws_access_key_id X-Amz-Signature passwords --a.credentials_json".split()
    others = "--cluster.kubernetes.secrets.A num_keys run_id signature_columns "
    others += "eos_token text_key num_key_value_heads sample_tokens tokenizer bypass_cache monkey"
    assert [key for key in [*keys, *others.split(), ""] if redaction.names_a_secret(key)] == keys


def test_a_configuration_keeps_all_but_the_text_of_secrets() -> None:
    section = {"api_key": "k", "token": None, "key": 3, "eos_token": "</s>"}
    given: dict[str, Any] = {"a": section, "b": ["://u:p@h", 1]}
    given["c"] = [
        "https://a/b?X-Amz-Credential=AK&X-Amz-Signature=s3cr3t&part=1#x",
        "https://a/b?sig=s3cr3t",
        "https://u:s3@cr3t@a/b",
        f"hf_{'s3cr3t' * 5} and AKIA{'S3CR3T00' * 2}",
        "https://a/b?page=2 sk-learn task-3 hf_model",
    ]
    given["credentials"] = {"user": "u", "a": ["x"]}
    kept = {"a": section | {"api_key": HIDDEN}, "b": [f"://{HIDDEN}@h", 1]}
    kept["c"] = [
        f"https://a/b?X-Amz-Credential={HIDDEN}&X-Amz-Signature={HIDDEN}&part=1#x",
        f"https://a/b?sig={HIDDEN}",
        f"https://{HIDDEN}@a/b",
        f"{HIDDEN} and {HIDDEN}",
        given["c"][-1],
    ]
    kept["credentials"] = {"user": HIDDEN, "a": [HIDDEN]}
    assert redaction.redacted(given) == kept


def test_a_command_line_keeps_all_but_secrets() -> None:
    plain = ["python", "-m", "trainer", "fit", "--c", "d", "--y=1:2"]
    plain += ["--model.architecture={model_type: llama, eos_token: x}"]
    secret = ["--a.api_key=s", "--b.token", "s", "--x={password: s, y: 1}"]
    secret += ["--d={headers: {Authorization: Bearer s}}", "--e=https://a/?token=s"]
    hidden = [f"--a.api_key={HIDDEN}", "--b.token", HIDDEN]
    hidden += [f'--x={{"password": "{HIDDEN}", "y": 1}}']
    hidden += [
        f'--d={{"headers": {{"Authorization": "{HIDDEN}"}}}}',
        f"--e=https://a/?token={HIDDEN}",
    ]
    assert redaction.redacted_command([*plain, *secret]) == [*plain, *hidden]


class Uploader(Callback):
    """Somebody's own."""

    def __init__(self, api_key: str) -> None:
        assert api_key == "s3cr3t"


def test_a_run_writes_no_secret(flags: Any, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    for name in NOT_RECORDED:
        monkeypatch.setenv(name, "s3cr3t")
    secret = [f"--trainer.callbacks+={__name__}.Uploader", "--trainer.callbacks.api_key=s3cr3t"]
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "trainer", "fit", *secret])
    flags = [flag for flag in flags if flag != "--run.report=false"]
    assert run("fit", *flags, *secret, "--trainer.max_steps=1") == 0
    written = [path for path in only_run(tmp_path).rglob("*") if path.is_file()]
    names = " ".join(path.name for path in written)
    assert all(name in names for name in "config.yaml environment report.html tfevents".split())
    assert [path for path in written if b"s3cr3t" in path.read_bytes()] == []
    shown = capfd.readouterr()
    assert "s3cr3t" not in shown.out + shown.err


MUON = ("--optimizer=Muon", "--optimizer={class_path: Muon}", "--config={folder}/muon.yaml")


@pytest.mark.parametrize("flag", MUON)
def test_an_optimizers_name_is_torchs_where_another_package_has_it_too(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Muon(torch.optim.Optimizer):
        """As DeepSpeed's, which a rehearsal and ZeRO import."""

    globals()["Muon"] = Muon  # jsonargparse does not count local classes
    Muon.__qualname__ = "Muon"
    (tmp_path / "muon.yaml").write_text("optimizer:\n  class_path: Muon\n")
    try:
        config = parsed(capsys, flag.replace("{folder}", str(tmp_path)))
    finally:
        del globals()["Muon"]
    assert config["optimizer"]["class_path"] == "torch.optim.Muon"

"""Each row of docs/mission.md is held by tests that run daily and by facts that go with it.

A row names the tests that prove it, and facts: commands, keys, files and flags that a user types.
If one is removed, renamed or moved to the nightly tests, the row's test fails. Rows that need a GPU
name tests on the fake device (parallel/test_fake_cuda.py), or with recorded answers of the driver.
"""

import re
import runpy
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import requires
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest

from dist_template.cli.config_file import names
from dist_template.cli.verbs import verbs
from dist_template.plugins import registered
from tests import ROOT
from tests.support.line import main
from tests.support.repository import copied, printed

PAGE = ROOT / "docs" / "mission.md"
PROJECT = "{{cookiecutter.project_slug}}"
ASKED = {"K": 5, "A": 8, "B": 13, "C": 13}
# The page's rows are compared with this list: a row cannot be deleted on the page alone.
NUMBERS = [f"{part}{row}" for part, size in ASKED.items() for row in range(1, size + 1)]


# ---- facts: each raises AssertionError if it no longer holds -------------------------------------


class Fact(NamedTuple):
    text: str
    holds: Callable[[], object]


def verb(name: str, *words: str) -> Fact:
    """A verb is there, and its help has the words, such as a flag and its value."""

    def holds() -> bool:
        verbs()[name].load()
        return all(word in help_of(name) for word in words)

    return Fact(f"the verb {name} {' '.join(words)}".strip(), holds)


def target(name: str) -> Fact:
    points = "dist_template.launch_targets"
    return Fact(f"launch --on {name}", lambda: registered(points)[name].load())


def plugin(group: str, name: str) -> Fact:
    return Fact(f"{group} {name}", lambda: registered(f"dist_template.{group}")[name].load())


def config(name: str) -> Fact:
    return Fact(f"--config {name}", lambda: name in names())


def key(name: str) -> Fact:
    return Fact(f"the key {name}", lambda: name in keys())


def file(name: str, *words: str) -> Fact:
    """A file of the repository is there, and has the words."""

    def holds() -> bool:
        text = (ROOT / name).read_text("utf-8")
        return all(word in text for word in words)

    return Fact(f"{name} {' '.join(words)}".strip(), holds)


def package(name: str) -> Fact:
    """The library requires a package, itself or by an extra."""

    def holds() -> bool:
        requirements = requires("dist-template") or []
        return any(re.match(rf"{name}\b", requirement) for requirement in requirements)

    return Fact(f"requires {name}", holds)


def rule(name: str) -> Fact:
    def holds() -> bool:
        from dist_template.wings.diagnose import engine

        return name in engine.RULES

    return Fact(f"the rule {name} of diagnose", holds)


@cache
def help_of(name: str) -> str:
    text = StringIO()
    with redirect_stdout(text), pytest.raises(SystemExit):
        main([name, "--help"])
    return text.getvalue()


@cache
def keys() -> set[str]:
    """Keys of `fit`, with those of the classes that a key may name."""
    from dist_template.cli.fit import CLI  # noqa: F401  (loads the classes)

    reference = runpy.run_path(str(ROOT / "docs" / "reference.py"), run_name="reference")
    with reference["package"]() as cli:
        return reference["keys"](reference["fit_parser"](cli))


# ---- the rows ------------------------------------------------------------------------------------

PARITY = "parallel/test_parity.py::test_a_strategy_trains_to_the_numbers_of_one_process"
GUIDE_FLAGS = "cli/test_guide_flags.py::"
OPTIONS = "cli/test_options.py::"
ACCUMULATED = f"{OPTIONS}test_accumulated_micro_batches_train_as_one_large_batch"
SCHEDULES = "model/test_optim.py::test_schedules_are_those_of_transformers_to_the_bit"
RESUMED = "checkpoint/test_exact_resume.py::test_a_killed_run_resumes_bit_identically"
DIAGNOSED = "wings/diagnose/test_diagnosis_faults.py::"
RECORDED = f"{DIAGNOSED}test_a_recorded_training_is_diagnosed_as_expected"
PLANTED = f"{DIAGNOSED}test_every_rule_has_a_planted_fault"
LOGGERS = "observe/test_loggers.py::"
TENSORBOARD = f"{LOGGERS}test_tensorboard_has_every_metric_once_per_step_after_a_resume"
WANDB = f"{LOGGERS}test_wandb_continues_the_run_with_every_metric_and_setting"
DOCUMENTED = "model/test_metrics.py::test_the_documented_metrics_are_those_that_are_logged"
COMPUTED = "model/test_metrics.py::test_loss_norm_and_tokens_equal_an_independent_computation"
DOCTOR = "wings/test_doctor.py::"
PLAN = "wings/test_plan.py::"
LAUNCH = "wings/test_launch.py::"
EVALUATE = "wings/test_evaluate.py::"
SERVE = "wings/test_serve.py::"
SERVING = "template/test_serving.py::"
JSON = "wings/test_deepspeed_json.py::"
FAKE_GPU = "parallel/test_fake_cuda.py::test_a_fit_equals_the_cpus_and_waits_as_the_table_says"
REMEDIES = "callbacks/test_crashes.py::test_out_of_memory_has_cures"
EXAMPLES = ("llama3_8b_qlora", "llama3_8b_lora", "llama2_13b_zero2", "llama3_70b_zero3")
CI = "template/test_ci.py::"


class Row(NamedTuple):
    tests: list[str]  # below tests/; with [case] that case alone
    facts: list[Fact]


ROWS: dict[str, Row] = {
    "K1": Row(
        [
            "template/test_names.py::test_default_project_is_valid_lints_and_type_checks_clean",
            "template/test_names.py::test_a_project_contains_these_files",
            "template/test_release.py::test_a_project_from_git_pins_the_commit_for_pip",
            "template/test_release.py::test_an_address_becomes_one_that_pip_reads_and_holds_no_password",
        ],
        [file("cookiecutter.json", "project_slug"), file("hooks/pre_gen_project.py")],
    ),
    "K2": Row(
        [
            f"{OPTIONS}test_every_option_that_is_not_refused_is_honoured",
            f"{OPTIONS}test_every_option_is_in_one_of_the_tables",
            "cli/test_cli.py::test_a_run_records_what_ran_and_where",
            "model/test_any_module.py::test_a_strategy_has_the_losses_of_one_process",
        ],
        [
            file(f"{PROJECT}/{{{{cookiecutter.package_name}}}}/module.py", "class LanguageModule"),
            verb("fit"),
            key("trainer.callbacks"),
            key("trainer.logger"),
        ],
    ),
    "K3": Row(
        [
            "cli/test_strategy_names.py::test_a_lightning_name_does_what_the_strategys_file_does",
            *(f"{PARITY}[deepseek_v3-{name}]" for name in "ddp fsdp2 zero1 zero2 zero3".split()),
        ],
        [config(f"strategy/{name}") for name in "ddp fsdp2 hsdp zero1 zero2 zero3".split()],
    ),
    "K4": Row(
        [
            ACCUMULATED,
            f"{PARITY}[deepseek_v3-fsdp2]",  # its gradients are clipped by their norm
            f"{GUIDE_FLAGS}test_gradients_are_clipped_by_value",
            SCHEDULES,
            RESUMED,
            WANDB,
        ],
        [
            key("trainer.accumulate_grad_batches"),
            key("trainer.gradient_clip_val"),
            key("trainer.gradient_clip_algorithm"),
            key("model.optim.schedule"),
            key("last_checkpoint.every_n_steps"),
            config("logger/wandb"),
        ],
    ),
    "K5": Row(
        [
            "template/test_release.py::test_what_is_imported_with_the_library_is_required_by_it",
            "template/test_release.py::test_the_table_of_supported_versions_is_that_of_pyproject",
            "cli/test_start.py::test_a_lack_is_explained",  # what names deepspeed, wandb, …
            "text/test_cache.py::test_records_give_their_field_or_say_which_there_are",
            f"{PARITY}[deepseek_v3-zero2]",
            WANDB,
        ],
        [
            *map(package, "lightning torch deepspeed transformers datasets wandb".split()),
            *map(package, "jsonargparse cookiecutter pytest".split()),
        ],
    ),
    "A1": Row(
        [
            "template/test_supply_chain.py::test_every_requirement_is_pinned",
            "template/test_supply_chain.py::test_the_locks_differ_by_torchs_build_and_have_the_pins_of_pyproject",
            f"{SERVING}test_the_dockerfile_has_one_image_to_train_and_to_serve",
            f"{DOCTOR}test_packages_are_locked_and_none_is_blocked",
            f"{DOCTOR}test_gpus_cuda_and_cudnn_are_reported",  # torch's answers replaced
            "cluster/test_run_lock.py::test_one_table_says_which_ranks_have_what",  # exit code 78
            "cluster/test_run_lock.py::test_ranks_that_differ_end_before_the_first_step",
        ],
        [
            *(file(f"{PROJECT}/{name}") for name in ("lock-cpu.txt", "lock-cuda.txt")),
            file(f"{PROJECT}/Dockerfile", "lock-*.txt"),
            verb("doctor"),
            file("src/dist_template/errors.py", "MISMATCH = 78"),
        ],
    ),
    "A2": Row(
        [
            *(f"{PARITY}[deepseek_v3-{name}]" for name in "fsdp2 tp zero3".split()),
            "parallel/test_zero.py::test_every_auto_of_a_hugging_face_file_is_filled_in",
            f"{JSON}test_the_guides_json_in_fp16_is_taken_for_gpus",
        ],
        [key("trainer.strategy"), config("strategy/zero3"), config("strategy/tp")],
    ),
    "A3": Row(
        [ACCUMULATED, COMPUTED, "wings/rehearse/test_faults.py::test_the_default_project_passes"],
        [key("trainer.accumulate_grad_batches"), key("data.global_batch_size")],
    ),
    "A4": Row(
        [TENSORBOARD, WANDB, f"{LOGGERS}test_without_service_it_is_offline"],
        [
            config("logger/wandb"),
            plugin("loggers", "TensorBoard"),
            plugin("loggers", "WandB"),
            key("run.name"),
        ],
    ),
    "A5": Row(
        [
            f"{PARITY}[deepseek_v3-ddp]",
            "model/test_optim.py::test_clipping_sees_gradients_without_the_scale_of_float16",
        ],
        [
            key("trainer.gradient_clip_val"),
            file("src/dist_template/cli/defaults.py", '"gradient_clip_val": 1.0'),
        ],
    ),
    "A6": Row(
        [
            SCHEDULES,
            f"{GUIDE_FLAGS}test_cosine_annealing_is_torchs",
            f"{GUIDE_FLAGS}test_the_rate_falls_on_a_plateau_as_torchs",
        ],
        [key("model.optim.schedule"), key("lr_scheduler")],
    ),
    "A7": Row(
        [
            RESUMED,
            f"{OPTIONS}test_one_command_starts_a_training_and_continues_it",
            "checkpoint/test_commit.py::test_damage_is_never_resumed",
        ],
        [key("last_checkpoint.every_n_steps"), key("ckpt_path")],
    ),
    "A8": Row(
        [
            f"{CI}test_github_and_gitlab_run_the_same_commands",
            f"{CI}test_the_pipeline_trains_on_two_processes_continues_and_evaluates",
            "wings/rehearse/test_faults.py::test_the_default_project_passes",  # with a kill
            "template/test_names.py::test_a_check_is_skipped_by_its_name_alone",
        ],
        [
            file(f"{PROJECT}/.github/workflows/ci.yml", "ARGS='-m \"\"'", "evaluate runs/ci"),
            file(f"{PROJECT}/.gitlab-ci.yml", "ARGS='-m \"\"'", "evaluate runs/ci"),
        ],
    ),
    "B1": Row(
        [
            *(f"{PARITY}[deepseek_v3-{name}]" for name in "ddp zero1 zero2 zero3".split()),
            "parallel/test_pipeline.py::test_a_pipeline_trains_to_the_numbers_of_one_process",
            "parallel/test_pipeline.py::test_a_pipeline_trains_with_the_users_list_of_layers",
        ],
        [
            *(config(f"strategy/{name}") for name in "ddp pp zero1 zero2 zero3".split()),
            file("docs/strategies/pipeline.md", "pp_layers"),
        ],
    ),
    "B2": Row(
        [
            f"{JSON}test_a_guides_json_is_taken_as_it_is[zero2]",
            "parallel/test_zero.py::test_every_auto_of_a_hugging_face_file_is_filled_in",
            "parallel/test_zero.py::test_a_conflict_names_both_places",
        ],
        [plugin("strategies", "ZeroStrategy"), file("docs/strategies/zero.md", "config")],
    ),
    "B3": Row(
        [
            f"{JSON}test_a_guides_json_is_taken_as_it_is[zero3]",
            "parallel/test_zero.py::test_every_auto_of_a_hugging_face_file_is_filled_in",
        ],
        [plugin("strategies", "ZeroStrategy"), file("docs/strategies/zero.md", "Offload")],
    ),
    "B4": Row(
        [f"{JSON}test_a_generated_json_trains_as_the_strategy_does"], [verb("config", "deepspeed")]
    ),
    "B5": Row(
        [
            f"{PLAN}test_predicted_bytes_are_those_of_a_training",
            f"{PLAN}test_the_best_option_fits_and_known_models_have_known_figures",
        ],
        [verb("plan", "--devices", "--memory"), file("docs/strategies/index.md", "| 70 B |")],
    ),
    "B6": Row(
        ["wings/test_guide_commands.py::test_each_command_of_the_guide_trains"],
        [
            target("deepspeed"),
            target("accelerate"),
            key("cluster.hostfile"),
            file("docs/launch.md", "accelerate launch", "deepspeed"),
        ],
    ),
    "B7": Row(
        [RECORDED, PLANTED, f"{DIAGNOSED}test_the_advised_change_cures_the_fault"],
        [
            verb("diagnose"),
            *map(rule, "loss_diverges loss_spikes loss_not_decreasing loss_not_finite".split()),
        ],
    ),
    "B8": Row(
        [
            "wings/diagnose/test_overfitting.py::test_overfitting_is_named_and_a_noisy_healthy_run_is_not",
            f"{GUIDE_FLAGS}test_early_stopping_ends_a_training_that_no_longer_improves",
        ],
        [config("preset/early_stopping"), verb("diagnose")],
    ),
    "B9": Row(
        [f"{PARITY}[deepseek_v3-fsdp2]", DOCUMENTED, RECORDED, PLANTED],
        [
            rule("early_loss_jump"),
            key("model.optim.warmup"),
            file("docs/metrics.md", "`train/learning_rate`"),
        ],
    ),
    "B10": Row(
        [
            DOCUMENTED,
            REMEDIES,  # an error of CUDA's allocator, raised where it would be
            f"{DIAGNOSED}test_the_estimate_of_a_runs_memory_is_that_of_its_training",
            f"{DIAGNOSED}test_the_proposed_micro_batch_divides_and_fits",
        ],
        [rule("out_of_memory"), file("docs/metrics.md", "`memory/peak_share`")],
    ),
    "B11": Row(
        [
            "callbacks/test_gpu_gauges.py::test_gpu_gauges_are_logged_and_wait_for_no_device",
            WANDB,  # hyperparameters
            DOCUMENTED,
        ],
        [
            package("nvidia-ml-py"),
            file("docs/metrics.md", "`gpu/utilization`", "`perf/samples_per_s`"),
        ],
    ),
    "B12": Row(
        [
            RECORDED,
            PLANTED,
            f"{DIAGNOSED}test_the_advised_change_cures_the_fault",
            REMEDIES,
            "template/test_docs.py::test_the_diagnosis_page_names_every_rule",
            "text/test_order.py::test_rows_are_98_percent_full_and_complete",  # packing
            "model/test_speed.py::test_a_varlen_kernel_gets_the_bounds_that_the_mask_shows",
        ],
        [
            *map(rule, "loss_not_decreasing loss_spikes out_of_memory fp32_on_gpu".split()),
            rule("waits_for_data"),
            key("model.attention"),
            key("data.micro_batch_size"),
            key("trainer.precision"),
            file("docs/speed.md", "bf16"),
        ],
    ),
    "B13": Row(
        [
            *(f"{PLAN}test_an_example_is_as_planned[{name}]" for name in EXAMPLES),
            f"{PLAN}test_fit_would_accept_an_example_on_its_machine",
            "parallel/test_adapters.py::test_adapters_train_as_one_process",
            "parallel/test_adapters.py::test_a_variant_trains_as_one",  # in 4 bits
            "text/test_finetune.py::test_four_bit_layers_have_the_values_that_transformers_gives_them",
        ],
        [
            *(config(f"example/{name}") for name in EXAMPLES),
            key("model.adapter"),
            file("docs/plan.md", *(f"`example/{name}`" for name in EXAMPLES)),
        ],
    ),
    "C1": Row(
        [
            f"{DOCTOR}test_gpus_cuda_and_cudnn_are_reported",  # torch's answers replaced
            f"{DOCTOR}test_infiniband_ports_that_are_down_are_named",  # a folder in place of /sys
            f"{DOCTOR}test_a_hosts_name_has_to_resolve_to_an_interface",
            f"{DOCTOR}test_a_slow_machine_is_named",
            f"{DOCTOR}test_training_is_the_same_and_the_slow_rank_is_named",
        ],
        [verb("doctor"), plugin("callbacks", "preflight")],
    ),
    "C2": Row(
        [
            f"{LAUNCH}test_slurm_gets_the_values_of_the_site",
            f"{LAUNCH}test_torchrun_and_ray_get_sizes_and_a_limit",
            f"{LAUNCH}test_two_hosts_train_as_one_and_refuse_another",
            "wings/test_kubernetes.py::test_a_manifest_is_valid_and_fits_together",
        ],
        [
            *map(target, "kubernetes ray slurm ssh torchrun".split()),
            *(key(f"cluster.{name}") for name in "nodes devices_per_node time_limit".split()),
            key("trainer.max_epochs"),
            file("docs/launch.md", "cpu: 64, memory: 512Gi"),
        ],
    ),
    "C3": Row(
        [
            "parallel/test_starting.py::test_published_weights_are_those_of_from_pretrained",
            "callbacks/test_crashes.py::test_generate_is_not_needed",  # a network by build_model
            "model/test_speed.py::test_an_edited_objective_leaves_the_reported_cross_entropy_alone",
            "template/test_docs_any_module.py::test_the_page_trains_by_the_command_line",
        ],
        [
            key("model.pretrained"),
            file("docs/start.md", "def build_model", "def loss"),
            file("docs/models.md", "## A model of your own"),
        ],
    ),
    "C4": Row(
        [
            *(f"{PARITY}[deepseek_v3-{name}]" for name in "ddp tp pp".split()),
            "parallel/test_zero.py::test_one_process_leaves_nothing_behind",
            "cluster/test_exit_codes.py::test_one_workers_end_ends_those_that_wait_for_it",
        ],
        [config("strategy/ddp"), config("strategy/tp"), config("strategy/pp")],
    ),
    "C5": Row(
        [
            "parallel/test_traffic.py::test_a_step_sends_what_is_planned",
            *(f"{FAKE_GPU}[{name}]" for name in "ddp fsdp2 zero3".split()),  # on the fake device
        ],
        [file("docs/speed.md", "## What a strategy sends")],
    ),
    "C6": Row(
        [
            "text/test_order.py::test_a_run_of_any_attempts_reads_the_stream_without_a_gap",
            "text/test_order.py::test_evaluation_reads_every_row_once_in_equally_many_full_batches",
            "callbacks/test_sample_order.py::test_a_resume_reads_the_next_samples",
        ],
        [key("data.seed"), key("data.global_batch_size")],
    ),
    "C7": Row(
        [
            "text/test_balance.py::test_balanced_ranks_train_to_the_same_losses",
            "text/test_balance.py::test_a_slow_rank_gets_less_work",
        ],
        [key("data.balance"), key("data.rank_speeds")],
    ),
    "C8": Row(
        [
            "checkpoint/test_exact_resume.py::test_a_run_resumes_with_1_process_then_4_then_2",
            RESUMED,
            "checkpoint/test_saves.py::test_a_kill_leaves_the_checkpoint_before",
            f"{LAUNCH}test_torchrun_and_ray_get_sizes_and_a_limit",  # as many nodes as are alive
        ],
        [key("last_checkpoint.every_n_steps"), key("cluster.min_nodes")],
    ),
    "C9": Row(
        [COMPUTED, DOCUMENTED, TENSORBOARD],
        [
            file(
                "docs/metrics.md",
                "`train/loss`",
                "`train/token_accuracy`",
                "`eval/token_accuracy`",
                "`perf/tokens_per_s`",
            ),
            plugin("loggers", "TensorBoard"),
        ],
    ),
    "C10": Row(
        [
            "wings/test_sweep.py::test_trials_are_fits",
            f"{PLAN}test_the_best_option_fits_and_known_models_have_known_figures",
            "wings/diagnose/test_gpu_utilization.py::test_low_utilization_names_its_cause",
            RECORDED,
        ],
        [
            verb("sweep"),
            verb("plan"),
            config("sweep/lr"),
            *map(rule, ("waits_for_data", "slow_rank")),
        ],
    ),
    "C11": Row(
        [
            f"{EVALUATE}test_a_run_is_better_than_its_half_and_not_than_itself",
            f"{EVALUATE}test_baselines_of_other_tokens_are_compared_by_bits_per_byte",
            f"{EVALUATE}test_a_run_is_promoted_if_it_is_better",
            "wings/diagnose/test_command.py::test_compare_prints_what_differs",
            "text/test_order.py::test_evaluation_reads_every_row_once_in_equally_many_full_batches",
        ],
        [verb("evaluate", "--baseline"), verb("compare"), verb("promote"), key("data.test_share")],
    ),
    "C12": Row(
        [
            "wings/test_export_onnx.py::test_an_exported_model_gives_the_trained_logits_in_onnxruntime",
            "wings/test_export_plain.py::test_the_verb_writes_a_graph_with_its_card",
            "wings/test_export_onnx.py::test_what_cannot_be_exported_is_one_sentence",
            "wings/test_export_gate.py::test_a_program_for_a_saved_model_gives_its_logits",
        ],
        [verb("export", "--to", "onnx"), package("onnxruntime")],
    ),
    "C13": Row(
        [
            f"{SERVE}test_an_openai_client_reads_whole_answers_and_streams",
            f"{SERVE}test_a_service_reports_readiness_and_metrics",
            f"{SERVE}test_a_run_is_served_and_a_fault_is_refused",
            f"{SERVE}test_a_request_given_up_frees_the_model_and_sigterm_ends_a_stream",
            f"{SERVING}test_the_dockerfile_has_one_image_to_train_and_to_serve",
            f"{SERVING}test_compose_serves_on_loopback_and_waits_for_running_requests",
            f"{SERVING}test_the_kubernetes_objects_fit_together_and_a_slip_in_them_is_found",
        ],
        [
            verb("serve", "--host", "--max_requests"),
            file("docs/deploy/kubernetes.yaml", "/ready", "/health", "/metrics"),
            file("docs/deploy/compose.yaml"),
            file("src/dist_template/wings/ship/serve/service.py", '"/ready"', '"/metrics"'),
        ],
    ),
}


# ---- the tests -----------------------------------------------------------------------------------


def of_page() -> dict[str, list[str]]:
    """Cells of the page's rows, by number."""
    lines = re.findall(r"^\| ([A-Z]\d+) \|(.*)\|$", PAGE.read_text("utf-8"), re.MULTILINE)
    rows = {}
    for number, cells in lines:
        assert number not in rows, f"{number} is there twice"
        rows[number] = [cell.strip() for cell in cells.split(" | ")]
    return rows


def test_the_page_has_every_row_and_the_table_has_its_tests() -> None:
    assert list(of_page()) == NUMBERS and list(ROWS) == NUMBERS
    for number, cells in of_page().items():
        assert len(cells) == 3 and all(cells) and "](" in cells[2], f"{number}: {cells}"
        assert ROWS[number].tests and ROWS[number].facts, f"{number} has no test, or no fact"


class Collected:
    """Collects tests as `make test` does, without running them."""

    def __init__(self) -> None:
        self.daily: set[str] = set()  # node ids that run daily
        self.errors: dict[str, str] = {}  # file: why it cannot be collected

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors[report.nodeid] = report.longreprtext[-500:]

    @pytest.hookimpl(trylast=True)  # after nightly tests are deselected
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.daily |= {item.nodeid for item in items if not is_skipped(item)}


def is_skipped(item: pytest.Item) -> bool:
    if item.get_closest_marker("skip"):
        return True
    # a condition may be a text, which pytest evaluates later
    return any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif"))


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest) -> Iterator[Collected]:
    """The tests of the files that the selected rows name."""
    files = set[Path]()
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        number = callspec.params.get("number") if callspec else None
        if number in ROWS:
            files.update(ROOT / "tests" / test.partition("::")[0] for test in ROWS[number].tests)
    plugin = Collected()
    argv = ["--collect-only", "-q", "-m", "not nightly", f"--rootdir={ROOT}", "--capture=no"]
    argv += ["-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    argv += [str(file) for file in sorted(files) if file.is_file()]
    text = StringIO()
    with redirect_stdout(text):
        code = pytest.main(argv, plugins=[plugin])
    assert plugin.daily or code == pytest.ExitCode.NO_TESTS_COLLECTED, text.getvalue()[-2000:]
    yield plugin


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_row_is_held(number: str, collected: Collected) -> None:
    # a test with parameters is there if one of its cases is
    daily = collected.daily | {item.partition("[")[0] for item in collected.daily}
    missing = []
    for test in ROWS[number].tests:
        name = f"tests/{test}"
        if name not in daily:
            file = name.partition("::")[0]
            reason = collected.errors.get(file, "it does not exist, is nightly, or is skipped")
            missing.append(f"{test} does not run daily: {reason}")
    for fact in ROWS[number].facts:
        try:
            if fact.holds():
                continue
            reason = "it does not hold"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        missing.append(f"{fact.text} is gone: {reason}")
    if missing:
        pytest.fail("\n".join([f"{number} is not held:", *missing]), pytrace=False)


class Removal(NamedTuple):
    number: str  # the row that has to notice
    path: str
    text: str  # "": the file is deleted
    replacement: str
    words: str  # in what the test says


REMOVALS = {
    "a test": Removal(
        "A7",
        "tests/checkpoint/test_exact_resume.py",
        "def test_a_killed_run_resumes_bit_identically",
        "def a_killed_run_resumes_bit_identically",
        "test_a_killed_run_resumes_bit_identically does not run daily",
    ),
    "a verb": Removal(
        "B7",
        "pyproject.toml",
        'diagnose = "dist_template.wings.diagnose.command"\n',
        "",
        "the verb diagnose is gone",
    ),
    "a strategy's file": Removal(
        "C4", "src/dist_template/configs/strategy/tp.yaml", "", "", "--config strategy/tp is gone"
    ),
    "a preset": Removal(
        "B8",
        "src/dist_template/configs/preset/early_stopping.yaml",
        "",
        "",
        "--config preset/early_stopping is gone",
    ),
    "a test that becomes nightly": Removal(
        "C8",
        "tests/checkpoint/test_exact_resume.py",
        'tiers(["fsdp2", "zero3"], daily=["zero3"])',
        'tiers(["fsdp2", "zero3"], daily=[])',
        "test_a_run_resumes_with_1_process_then_4_then_2 does not run daily",
    ),
    "a test that is skipped": Removal(
        "C13",
        "tests/wings/test_serve.py",
        "def test_a_service_reports_readiness_and_metrics",
        "@pytest.mark.skip\ndef test_a_service_reports_readiness_and_metrics",
        "test_a_service_reports_readiness_and_metrics does not run daily",
    ),
    "a key": Removal(
        "C8",
        "src/dist_template/cluster/site.py",
        "min_nodes",
        "fewest_nodes",
        "the key cluster.min_nodes is gone",
    ),
    "a row of the page": Removal(
        "", "docs/mission.md", "| A5 |", "| A50 |", "test_the_page_has_every_row"
    ),
}


@pytest.mark.slow
def test_a_row_cannot_go_from_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text("utf-8")
    for number in ("K5", "B13"):
        kept = [line for line in text.splitlines() if not line.startswith(f"| {number} |")]
        (tmp_path / "mission.md").write_text("\n".join(kept), "utf-8")
        monkeypatch.setitem(globals(), "PAGE", tmp_path / "mission.md")
        with pytest.raises(AssertionError):
            test_the_page_has_every_row_and_the_table_has_its_tests()


@pytest.mark.nightly
@pytest.mark.parametrize("removal", REMOVALS)
def test_a_removal_is_noticed(removal: str, tmp_path: Path) -> None:
    number, path, text, replacement, words = REMOVALS[removal]
    folder = copied(tmp_path / "copy")
    if text:
        before = (folder / path).read_text("utf-8")
        assert text in before, f"{path} has no {text!r}"
        (folder / path).write_text(before.replace(text, replacement), "utf-8")
    else:
        (folder / path).unlink()
    test = "test_the_page_has_every_row_and_the_table_has_its_tests"
    if number:
        test = f"test_a_row_is_held[{number}]"
    output = printed(folder, f"tests/test_mission.py::{test}")
    assert re.search(r"\b1 failed", output) and words in output, output[-3000:]

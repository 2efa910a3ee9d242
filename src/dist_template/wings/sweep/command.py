"""`sweep`: tries values of some keys in many trainings, and writes the best configuration."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import Ended, Exit, InputError, reason, require
from ...project import Flags, Project, program
from ..ranges import in_range
from ..values import shown

if TYPE_CHECKING:
    from argparse import Namespace

    from optuna import Study
    from plotly.graph_objects import Figure

    from ...observe.history.run import History
    from .study import Sweep

FORMS = "{float: [low, high]}, {log: [low, high]}, {int: [low, high]} or {choice: [a, b]}"
# Of the page's figures: colours that can be read on the report's light page and on its dark one.
LAYOUT = {
    "title": None, "template": "none",
    "height": 310, "margin": {"l": 60, "r": 20, "t": 40, "b": 44},
    "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#7d868f"},
    "legend": {"orientation": "h", "y": 1, "yanchor": "bottom"},
    "colorway": ["#2f93c8", "#e07b39", "#2aa57c", "#c473a5"],
}  # fmt: skip
GRID = "rgba(128,128,128,0.25)"
AXIS = {"gridcolor": GRID, "zerolinecolor": GRID, "automargin": True}
IN_PAGE = {"displayModeBar": False, "responsive": True}


def main(argv: list[str], project: Project) -> None:
    """Runs the sweep of `argv`, or resumes it; raises Ended if it was stopped."""
    made = Flags("sweep", epilog="and fit's flags")
    made.add_argument("--space", required=True, help="YAML of keys of fit with their values")
    trials, workers, steps = in_range(int, 1), in_range(int, 1, 1024), in_range(int, 0)
    made.add_argument("--trials", type=trials, default=16, help="in all, of all processes")
    made.add_argument("--workers", type=workers, default=1, help="trials at a time on this machine")
    made.add_argument("--sampler", choices=("tpe", "random", "grid"), default="tpe")
    made.add_argument("--pruner", choices=("median", "hyperband", "none"), default="median")
    made.add_argument("--prune_after", type=steps, default=0, help="optimizer steps of every trial")
    made.add_argument("--name", help="of the folder in run.root; default: <run.name>-<space>")
    given, flags = made.parse_known_args(argv[1:])
    require("optuna", "sweep")
    if int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        raise InputError("sweep starts the processes of each trial: start it as one task")
    from ...cluster.signals import end_with_parent
    from .study import Sweep, run

    sweep = Sweep(*_checked(given, flags, project))
    command = [sys.executable, "-m", project.package, *argv, "--workers=1"]
    others = [subprocess.Popen(command, preexec_fn=end_with_parent) for _ in range(1, given.workers)]
    for number in sweep.claim(given.trials):
        run(sweep, number, project)
    for other in others:
        other.wait()
    write_results(sweep)


def _checked(given: Namespace, flags: list[str], project: Project) -> tuple[Path, dict[str, Any]]:
    """Returns folder and definition; `fit` has checked every choice and the ends of every range."""
    from ...cli.config_file import read as read_keys
    from ...cli.fit import parse
    from ...cli.limits import Machine, violations
    from ...cli.run import RunConfig
    from .study import distribution, flags_of

    where, space = f"--space {given.space}", read_keys(given.space, "--space")
    if not space:
        raise InputError(f"{where} is empty; give keys of fit, each with one of {FORMS}")
    for key, entry in space.items():
        try:
            distribution(entry)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why = f"{where}: {key} is {shown(entry)} ({reason(error)}); give one of {FORMS}"
            raise InputError(why) from error
    ends = {key: next(iter(entry.values())) for key, entry in space.items()}
    if given.sampler == "grid":
        if any("choice" not in entry for entry in space.values()):
            raise InputError(f"{where}: a grid needs {{choice: [a, b]}} for each key")
        given.trials = min(given.trials, math.prod(map(len, ends.values())))
    for n in range(max(map(len, ends.values()))):
        values = flags_of({key: each[n % len(each)] for key, each in ends.items()})
        cli = parse(["sweep", *flags, *values], project)
        config, trainer = cli.config_init, vars(cli.config_init.trainer)
        best, machine = config.best_checkpoint, Machine.of(trainer)
        if found := violations(machine, trainer, cli.model, cli.datamodule):
            raise InputError(f"{' '.join(values)}: {found[0]}")
        if given.workers > 1 and machine.accelerator == "cuda":
            raise InputError("--workers would share the first GPU: start sweep once for each GPU")
    definition = {key: vars(given)[key] for key in ("sampler", "pruner", "prune_after")}
    definition |= {"space": space, "flags": flags, "metric": best.monitor, "mode": best.mode}
    definition["name"] = given.name or f"{config.run.name}-{Path(given.space).stem}"
    RunConfig(name=definition["name"], root=config.run.root).check(writes=False)
    folder = Path(config.run.root) / definition["name"]
    folder.mkdir(parents=True, exist_ok=True)
    return folder, definition | {"of": config.run.name}


def write_results(sweep: Sweep) -> None:
    """Writes best.yaml and sweep.html; raises Ended if no trial was completed."""
    import yaml

    from ...observe.history.run import read_run
    from ...records import write_atomically
    from .study import flags_of

    study, folder = sweep.study(), sweep.folder
    if not any(trial.state.name == "COMPLETE" for trial in study.trials):
        raise Ended(Exit.FAILED, f"no trial was completed; see {folder}/trial-*/output.txt")
    number, flags = study.best_trial.number, " ".join(flags_of(study.best_params))
    history = read_run(sweep.run(number).absolute())
    best = f"trial {number}: {sweep.definition['metric']} {study.best_value:.4f} with {flags}"
    start = f"{program('fit')} --config {folder / 'best.yaml'}"
    write_atomically(folder / "sweep.html", _page(sweep, study, history, best=best, start=start))
    history.config["run"]["name"] = sweep.definition["of"]
    history.config["trainer"]["callbacks"].pop()  # Pruning, which is the last
    text = f"# {best}\n#   {start}\n{yaml.safe_dump(history.config, sort_keys=False)}"
    write_atomically(folder / "best.yaml", text)
    print(f"best           {best}\ntrain with it  {start}\npage           {folder}/sweep.html")


def _page(sweep: Sweep, study: Study, history: History, **texts: str) -> str:
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    from ..diagnose.report.page import FOLDER, link

    given, keys = sweep.definition, list(sweep.definition["space"])
    counts, rows = Counter(trials=len(study.trials)), []
    for trial in study.trials:
        state = trial.state.name.lower()
        counts[state] += 1
        values = [shown(trial.params.get(key, "")) for key in keys]
        rows.append([str(trial.number), *values, trial.user_attrs.get("end", state)])
    figures = {}
    for name, figure in _figures(study, given["metric"]).items():
        figures[name] = Markup(figure.to_html(full_html=False, include_plotlyjs=False, config=IN_PAGE))
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    return environment.get_template("page.html").render(
        title=str(sweep.folder), css=Markup((FOLDER / "page.css").read_text("utf-8")),
        link=link("shared", history, sweep.folder), counts=counts.items(), figures=figures.items(),
        what=f"{', '.join(keys)}; sampler {given['sampler']}, pruner {given['pruner']}",
        head=["trial", *keys, "end"], rows=rows, **texts,
    )  # fmt: skip


def _figures(study: Study, metric: str) -> dict[str, Figure]:
    """Returns optuna's figures by their names; two of them compare completed trials."""
    from optuna import visualization as plots

    found = {"Best value so far": plots.plot_optimization_history(study, target_name=metric)}
    curves = plots.plot_intermediate_values(study).update_yaxes(title=metric)
    found["Curves of the trials"] = curves
    if sum(trial.state.name == "COMPLETE" for trial in study.trials) > 1:
        found["Values together"] = plots.plot_parallel_coordinate(study, target_name=metric)
        found["Importance of the keys"] = plots.plot_param_importances(study, target_name=metric)
    for figure in found.values():
        figure.update_layout(LAYOUT)
        figure.update_xaxes(AXIS).update_yaxes(AXIS)
    return found

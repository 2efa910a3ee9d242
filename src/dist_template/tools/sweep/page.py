"""The page of a sweep, and its best configuration as a file for `fit`."""

from __future__ import annotations

import yaml

from ...errors import Ended, Exit
from ...observe.history.run import read_run
from ...observe.report.page import FOLDER
from ...observe.report.plotly_js import link
from ...project import program
from ...records import write_atomically
from .study import Sweep, flags_of


def write(sweep: Sweep) -> None:
    """Writes best.yaml and sweep.html; raises Ended if no trial was completed."""
    from optuna import visualization as plots

    study, folder = sweep.study(), sweep.folder
    states = [trial.state.name for trial in study.trials]
    if "COMPLETE" not in states:
        raise Ended(Exit.FAILED, f"no trial was completed; see {folder}/trial-*/output.txt")
    number, flags = study.best_trial.number, " ".join(flags_of(study.best_params))
    history = read_run(sweep.run(number).absolute())
    figures = [plots.plot_optimization_history(study), plots.plot_intermediate_values(study)]
    if states.count("COMPLETE") > 1:
        figures += [plots.plot_parallel_coordinate(study), plots.plot_param_importances(study)]
    style = (FOLDER / "page.css").read_text("utf-8")
    parts = [f'<!doctype html><meta charset="utf-8"><title>{folder}</title><style>{style}</style>']
    parts += [f'<script src="{link("shared", history, folder)}"></script><h1>{folder}</h1>']
    parts += [figure.to_html(full_html=False, include_plotlyjs=False) for figure in figures]
    parts.append(study.trials_dataframe(("number", "params", "user_attrs")).to_html(index=False))
    write_atomically(folder / "sweep.html", "\n".join(parts))
    history.config["run"]["name"] = sweep.definition["of"]
    history.config["trainer"]["callbacks"].pop()  # Pruning, which is the last
    best = f"trial {number}: {sweep.definition['metric']} {study.best_value:.4f} with {flags}"
    start = f"{program('fit')} --config {folder / 'best.yaml'}"
    text = f"# {best}\n#   {start}\n{yaml.safe_dump(history.config, sort_keys=False)}"
    write_atomically(folder / "best.yaml", text)
    print(f"best           {best}\ntrain with it  {start}\npage           {folder}/sweep.html")

"""The page of a sweep, in the report's style, and its best configuration as a file for `fit`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from ...errors import Ended, Exit
from ...observe.history.run import read_run
from ...project import program
from ...records import write_atomically
from ...table import shown
from ..diagnose.report.page import FOLDER, link
from .study import Sweep, flags_of

# Colours that can be read on the report's light page and on its dark one.
TEXT, LINE, CURVES = (
    "#7d868f",
    "rgba(128,128,128,0.25)",
    ["#2f93c8", "#e07b39", "#2aa57c", "#c473a5"],
)


def write(sweep: Sweep) -> None:
    """Writes best.yaml and sweep.html; raises Ended if no trial was completed."""
    study, folder = sweep.study(), sweep.folder
    if not any(trial.state.name == "COMPLETE" for trial in study.trials):
        raise Ended(Exit.FAILED, f"no trial was completed; see {folder}/trial-*/output.txt")
    number, flags = study.best_trial.number, " ".join(flags_of(study.best_params))
    history = read_run(sweep.run(number).absolute())
    best = f"trial {number}: {sweep.definition['metric']} {study.best_value:.4f} with {flags}"
    start = f"{program('fit')} --config {folder / 'best.yaml'}"
    write_atomically(folder / "sweep.html", _page(sweep, study, best, start, history))
    history.config["run"]["name"] = sweep.definition["of"]
    history.config["trainer"]["callbacks"].pop()  # Pruning, which is the last
    text = f"# {best}\n#   {start}\n{yaml.safe_dump(history.config, sort_keys=False)}"
    write_atomically(folder / "best.yaml", text)
    print(f"best           {best}\ntrain with it  {start}\npage           {folder}/sweep.html")


def _page(sweep: Sweep, study: Any, best: str, start: str, history: Any) -> str:
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    given, states = sweep.definition, Counter(trial.state.name for trial in study.trials)
    keys = list(given["space"])
    counts = [("trials", len(study.trials))]
    counts += [(name.lower(), number) for name, number in states.items()]
    rows = [
        [
            str(trial.number),
            *(shown(trial.params.get(key, "")) for key in keys),
            trial.user_attrs.get("end", trial.state.name.lower()),
        ]
        for trial in study.trials
    ]
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    return environment.get_template("page.html").render(
        title=str(sweep.folder),
        css=Markup((FOLDER / "page.css").read_text("utf-8")),
        link=link("shared", history, sweep.folder),
        what=f"{', '.join(keys)}; sampler {given['sampler']}, pruner {given['pruner']}",
        best=best,
        counts=counts,
        start=start,
        figures=[(name, Markup(_drawn(figure))) for name, figure in _figures(study, given)],
        head=["trial", *keys, "end"],
        rows=rows,
    )


def _figures(study: Any, given: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns optuna's figures by their names; two of them compare completed trials."""
    from optuna import visualization as plots

    of = {"target_name": given["metric"]}
    curves = plots.plot_intermediate_values(study).update_yaxes(title=given["metric"])
    found = [("Best value so far", plots.plot_optimization_history(study, **of))]
    found += [("Curves of the trials", curves)]
    if sum(trial.state.name == "COMPLETE" for trial in study.trials) > 1:
        found += [("Values together", plots.plot_parallel_coordinate(study, **of))]
        found += [("Importance of the keys", plots.plot_param_importances(study, **of))]
    return found


def _drawn(figure: Any) -> str:
    """Returns a figure's HTML in the colours and the font of the report."""
    font = {"family": "system-ui, sans-serif", "size": 12, "color": TEXT}
    legend = {"orientation": "h", "y": 1, "yanchor": "bottom"}
    none = {"title": None, "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}
    figure.update_layout(**none, template="none", font=font, colorway=CURVES, legend=legend)
    figure.update_layout(height=310, margin={"l": 60, "r": 20, "t": 40, "b": 44})
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(gridcolor=LINE, zerolinecolor=LINE, automargin=True)
    config = {"displayModeBar": False, "responsive": True}
    return figure.to_html(full_html=False, include_plotlyjs=False, config=config)

"""Names of wings that several tests need and that are not public; without packages of extras."""

# ruff: noqa: F401
from dist_template.wings.diagnose import engine
from dist_template.wings.diagnose.finding import as_text
from dist_template.wings.diagnose.report.curves import figures
from dist_template.wings.diagnose.report.tables import tables
from dist_template.wings.launch.job import Job
from dist_template.wings.launch.job import describe as describe_job
from dist_template.wings.launch.targets import target as launch_target
from dist_template.wings.plan.trace import Traced
from dist_template.wings.rehearse.command import main as rehearse_main
from dist_template.wings.rehearse.compare import first_difference
from dist_template.wings.rehearse.interventions import KillAt, LeakageTest
from dist_template.wings.rehearse.record import RunRecord
from dist_template.wings.rehearse.report import Result
from dist_template.wings.rehearse.runs import Runs
from dist_template.wings.rehearse.workers import clean_processes
from dist_template.wings.ship.export import command as export
from dist_template.wings.ship.export.trained import Trained, load_trained
from dist_template.wings.ship.promote import Registry
from dist_template.wings.values import free_port

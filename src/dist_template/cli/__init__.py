"""The command line: verbs, configuration keys, checks before a start, run folders.

main.py             runs a verb's module; exit codes verbs.py            the verbs: Lightning's, and
entry points config_file.py      finds and reads --config files; finds unknown top-level keys before
torch is imported fit.py              fit, validate, test, predict: LightningCLI parser.py
errors in one sentence, help defaults.py         callbacks and Trainer settings of every run run.py
run folders: names, the newest run, its checkpoints limits/             combinations that cannot
work trainer.py          completes Lightning's Trainer"""

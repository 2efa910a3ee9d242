"""The command line: verbs, keys, checks before a start, a run's folder.

main.py          finds a verb's module and runs it                config_file.py   reads a --config file
fit.py           fit, validate, test, predict: LightningCLI        parser.py        errors in one sentence, help
defaults.py      callbacks and Trainer settings of every run       run.py           names and finds run folders
config_errors.py errors found before torch is imported             limits/          combinations that cannot work
"""

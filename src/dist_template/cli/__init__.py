"""The command line: verbs, configuration keys, checks before a start, run folders.

main.py          runs a verb's module, exit codes                  config_file.py   reads a --config file
fit.py           fit, validate, test, predict: LightningCLI        parser.py        errors in one sentence, help
defaults.py      callbacks and Trainer settings of every run       run.py           names and finds run folders
config_errors.py errors found before torch is imported             limits/          combinations that cannot work
"""

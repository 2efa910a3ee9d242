"""`python -m <package> VERB …`: the command line for this project's model and data."""

from dist_template import main  # imports neither torch nor Lightning

if __name__ == "__main__":
    code = main(module=".module:LanguageModule", data=".data:DataModule", package=__package__)
    raise SystemExit(code)

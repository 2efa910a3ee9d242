"""`completion`: prints a script that completes verbs, keys and values, for ~/.bashrc or ~/.zshrc.

    source <(python -m my_trainer completion bash)    # then: python -m my_trainer fit --tra<TAB>

The words are in the script, so that a key press starts no Python: building the parser of `fit`
imports torch and takes seconds. Print it again after an upgrade, or after a new key of your own.
shtab completes a command by its own name, and not `python -m PACKAGE`; argcomplete does, and starts
Python at each key press."""

import io
import os
import re
from contextlib import redirect_stdout, suppress

from ...cli.config_file import names
from ...cli.verbs import verbs
from ...plugins import PluginError, contained, note
from ...project import Flags, Project
from .docs import folder_of_pages

STRATEGIES = ("--trainer.strategy.help=MeshStrategy", "--trainer.strategy.help=ZeroStrategy")
FLAG = re.compile(r"^ +(?:-\w(?: \w+)?, )?(--[\w.-]+)(?: \{([^}]+)\})?", re.MULTILINE)
SCRIPT = """\
_{0}_words() {{ case "$1 $2" in
{1}
esac; }}
_{0}() {{  # bash takes the `=` of --KEY=VALUE as a word
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  if [[ "${{COMP_WORDS[2]}}" != {0} || $COMP_CWORD -lt 3 ]]; then $_{0}_before "$@"; return; fi
  case "$before" in =) before="${{COMP_WORDS[COMP_CWORD-2]}}" ;; esac
  case "$word" in =) word= ;; -*) before=- ;; esac
  COMPREPLY=($(compgen -W "$(_{0}_words "${{COMP_WORDS[3]}}" "$before")" -- "$word"))
}}
if [[ -z $ZSH_VERSION ]]; then
  _{0}_before="$(complete -p python 2>/dev/null | sed -n 's/.* -F \\([^ ]*\\) .*/\\1/p')"
  complete -o bashdefault -o default -F _{0} python python3
else
  autoload -Uz compinit bashcompinit; (( $+functions[compdef] )) || compinit; bashcompinit
  _{0}_before=${{_comps[python]:-_default}}
  _{0}_zsh() {{ if [[ $words[3] == {0} && $CURRENT -gt 3 ]]; then
    _bash_complete -o default -F _{0}; else $_{0}_before "$@"; fi; }}
  compdef _{0}_zsh python python3
fi
"""


def main(argv: list[str], project: Project) -> None:
    """Prints the script; raises InputError if the shell is unknown."""
    parser = Flags("completion", description=__doc__)
    parser.add_argument("shell", choices=("bash", "zsh"), help="both understand the same script")
    parser.parse_args(argv[1:])
    pages = " ".join(page.stem for page in folder_of_pages().rglob("*.md"))
    # Patterns of the script's `case`, "VERB KEY" each, and the words that may follow.
    words = {"'completion completion'": "bash zsh", "'docs docs'": pages}
    words[f"*' {project.package}'"] = " ".join(verbs())
    of_fit: dict[str, str] = {}  # flag: its values
    for verb in verbs():
        shown = ("--help", *STRATEGIES) if verb == "fit" else ("--help",)
        text = help_of(verb, shown, project)
        flags = dict(FLAG.findall(text))
        if not of_fit:  # `fit` is the first verb
            of_fit = flags
        rest = ""
        if verb != "fit" and "fit's" in text:  # its help says that it takes the flags of `fit`
            rest = f"$(_{project.package}_words fit -)"
        words[f"'{verb} -'"] = f"{' '.join(flags)} {rest}"
        for key, values in flags.items():
            if values != of_fit.get(key):
                words[f"'{verb} {key}'"] = values
    for key, values in of_fit.items():
        words[f"*' {key}'"] = values
    for flag in ("--config", "-c"):  # a file's name, which no such word begins, is the shell's
        words[f"*' {flag}'"] = " ".join(names())
    cases = [f"{key}) echo {values.replace(',', ' ')} ;;" for key, values in words.items()]
    print(SCRIPT.format(project.package, "\n".join(cases)), end="")


def help_of(verb: str, flags: tuple[str, ...], project: Project) -> str:
    """Returns what a verb prints for each of these flags."""
    os.environ["COLUMNS"] = "400"  # a flag and its values in one line
    plugin, printed = verbs()[verb].point, io.StringIO()
    try:
        function = verbs()[verb].load()
        for flag in flags:
            with contained(plugin, "cannot show its flags"):
                with redirect_stdout(printed), suppress(SystemExit):
                    function([verb, flag], project)
    except PluginError as error:
        note(f"{error}; it is completed without flags")
    return printed.getvalue()

"""The parser of --config files and flags, with errors in one sentence."""

import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pydoc import locate
from typing import Any, NoReturn

import yaml
from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LRSchedulerTypeTuple
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..by_tokens import AUTO, values_of
from ..compat.lightning_cli import (
    Key,
    formatter_of,
    key_in_progress,
    keys_of,
    takes_null,
    wrap_instantiation,
)
from ..errors import (
    InputError,
    first_line,
    is_disk_full,
    is_first_on_node,
    is_out_of_memory,
    reason,
    shortened,
)
from ..foreign import MOST_BYTES
from ..plugins import Plugin, PluginError, contained, note
from ..project import Choice, program
from . import config_file, strategy_names

__all__ = ["one_sentence"]

BASES = (Callback, Logger, Strategy, Profiler, Optimizer, LRScheduler, Choice)
OPTIMIZATION = {  # key: base classes, the argument that optim.py passes, help
    "optimizer": (
        (Optimizer,),
        "params",
        "A class instead of AdamW, by name or path, as in --optimizer SGD --optimizer.momentum"
        " 0.9. Muon updates matrices, and AdamW the rest. Vectors are not decayed. lr and"
        " weight_decay are model.optim's unless given here. null: model.optim.optimizer.",
    ),
    "lr_scheduler": (
        LRSchedulerTypeTuple,
        "optimizer",
        "A class instead of model.optim.schedule and its warm-up, stepped after each step;"
        " ReduceLROnPlateau after each validation. null: model.optim.schedule.",
    ),
}

OPTIMIZER_FLAGS = ("--optimizer", "--optimizer.class_path")

# What reading a value may raise, besides the parser's own.
READING = (AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
TYPES = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text"}
TYPES |= {"NoneType": "null", "list": "a list", "dict": "keys"}

HELP = {  # replaces Lightning's help where this command line behaves differently
    "ckpt_path": "A checkpoint, or `last` or `best` of the newest run of run.name. fit: `last`"
    " continues in that run's folder, any other starts a new one; null starts from step 0."
    " validate, test, predict: null takes the newest run's best, or else its last; `start`:"
    " weights before training."
}


class Parser(LightningArgumentParser):
    """Reports an error in one sentence, without a page of usage.

    Args:
        verb: Named in the usage, which does not list the 200 keys."""

    def __init__(self, *args: Any, verb: str | None = None, **kwargs: Any) -> None:
        usage = f"{program(verb)} --config FILE [--config FILE]… [--KEY VALUE]…"
        super().__init__(*args, usage=usage, **kwargs)
        self.section = ""  # whose keys the help shows alone
        self.of_class: type | None = None  # whose arguments jsonargparse reads by this parser
        self.keys_of_fit: set[str] = set()

    def format_help(self, formatter: Any = None) -> str:
        """Shows a section, or a verb's own flags, or the names of the sections and then all
        keys."""
        fit, keys = program("fit"), keys_of(self)
        if self.section:
            title, end = f"keys of {self.section}", f"All sections: `{fit} --help`."
            shown = [key for key in keys if f"{key.dest}.".startswith(f"{self.section}.")]
            if not shown:
                sections = dict.fromkeys(key.dest.partition(".")[0] for key in keys)
                sections.pop("help")
                near = get_close_matches(self.section.lower(), sections, 1)
                hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(sections)};"
                raise InputError(f"there is no section {self.section}; {hint} see `{fit} --help`")
        elif self.keys_of_fit:
            title, end = "flags of this verb", f"Every other key is fit's: see `{fit} --help`."
            shown = [key for key in keys if key.dest not in self.keys_of_fit]
        else:
            usage, _, all_keys = super().format_help(formatter).partition("\n\n")
            sections = " ".join(
                dict.fromkeys(key.dest.partition(".")[0] for key in keys if "." in key.dest)
            )
            return (
                f"{usage}\n\n`{fit} --help SECTION` shows the keys of one: {sections}\n\n{all_keys}"
            )
        formatter = formatter or formatter_of(self)
        formatter.add_usage(self.usage, [], [])
        formatter.start_section(title)
        formatter.add_arguments(shown)
        formatter.end_section()
        formatter.add_text(end)
        return formatter.format_help()

    def add_method_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        added = super().add_method_arguments(*args, **kwargs)
        for action in keys_of(self):
            action.help = HELP.get(action.dest, action.help)
        return added

    def add_class_arguments(self, theclass: type, *args: Any, **kwargs: Any) -> list[str]:
        if not args and "nested_key" not in kwargs:
            self.of_class = theclass
        return super().add_class_arguments(theclass, *args, **kwargs)

    def keys(self) -> set[str]:
        """Returns the keys of this parser and of its verbs'."""
        found = {action.dest for action in keys_of(self)}
        for action in keys_of(self):
            for parser in action.choices.values() if isinstance(action.choices, dict) else ():
                found |= parser.keys()
        return found

    def parse_args(self, args: Any = None, *others: Any, **kwargs: Any) -> Any:
        """Reads names of strategies (strategy_names.py), and reports what PyYAML raises for a value
        such as `!!int x` as well."""
        try:
            words = args
            if isinstance(args, list):
                self._refuse_devices(args)
                words = _with_torchs_optimizer(strategy_names.expanded(args))
            found = super().parse_args(words, *others, **kwargs)
        except READING as error:
            if isinstance(error, InputError):
                raise
            self.error(f"a value cannot be read: {reason(error)}", error)
        if kwargs.get("defaults", True):
            self._check_sections(found)
        return found

    def _refuse_devices(self, words: list[str]) -> None:
        """Refuses a value that jsonargparse would read as a file of keys for good, or into all
        memory: a pipe, a device, a huge file in place of a section."""
        for name, value in flag_values(words):
            try:
                state = os.stat(value)
            except (OSError, ValueError):  # no file, as most values
                continue
            is_file = stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)
            if not is_file and value != os.devnull:
                raise InputError(f"{name} {value} is a pipe or a device: give a file, or a value")
            if state.st_size > MOST_BYTES and name.startswith("--") and "path" not in name:
                raise InputError(f"{name} {value} has {state.st_size} bytes: give a file of keys")

    def _check_sections(self, found: Namespace) -> None:
        """Refuses null, and sections that are no keys: jsonargparse accepts both in a file."""
        names = [action.dest for action in keys_of(self) if not action.dest.endswith(".help")]
        sections = {name.rpartition(".")[0] for name in names}
        for action in keys_of(self):
            name = action.dest
            value = found.get(name, action)
            if name in sections and value is not action and not isinstance(value, Namespace):
                raise InputError(f"{name} is {value!r}: it takes keys, as in {name}.KEY")
            if value is None and action.default is not None and not takes_null(action):
                raise InputError(f"{name} is null; give a value, or remove the key")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if os.environ.get("TRACEBACK", "0") != "0" and ex is not None:
            raise ex
        given = key_in_progress()
        text = one_sentence(" ".join(message.split()), self.keys(), given, self.of_class)
        if is_first_on_node():
            end = "" if text.endswith("?") else ";"
            print(f"error: {shortened(text)}{end} see --help for every key", file=sys.stderr)
        sys.exit(2)


NO_CLASS = Key()  # the whole configuration
# Arguments of TextModule and PackedText that configurations of language models set.
OF_TEXT = """
    architecture pretrained attention optim blocks balance mtp adapter preference loss_chunk source
    tokenizer seq_len global_batch_size micro_batch_size repeat_first_batch prompts
""".split()


def one_sentence(text: str, keys: set[str], given: Key = NO_CLASS, kind: type | None = None) -> str:
    """Rewrites jsonargparse's message as one sentence, without the types that it has tried.

    Args:
        text: The message, about a value of the whole configuration or of a class in it.
        keys: The keys that are known there.
        given: The key of that class.
        kind: The class."""
    unknown = r"unrecognized arguments: --([\w.]+)|does not accept option '([\w.]+)'"
    if found := re.search(unknown, text):
        return _of_unknown_key(found[1] or found[2], keys)
    if argument := re.fullmatch(r"Option '(\w+)' is not accepted", text):
        return _of_unknown_argument(argument[1], keys, given, kind)
    if lacking := re.fullmatch(r"the following arguments are required: (.+)", text):
        return _of_missing(lacking[1].split(", "), given, kind)
    if bound := _of_annotated_types(text, given):
        return bound
    expected = r"Expected a <class '(\w+)'>"
    text = re.sub(expected, lambda match: f"expected {TYPES.get(match[1], match[1])}", text)
    text = re.sub(r"Expected a typing\.Literal\[([^\]]*)\]", r"expected one of \1", text)
    if wrong := re.search(r'Parser key "([\w.]+)": (expected .+?)\. Got value: (.+)', text):
        example = f", as in [{wrong[3]}]" if wrong[2] == "expected a list" else ""
        return f"{given.argument(wrong[1])} is {wrong[3]!r}: {wrong[2]}{example}"
    if scalar := re.search(r"""Parser key "([\w.]+)": Unable to load config '(.+?)'""", text):
        name = given.argument(scalar[1])
        return f"{name} is {scalar[2]!r}: it takes keys, as in {name}.KEY, or a YAML file of them"
    key = re.search(r'Parser key "([\w.]+)"', text)
    name = str(given.argument(key[1]) if key else given)
    at = f"{name}: " if name else ""
    if found := re.search(r"Expected a dot import path string: (\w+)", text):
        if name == strategy_names.KEY and strategy_names.is_name(found[1]):
            return strategy_names.without_keys(found[1])
        known = [kind.__name__ for base in BASES for kind in _below(base)]
        near = get_close_matches(found[1], known, 1)
        hint = f" did you mean {near[0]}?" if near else ""
        allowed = "use a class of this package or of Lightning, or an import path (module.Class)"
        return f"{at}there is no class {found[1]};{hint} {allowed}"
    union = r"Union subtypes.* Errors: - (.+) Given value type: .*? Given value: (.+)"
    value = re.search(union, text)
    if at and (why := _of_given_class(text)):
        return f"{at}{why}"
    if at and value:
        return f"{at}{value[2]} is not possible: {', '.join(dict.fromkeys(value[1].split(' - ')))}"
    return text if key else f"{at}{text}"


def _of_unknown_key(name: str, keys: set[str]) -> str:
    """Returns the sentence for a key that the configuration does not have."""
    section, sections = name.partition(".")[0], {key.partition(".")[0] for key in keys}
    near = get_close_matches(name, keys, 1, cutoff=0.8) or get_close_matches(
        section, sections, 1, cutoff=0.8
    )
    hint = f"; did you mean {near[0]}?" if near else ""
    argument = name.split(".")[1] if "." in name else ""
    if argument and section in ("model", "data") and near in ([], [section]):
        # the user's class: its section is known, and not what was meant
        hint = f": this project's {section} has no argument {argument}"
        if argument in OF_TEXT:
            hint += ", which is for the library's language models"
    return f"{name} is not a key of this program{hint}"


def _of_missing(names: list[str], given: Key, kind: type | None) -> str:
    """Returns the sentence for arguments that have no default and are not given."""
    keys = " and ".join(str(given.argument(name)) for name in names)
    are, them = ("are", "them") if names[1:] else ("is", "it")
    owner = "there is" if kind is None else f"{kind.__name__} has"
    return f"{keys} {are} missing: {owner} no default for {them}"


def _of_unknown_argument(name: str, keys: set[str], given: Key, kind: type | None) -> str:
    """Returns the sentence for an argument that a class does not have."""
    known = sorted(key for key in keys - {"help"} if "." not in key)
    near = get_close_matches(name, [*known, "class_path", "init_args"], 1)
    if near:
        key = given.argument(near[0]) if near[0] in known else f"{given}.{near[0]}"
        hint = f"did you mean {key}?"
    else:
        hint = f"it takes {', '.join(known) or 'none'}"
    of = "the class that it is given to" if kind is None else kind.__name__
    return f"{given.argument(name)} is not an argument of {of}; {hint}"


# What pydantic says a value should be, and how cli/ranges.py says it.
BOUNDS = {
    r"greater than or equal to (\S+)": r"\1 or more",
    r"greater than (\S+)": r"more than \1",
    r"less than or equal to (\S+)": r"\1 or less",
    r"less than (\S+)": r"below \1",
    r"a valid integer.*": "an integer",
    r"a valid number.*": "a number",
}


def _of_annotated_types(text: str, given: Key) -> str:
    """Returns the sentence for metadata of the package annotated_types, which jsonargparse gives to
    pydantic if that is installed; "" for another message."""
    message = r'Parser key "([\w.]+)":.*? Input should be (.+?) \[type=.*(?:Got|Given) value: (.+)'
    found = re.search(message, text)
    if found is None:
        return ""
    key, allowed, value = found.groups()
    for words, replacement in BOUNDS.items():
        if re.fullmatch(words, allowed):
            allowed = re.sub(words, replacement, allowed)
            break
    return f"{given.argument(key)} is {value}; give {allowed}"


def _of_given_class(text: str) -> str:
    """Returns what is wrong with a class, which jsonargparse tells among the types that it has
    tried; "" if the message is about something else."""
    path = re.search(r"['\"]class_path['\"]: ['\"]([\w.]+)|Given value: ([\w.]+)$", text)
    given = (path[1] or path[2]) if path else "the class"
    if found := re.search(r"Expected an instantiatable class, but (?:(\S+) )?is abstract", text):
        given = found[1] or given
        methods = sorted(getattr(locate(given), "__abstractmethods__", ()))
        return f"{given} is abstract: give a subclass that defines {', '.join(methods)}"
    if found := re.search(r"Import path (?:(\S+) )?does not correspond to a subclass of", text):
        kinds = re.findall(r"does not correspond to a subclass of (\w+)", text)
        return f"{found[1] or given} is no subclass of {' or '.join(dict.fromkeys(kinds))}"
    if found := re.search(r"Not a valid subclass of \w+\. Got value: (.+?) Subclass types", text):
        return f"{found[1]} is no class: give an import path, or class_path and init_args"
    problem = r"Problem with given class_path '([\w.]+)': (.+?)(?= - | Given value|$)"
    if found := re.search(problem, text):
        return f"{found[1]} cannot be imported: {found[2].rstrip('.')}"
    return ""


class Refused:
    """Creates objects of configured classes, and keeps why the first of them could not be. Other
    classes than those that a key has chosen, which are the project's own, raise what they raise."""

    def __init__(self) -> None:
        self.why = ""

    def construct(self, kind: type, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return kind(*args, **kwargs)
        except Exception as error:
            key = str(key_in_progress())
            if key and not is_disk_full(error) and not is_out_of_memory(error):
                self.why = self.why or self._sentence(key, kind, error)
            raise

    def _sentence(self, key: str, kind: type, error: Exception) -> str:
        if isinstance(error, InputError):
            return str(error)
        why = first_line(error).rstrip(".").replace(". ", "; ")
        if not isinstance(error, ValueError | TypeError | MisconfigurationException):
            why = f"{type(error).__name__}: {why}"
        return f"{key}: {kind.__name__} refuses its arguments: {why}"


def missing_requirement(text: str) -> str | None:
    """Returns what installs the package that a class of Lightning lacks (its loggers); None if
    jsonargparse's message is about something else."""
    lacking = re.search(r"Requirement '([^']+)' not met|No module named '([\w.]+)'", text)
    found = re.search(r"given class_path '([\w.]+)'", text)
    if not lacking or not found:
        return None
    key = re.search(r'Parser key "([\w.]+)"', text)
    package = lacking[1] or lacking[2].partition(".")[0]
    name = found[1].rpartition(".")[2]
    at = f"{key[1]}: " if key else "trainer.logger: " if name.endswith("Logger") else ""
    cure = f"pip install '{package}', or give another class"
    return f"{at}{name} needs the package {re.split('[<>=!~]', package)[0]}: {cure}"


def _below(kind: type) -> Iterator[type]:
    for below in kind.__subclasses__():
        yield below
        yield from _below(below)


def _with_torchs_optimizer(args: list[str]) -> list[str]:
    """Returns the command line with torch's class in place of its bare name after `--optimizer`."""
    found: list[str] = []
    for word in args:
        flag, _, name = word.partition("=")
        if found and found[-1] in OPTIMIZER_FLAGS:
            word = _in_torch(word)
        elif flag in OPTIMIZER_FLAGS and name:
            word = f"{flag}={_in_torch(name)}"
        found.append(word)
    return found


def _in_torch(name: str) -> str:
    """Returns the import path of torch's optimizer; another name unchanged. Other packages that are
    imported may have an optimizer of the same name (DeepSpeed has a Muon), and jsonargparse then
    takes none."""
    if name.startswith("{"):  # a class and its arguments, in one flag
        text = r"""(["']?class_path["']?\s*:\s*["']?)(\w+)\b(?!\.)"""
        return re.sub(text, lambda found: found[1] + _in_torch(found[2]), name, count=1)
    if "." in name or not isinstance(getattr(optim, name, None), type):
        return name
    return f"{optim.__name__}.{name}"


class ConfigFile(ActionConfigFile):
    """A --config file whose strategy replaces the one of an earlier file.

    jsonargparse would merge the arguments that both classes have, such as a timeout. It would also
    drop a key that does not exist if its value is {}."""

    def _refuse_empty_sections(self, content: dict[str, Any], parser: Any, file: str) -> None:
        keys = {action.dest for action in keys_of(parser)}
        sections = {key.rpartition(".")[0] for key in keys if not key.endswith(".help")}
        for path in _empty(content):
            above = {path[: found.start()] for found in re.finditer(r"[.]", path)}
            # below a key whose value is a mapping, names are free
            if path not in sections | keys and not above & (keys - sections):
                text = one_sentence(f"unrecognized arguments: --{path}", keys)
                end = "" if text.endswith("?") else "; see --help for every key"
                raise InputError(f"--config {file}: {text}{end}")

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: Any = None) -> None:
        content: dict[str, Any] = {}
        # jsonargparse reads addresses and mappings
        if "://" not in str(values) and not str(values).startswith("{"):
            content, values = config_file.read(str(values)), str(config_file.locate(str(values)))
        if named := strategy_names.replaced(content):
            content = named
            values = yaml.safe_dump(content)
        if isinstance(content.get("optimizer"), str):
            content["optimizer"] = _in_torch(content["optimizer"])
            values = yaml.safe_dump(content)
        elif isinstance(given := content.get("optimizer"), dict) and "class_path" in given:
            given["class_path"] = _in_torch(str(given["class_path"]))
            values = yaml.safe_dump(content)
        self._refuse_empty_sections(content, parser, str(values))
        strategy = (content.get("trainer") or {}).get("strategy")
        if strategy and (not isinstance(strategy, dict) or "class_path" in strategy):
            cfg["trainer.strategy"] = None
        known = {action.dest for action in keys_of(parser)}  # a run's own config.yaml has fit's
        if skipped := content.keys() & (config_file.OF_SOME_VERBS - known):
            for key in skipped:
                del content[key]
            values = yaml.safe_dump(content)
        super().__call__(parser, cfg, values, option_string)


def _empty(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys whose value is {}."""
    for name, value in content.items():
        if value == {} and isinstance(value, dict):
            yield f"{prefix}{name}"
        elif isinstance(value, dict) and "class_path" not in value:
            yield from _empty(value, f"{prefix}{name}.")


def add_callback(parser: LightningArgumentParser, key: str, plugin: Plugin) -> type:
    """Adds the arguments of a callback of every run, and returns its class. Raises PluginError if
    another package's cannot be configured; one whose constructor fails later is replaced by a
    callback that does nothing."""
    kind = plugin.load()
    if not plugin.is_ours:
        with contained(plugin, "cannot be configured"):
            if not (isinstance(kind, type) and issubclass(kind, Callback)):
                raise TypeError(f"{kind!r:.100} is no subclass of Lightning's Callback")
            alone = LightningArgumentParser(exit_on_error=False)  # each argument needs a default
            alone.add_lightning_class_args(kind, key)
            alone.parse_args([])
    parser.add_lightning_class_args(kind, key)
    if not plugin.is_ours:

        def guarded(instantiate: Callable[[], None], values: Namespace) -> None:
            try:
                with contained(plugin, "cannot be created"):
                    instantiate()
            except PluginError as error:
                note(f"{error}; the run has no {key}")
                values[key] = Callback()

        wrap_instantiation(parser, key, guarded)
    return kind


def as_launched(settings: Namespace) -> None:
    """Sets devices and nodes as the launcher does; passes max_time to the preemption callback."""
    # torchrun's and accelerate's, which may change at an elastic restart; the deepspeed launcher's
    local_size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    if local_size and os.environ.get("WORLD_SIZE"):
        settings.trainer.devices = int(local_size)
        settings.trainer.num_nodes = int(os.environ["WORLD_SIZE"]) // settings.trainer.devices
        if "CROSS_RANK" in os.environ:  # the deepspeed launcher's number of the node
            os.environ.setdefault("NODE_RANK", os.environ["CROSS_RANK"])
    trainer = settings.trainer
    if trainer.max_time is not None:  # Lightning would stop within an accumulation, with code 0
        settings.preemption.max_time, trainer.max_time = trainer.max_time, None


def add_optimization(parser: LightningArgumentParser) -> None:
    """Adds --optimizer and --lr_scheduler, like LightningCLI."""
    for key, (kinds, skipped, text) in OPTIMIZATION.items():
        off: dict[str, Any] = dict.fromkeys(("as_group", "instantiate", "fail_untyped"), False)
        parser.add_subclass_arguments(kinds, key, skip={skipped}, help=text, **off)


def typed_keys(words: Any) -> frozenset[str]:
    """Returns the keys that are flags of a command line, in whichever form."""
    flags = (word for word in words or () if isinstance(word, str) and word.startswith("--"))
    return frozenset(flag[2:].partition("=")[0].replace(".init_args.", ".") for flag in flags)


def flag_values(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields each flag of a command line and its value, also a value without a flag."""
    flag = ""
    for word in words:
        name, has_value, value = word.partition("=")
        if not word.startswith("--"):
            name, value = flag, word
        flag = "" if has_value else name
        yield name, value


def refuse_misread(words: Any, settings: Namespace) -> None:
    """Raises InputError for a flag whose text YAML has read as another number: 010 is 8. Texts and
    times keep what is written."""
    for flag, text in flag_values(word for word in words or () if isinstance(word, str)):
        found = config_file.misread(text)
        if found and isinstance(_value_of(flag.removeprefix("--"), settings), int | float):
            raise InputError(f"{flag} is {found}")


def _value_of(key: str, settings: Any) -> Any:
    """Returns the value of a dotted key, without the init_args of a class; None: there is none."""
    for name in key.split("."):
        if isinstance(settings, Namespace) and "init_args" in settings and name != "init_args":
            settings = settings.init_args
        settings = settings.get(name) if isinstance(settings, Namespace | dict) else None
    return settings


def inherit_rates(settings: Namespace, given: Namespace) -> None:
    """Sets learning rate and weight decay of --optimizer to model.optim's unless they are given."""
    optim = (settings.get("model") or {}).get("optim")  # a class without arguments has no section
    if not settings.get("optimizer") or not hasattr(optim, "learning_rate"):
        return
    arguments, explicit = settings.optimizer.init_args, given.optimizer.get("init_args") or {}
    if "lr" in explicit and isinstance(optim.learning_rate, list):
        raise InputError(
            "model.optim.learning_rate has phases, and --optimizer.lr is given: remove one of them"
        )
    if "lr" in arguments and "lr" not in explicit and optim.learning_rate == AUTO:
        raise InputError(
            "model.optim.learning_rate auto is a rate of AdamW: give --optimizer.lr, or a number"
        )
    if "lr" in arguments and "lr" not in explicit:
        arguments["lr"] = max(values_of(optim.learning_rate))
    if "weight_decay" in arguments and "weight_decay" not in explicit:
        arguments["weight_decay"] = optim.weight_decay

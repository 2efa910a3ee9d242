"""What the classes of a user's mention in their source text. No torch."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache

from .configured import LIBRARIES

GRADIENTS = {"grad", "grad_norm", "clip_grad_norm_", "parameters", "named_parameters"}
BEFORE_TRAINING = {"__init__", "setup", "prepare_data", "configure_model", "configure_optimizers"}
BEFORE_TRAINING |= {"build_config", "build_model", "build_network"}
SETTERS = {"data", "load_state_dict", "swap_tensors"}  # besides torch's names such as clamp_
WEIGHTS = {"parameters", "named_parameters", "weight", "bias", "load_state_dict"}


class Code:
    """What the methods of a user's classes mention: those that run, which is the first in the order
    of the classes, and the next one where it calls `super()`'s."""

    def __init__(self, classes: list[ast.ClassDef]) -> None:
        self._methods: dict[str, list[ast.FunctionDef]] = {}
        for each in classes:
            for node in each.body:
                if isinstance(node, ast.FunctionDef):
                    chain = self._methods.setdefault(node.name, [])
                    if not chain or node.name in _names_in(chain[-1].body):
                        chain.append(node)
        every = [method for chain in self._methods.values() for method in chain]
        self.names = {name for method in every for name in _names_in(method.body)}
        calls = (
            node for method in every for node in ast.walk(method) if isinstance(node, ast.Call)
        )
        # without `self.`: a method of the user's may have the name of a function
        self.calls = {ast.unparse(call.func) for call in calls}

    def calls_original(self, hook: str) -> bool:
        """Returns whether the hook calls the library's, or hands the module to other code."""
        chain = self._methods.get(hook, [])
        reaches = bool(chain) and _reaches(hook, chain[-1])
        return reaches or self.hands_on_module(hook)

    def extends(self, hook: str) -> bool:
        """Returns whether the hook calls the library's, or was put into the class from outside."""
        return hook not in self._methods or self.calls_original(hook)

    def hands_on_module(self, hook: str, names: tuple[str, ...] = ("self",)) -> bool:
        """Returns whether the hook gives `self`, or what else is in `names`, to a function."""
        return any(
            isinstance(each, ast.Name) and each.id in names
            for method in self._methods.get(hook, [])
            for node in ast.walk(method)
            if isinstance(node, ast.Call)
            for each in _given(node)
        )

    def passes_on(self, key: str) -> bool:
        """Returns whether the value of an argument of the module is used as a whole."""
        return any(
            _is_used(key, statement)
            for chain in self._methods.values()
            for method in chain
            for statement in method.body
        )

    def reads_gradients(self, hook: str) -> bool:
        """Returns whether the hook reads gradients, or hands the module to other code."""
        return bool(GRADIENTS & self.read_names(hook)) or self.hands_on_module(hook)

    def may_change_weights(self) -> bool:
        """Returns whether a method that runs in training changes tensors in place, or hands the
        module to other code; a callback's code too."""
        hooks, given = self._methods.keys() - BEFORE_TRAINING, ("self", "pl_module")
        return any(self._sets(hook) or self.hands_on_module(hook, given) for hook in hooks)

    def changes_weights_in(self) -> str:
        """Returns a method that runs in training, mentions weights, and changes tensors in place;
        "" if there is none."""
        hooks = sorted(self._methods.keys() - BEFORE_TRAINING)
        return next((hook for hook in hooks if self._sets(hook) & self._reads(hook)), "")

    def _sets(self, hook: str) -> bool:
        attributes = {
            node.attr
            for method in self._methods.get(hook, [])
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute)
        }
        return bool(SETTERS & attributes) or any(map(_is_in_place, attributes))

    def _reads(self, hook: str) -> bool:
        return bool(WEIGHTS & self.read_names(hook))

    def read_names(self, hook: str) -> set[str]:
        """Returns the names that the hook's body mentions."""
        return {name for method in self._methods.get(hook, []) for name in _names_in(method.body)}


def _is_in_place(name: str) -> bool:
    """Returns whether torch would give the name to a method that changes its tensor."""
    return name.endswith("_") and name.isidentifier() and not name.startswith("_")


def _is_used(key: str, statement: ast.stmt) -> bool:
    """Returns whether a statement reads what is called `key`, other than to read an attribute of it
    or to pass it to the base class's constructor."""
    ignored = set[int]()
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute):
            ignored.add(id(node.value))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
            ignored |= {id(each) for each in _given(node)}
    for node in ast.walk(statement):
        is_attribute = isinstance(node, ast.Attribute) and node.attr == key
        is_name = isinstance(node, ast.Name) and node.id == key
        if (is_attribute or is_name) and id(node) not in ignored:
            if isinstance(getattr(node, "ctx", None), ast.Load):
                return True
    return False


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _names_in(body: list[ast.stmt]) -> set[str]:
    return {name for statement in body for name in _names(statement)}


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def code_of(kind: type) -> Code | None:
    """Returns the source of the classes of `kind` that are no library's; None if it is not
    available, or if something decorates a class."""
    classes = []
    for each in kind.__mro__:
        if each is object or each.__module__.partition(".")[0] in LIBRARIES:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        except (OSError, TypeError, SyntaxError, IndexError):
            return None
        if not isinstance(tree, ast.ClassDef) or tree.decorator_list:
            return None
        classes.append(tree)
    return Code(classes)


def _reaches(hook: str, method: ast.FunctionDef) -> bool:
    """Returns whether a method mentions `hook` of something that is no argument and no result of a
    computation, as `loss.backward()` is: of super(), of a class, of what was made of them."""
    taken = method.args
    arguments = {each.arg for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}
    for node in ast.walk(method):
        if not isinstance(node, ast.Attribute) or node.attr != hook:
            continue
        owner = node.value
        if isinstance(owner, ast.Call):
            owner = owner.func  # of super()
        if isinstance(owner, ast.Attribute):
            return True
        if isinstance(owner, ast.Name) and (owner.id == "self" or owner.id not in arguments):
            return True
    return False

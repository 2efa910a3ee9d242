"""What an API server, or the first pods, would complain about in manifests of Kubernetes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import referencing
from kubernetes_validate import utils

from tests.support.crds import SCHEMAS

VERSION = "1.37.0"
FOLDER = f"kubernetes-json-schema/v{VERSION}-local-strict"
# Below these the keys are a site's own words.
OF_SITES = {"labels", "annotations", "nodeSelector", "requests", "limits", "selector"}
QUANTITIES = {"requests", "limits"}
Objects = list[dict[str, Any]]


@cache
def validator(kind: str, api: str) -> Any:
    """Kubernetes' own strict schema, or the vendored one of a custom resource."""
    vendored = SCHEMAS / f"{kind}.json"
    group, _, version = api.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.split(".")[0], version)))
    if vendored.exists():
        schema = json.loads(vendored.read_text(encoding="utf-8"))
    else:
        schema = utils.schema_contents(f"{FOLDER}/{name}.json", VERSION)
    return jsonschema.Draft202012Validator(schema, registry=definitions())


@cache
def definitions() -> Any:
    resource = referencing.Resource.from_contents(
        utils.schema_contents(f"{FOLDER}/_definitions.json", VERSION)
    )
    named = [("/api/_definitions.json", resource), (resource.id(), resource)]
    return (
        referencing.Registry().with_resources(named).crawl()
    )  # otherwise each look-up reads 1.3 MB again


def wrong(objects: Objects) -> str:
    """The first error; "" without one."""
    for one in objects:
        kind, api = one.get("kind"), one.get("apiVersion")
        if not isinstance(kind, str) or not isinstance(api, str):
            return "it has no kind"
        try:
            known = validator(kind, api)
        except FileNotFoundError:
            return f"{api} has no {kind}"
        for error in known.iter_errors(one):
            return f"{kind}.{'.'.join(map(str, error.absolute_path))}: {error.message}"
    return ""


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from paths(one, (*path, key))


def mutations(objects: Objects) -> Iterator[tuple[str, Objects]]:
    """Copies of the manifests in each of which one field is misspelt, or has a value of another
    type."""
    for path in paths(objects):
        if len(path) == 1:
            continue
        name, is_site = ".".join(map(str, path)), bool(OF_SITES & set(path[:-1]))
        if isinstance(path[-1], str) and not is_site:
            changed, holder = copied(objects, path)
            holder[f"{path[-1]}x"] = holder.pop(path[-1])
            yield f"{name} is misspelt", changed
        for other in (17, "text", True, [], {}):
            changed, holder = copied(objects, path)
            may_be_a_number = other == 17 and other is not True and path[-2] in QUANTITIES
            if type(holder[path[-1]]) is not type(other) and not may_be_a_number:
                holder[path[-1]] = other
                yield f"{name} is {other!r}", changed


def copied(objects: Objects, path: tuple[Any, ...]) -> tuple[Objects, Any]:
    changed: Any = copy.deepcopy(objects)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    return changed, holder


def pods(value: Any) -> list[dict[str, Any]]:
    """The templates of all pods in manifests."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = [pod for one in inner for pod in pods(one)]
    return [value] if isinstance(value, dict) and "containers" in value.get("spec", {}) else found

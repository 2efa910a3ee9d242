"""Makes the schemas of tests/support/schemas/ from the CustomResourceDefinitions of a release.

    python -m tests.support.crds jobset.x-k8s.io_jobsets.yaml …

Unknown fields are errors, pods and Jobs refer to Kubernetes' own schemas, texts and `status` are
left out. Source, of the Apache License 2.0: kubernetes-sigs/jobset v0.12.0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parent / "schemas"
KEPT = {"type", "enum", "required", "minimum", "maximum", "pattern", "anyOf"}
OF_KUBERNETES = "/api/_definitions.json#/$defs/io.k8s."


def strict(node: dict[str, Any]) -> dict[str, Any]:
    inner = node.get("properties", {})
    if "containers" in inner.get("spec", {}).get("properties", {}):
        return {"$ref": f"{OF_KUBERNETES}api.core.v1.PodTemplateSpec"}
    if "completionMode" in inner.get("spec", {}).get("properties", {}):
        return {"$ref": f"{OF_KUBERNETES}api.batch.v1.JobTemplateSpec"}
    found = {key: value for key, value in node.items() if key in KEPT}
    if inner:
        found["properties"] = {name: strict(one) for name, one in inner.items() if name != "status"}
        found["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            found[key] = strict(node[key])
    return found


def main(paths: list[str]) -> None:
    for path in paths:
        definition = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["spec"]
        for version in definition["versions"]:
            if not version["storage"]:
                continue
            schema = strict(version["schema"]["openAPIV3Schema"])
            kind, api = definition["names"]["kind"], f"{definition['group']}/{version['name']}"
            schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
            schema["properties"] |= {"apiVersion": {"enum": [api]}, "kind": {"enum": [kind]}}
            meta = f"{OF_KUBERNETES}apimachinery.pkg.apis.meta.v1.ObjectMeta"
            schema["properties"]["metadata"] = {"$ref": meta}
            (SCHEMAS / f"{kind}.json").write_text(json.dumps(schema) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

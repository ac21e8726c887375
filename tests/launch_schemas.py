"""Compares `scripts/cluster/kuberay.yaml` with the schema that a version of KubeRay installs.

    python tests/launch_schemas.py ray.io_rayjobs.yaml

No test: it needs a file of KubeRay (helm-chart/kuberay-operator/crds/). The exit status is 1 where something
does not fit.
"""

import sys
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

FILE = Path(__file__).parents[1] / "scripts/cluster/kuberay.yaml"


def refuse_unknown_fields(schema: Any) -> Any:
    """Returns the schema as Kubernetes reads it: a field that it does not name is wrong."""
    if isinstance(schema, list):
        return [refuse_unknown_fields(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: refuse_unknown_fields(value) for key, value in schema.items()}
    if strict.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
    if strict.get("type") == "object" and "properties" in strict:
        strict.setdefault("additionalProperties", False)
    return strict


def main(path: Path) -> int:
    definition = yaml.safe_load(path.read_text())["spec"]
    versions = {f"{definition['group']}/{one['name']}": one["schema"] for one in definition["versions"]}
    status = 0
    for document in yaml.safe_load_all(FILE.read_text()):
        if document["kind"] != definition["names"]["kind"]:
            continue
        schema = refuse_unknown_fields(versions[document["apiVersion"]]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        problems = list(Draft202012Validator(schema).iter_errors(document))
        for problem in problems:
            print(f"{'.'.join(map(str, problem.path))}: {problem.message}")
        print(f"{document['kind']} {document['metadata']['name']}: {len(problems)} problems")
        status |= bool(problems)
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

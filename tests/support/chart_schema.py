"""The schema of the chart's value `config`, made from the server's settings.

`python -m tests.support.chart_schema` writes it into values.schema.json.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from recserve.config import ServerConfig
from recserve.experiments.settings import ArmSettings, ExperimentSettings, GuardSettings
from tests.support.paths import ROOT

FILE = ROOT / "deploy" / "helm" / "recserve" / "values.schema.json"
# The chart sets the first ones itself. The keys belong into its secret.
NOT_VALUES = ("host", "port", "bundle", "device", "journal", "experiments_dir")
SECRETS = ("api_keys", "signing_key")
REQUIRED = ("drain_delay_s", "drain_timeout_s", "threads")  # the templates read them
NUMBER = r"^-?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?$"  # `helm --set` makes a text of a fraction
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def config_schema() -> dict[str, Any]:
    """Returns the schema of `config`: every setting of the server, and nothing else."""
    fields = ServerConfig.model_json_schema()["properties"]
    refused = dict.fromkeys((*NOT_VALUES, *SECRETS), False)
    values = {n: refused.get(n, _value(field)) for n, field in fields.items()}
    experiment = _names(ExperimentSettings)
    experiment["properties"]["arms"] = {"type": "array", "items": _names(ArmSettings)}
    experiment["properties"]["guard"] = _names(GuardSettings)
    values["experiments"] = {"type": "array", "items": experiment}
    return {**_closed(values), "required": list(REQUIRED)}


def _names(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Returns a schema of the names of a message. The server checks the values."""
    return _closed({name: {} for name in kind.__struct_fields__})


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _value(field: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of one setting as YAML or `helm --set` writes it. Helm drops nulls."""
    kinds = [_kind(one) for one in field.get("anyOf", [field]) if one.get("type") != "null"]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _kind(field: dict[str, Any]) -> dict[str, Any]:
    if "enum" in field or "const" in field:
        return {"enum": field.get("enum", [field.get("const")])}
    match field["type"]:
        case "number":
            bounds = {name: field[name] for name in BOUNDS if name in field}
            return {"type": ["number", "string"], **bounds, "pattern": NUMBER}
        case "array":
            return {"type": ["array", "string"], "items": {"type": field["items"]["type"]}}
    kept = ("type", *BOUNDS, "pattern", "minLength", "maxLength")
    return {key: field[key] for key in kept if key in field}


def main() -> None:
    """Writes the schema of `config` into the chart, a setting per line."""
    before, _, rest = FILE.read_text().partition('    "config": {')
    after = rest[rest.index('    "secret": {') :]
    schema = config_schema()
    lines = [f"        {json.dumps(n)}: {json.dumps(v)}" for n, v in schema["properties"].items()]
    own = ",\n".join(lines)
    FILE.write_text(
        f'{before}    "config": {{\n      "type": "object",\n      "additionalProperties": false,\n'
        f'      "properties": {{\n{own}\n      }},\n'
        f'      "required": {json.dumps(schema["required"])}\n    }},\n{after}'
    )


if __name__ == "__main__":
    main()

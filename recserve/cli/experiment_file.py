"""Reads the options of `recserve ab` from a YAML file."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import typer

from recserve.cli.flags import yaml_mapping

# What an arm in a file may say besides its request fields.
ARM_KEYS = ("name", "url", "fields")


def read_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Uses the values of a file as defaults of a command's options.

    Args:
        context: Context of the command; the file sets its default map.
        path: YAML file with one key per option; None changes nothing.

    Raises:
        BadParameter: If the file cannot be read, or a key is no option of the command.
    """
    if path is None:
        return None
    found = yaml_mapping(path, "--config")
    given = {str(key).replace("-", "_"): value for key, value in found.items()}
    arms = given.pop("arms", None)
    if arms is not None:
        given["arm"] = [_arm(arm, path) for arm in _check_arms(arms, path)]
    known = [str(parameter.name) for parameter in context.command.params]
    for name in given:
        if name not in known or name == "config":
            near = difflib.get_close_matches(name, [*known, "arms"], 1)
            hint = f"; did you mean {near[0]}?" if near else f"; keys are arms, {', '.join(known)}"
            raise typer.BadParameter(f"{path}: unknown key {name}{hint}", param_hint="--config")
    if isinstance(given.get("fields"), dict):
        given["fields"] = json.dumps(given["fields"])
    context.default_map = {**(context.default_map or {}), **given}
    return path


def _check_arms(arms: Any, path: Path) -> list[Any]:
    if not isinstance(arms, list) or len(arms) < 2:
        raise typer.BadParameter(
            f"{path}: arms: expected a list of at least two arms", param_hint="--config"
        )
    return arms


def _arm(arm: Any, path: Path) -> str:
    """Returns an arm as `NAME=JSON`, the form of the option `--arm`."""
    if isinstance(arm, str):
        return arm
    if not isinstance(arm, dict) or not set(arm) <= set(ARM_KEYS) or "name" not in arm:
        raise typer.BadParameter(
            f"{path}: arms: expected name, and optionally url and fields, got {arm!r}",
            param_hint="--config",
        )
    fields = dict(arm.get("fields") or {})
    if "url" in arm:
        fields["url"] = arm["url"]
    return f"{arm['name']}={json.dumps(fields)}"

"""Strict sections of settings, from YAML and from Python alike, and errors that name the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from typing_extensions import Self

from ghostexport.errors import RecipeError

#: Validation context of a whole recipe: its sections leave the explaining to its reader.
WHOLE = "recipe"


class Section(BaseModel):
    """Validated alike from YAML and from Python; lists count as tuples.

    Raises:
        RecipeError: an unknown key or a wrong value; the message names the valid ones and the nearest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    resolved: ClassVar[tuple[str, ...]] = ()  #: keys that are read and resolved into others
    whole: ClassVar[bool] = False  #: its keys are sections

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, data: Any, handler: Callable[[Any], Self], info: Any) -> Self:
        if isinstance(data, dict):
            data = {key: _tupled(value) for key, value in data.items()}
        if info.context == WHOLE:
            return handler(data)
        try:
            return handler(data)
        except ValidationError as error:
            raise RecipeError("\n".join(explain(cls, cls.__name__, e) for e in error.errors())) from None


def require_name(name: str, valid: Iterable[str], what: str) -> str:
    """Returns ``name``, or raises RecipeError with the nearest valid name when it is not in ``valid``."""
    valid = tuple(valid)
    if name not in valid:
        near = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise RecipeError(f"Unknown {what} {name!r}.", f"{hint}Valid: {', '.join(valid)}.")
    return name


def require_each_once(names: tuple[str, ...], kinds: Iterable[str], valid: Iterable[str], what: str) -> tuple[str, ...]:
    for kind in kinds:
        require_name(kind, valid, what)
    if len(set(names)) != len(names):
        raise RecipeError(f"{what}s are named twice: {', '.join(names)}.", "Name each once.")
    return names


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, list | tuple) else value


def explain(root: Any, origin: str, error: Any) -> str:
    """One line about an error of pydantic: where in ``root``, a section or a model of sections, and what is valid."""
    levels = 2 if root.whole else 1  # below a key, words name members of a union
    path = ".".join(str(part) for depth, part in enumerate(error["loc"]) if depth < levels or isinstance(part, int))
    if error["type"] != "extra_forbidden":
        return f"{origin}: {path or 'recipe'}: {error['msg']} (got {error['input']!r})"
    for part in error["loc"][:-1]:
        root = root.model_fields[part].annotation
    valid = (*root.model_fields, *root.resolved)
    near = difflib.get_close_matches(str(error["loc"][-1]), valid, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{origin}: unknown key {path!r}.{hint} Valid: {', '.join(valid)}."

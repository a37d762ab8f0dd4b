"""by_name: a dotted path `package.module:Name` of a config, and settings -> the object that they name.

Every class and function that a user may write is opened here, in his own folder or in Troupe's: workflows, credit rules, estimators,
tests of the gate, retrievers, engines, figures, extensions. What is wrong with a path or its settings is one line with place and fix.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

from stores.team_code import MODULE, TROUPE, import_module, is_installed

HEAVY = ("torch", "vllm", "ray", "deepspeed", "transformers")
"""Libraries that may not be loaded where configs are parsed: by the command line's help, and by Airflow each minute."""

_loaded_by: WeakKeyDictionary[ModuleType, list[str]] = WeakKeyDictionary()
"""The heavy libraries that each module loaded when it was opened first: a second time it is in memory, and loads nothing."""
_OF_EXTENSION = re.compile(r"(pipelines|serve_apps|train_loops)\.extensions\.\w+")


def open_by_name(
    path: str, *, place: str, wanted: str = "", fits: Callable[[Any], bool] | None = None, is_parsing: bool = False
) -> Any:
    """Imports what `package.module:Name` names.

    Args:
        place: the key of the config that holds the path, for messages; empty where the caller names it.
        wanted: what the object must be, in words with an article.
        fits: tells whether it is that.
        is_parsing: whether this is the parsing of a config, where no heavy library may be loaded.

    Raises:
        ValueError: with place and fix, where the path has another form, does not import, has no such name or is of another kind.
        OSError: as the module raised it.
    """
    at = f"{place}: " if place else ""
    module_name, _, name = path.partition(":")
    if not MODULE.fullmatch(module_name) or not name:
        raise ValueError(f"{at}{path!r} is not of the form 'package.module:Name'")
    loaded = set(sys.modules)
    module = _imported(module_name, path, at)
    heavy = _loaded_by.setdefault(module, [library for library in HEAVY if library in sys.modules.keys() - loaded])
    if is_parsing and heavy:
        raise ValueError(
            f"{at}importing {module_name!r} ({getattr(module, '__file__', None)}) loads {', '.join(heavy)}, which takes seconds "
            "wherever this config is read: import it within the function that needs it"
        )
    try:
        found = getattr(module, name)
    except AttributeError:
        raise ValueError(f"{at}{_about(module, module_name, name)}") from None
    if fits is not None and not fits(found):
        raise ValueError(f"{at}{path!r} is {_kind(found)}, and must be {wanted}")
    return found


def construct(
    path: str,
    settings: Mapping[str, Any],
    *,
    place: str,
    wanted: str = "a class or function",
    fits: Callable[[Any], bool] = callable,
) -> Any:
    """Calls the class or function that a config names with its settings, which are checked before.

    Args:
        place: the section of the config with the keys `path` and `settings`.

    Raises:
        ValueError: as `open_by_name` and `check_settings` do, and whatever else the user's code raises, with its line.
        OSError: as the class raised it.
    """
    make = open_by_name(path, place=f"{place}.path", wanted=wanted, fits=fits)
    check_settings(make, settings, place=f"{place}.settings")
    try:
        return make(**settings)
    except TypeError as error:
        raise ValueError(f"{place}.settings: {path} does not take them: {error}{line_of(error)}") from error
    except (ValueError, OSError):
        raise
    except (Exception, SystemExit) as error:
        raise _failed(path, f"{place}: ", error) from error


def check_settings(make: Callable[..., Any], settings: Mapping[str, Any], *, place: str) -> None:
    """Raises ValueError, with place and fix, for settings that a class or function does not take: as for a section of a config.

    Keys are compared with its parameters, and values with their annotations, as JSON: a list fits a tuple, 1 fits a float, and "1" and
    true fit no number. Parameters without an annotation, or with one that no JSON value could fit, take anything.
    """
    try:
        parameters = inspect.signature(make, follow_wrapped=False).parameters  # a decorator may supply some itself
    except ValueError:  # what is written in C may have none
        return
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    name = getattr(make, "__qualname__", repr(make))
    for key in settings.keys() - known.keys():
        if not takes_any:
            raise ValueError(f"{place}: unknown key {key!r}: {_meant(key, list(known), name)}")
    if missing := [key for key, it in known.items() if it.default is it.empty and key not in settings]:
        raise ValueError(f"{place}: {', '.join(map(repr, missing))} missing: {name} needs it")
    hints = _hints(make)
    for key, value in settings.items():
        if key in known and key in hints and not _is_same(value, known[key].default):
            _check_value(value, hints[key], f"{place}.{key}")


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _check_value(value: Any, annotation: Any, place: str) -> None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON has one kind of number
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError(f"{place}: {value} is no finite number: give one, or leave the key out") from None
    except TypeError:
        return  # an object of a caller in Python, and none of a config
    try:
        adapter = TypeAdapter(annotation)
        if not _holds_code(adapter.core_schema):
            adapter.validate_json(text, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        inner = "".join(f".{part}" for part in fault["loc"] if isinstance(part, int) or part in str(value))
        reason = fault["msg"].removeprefix("Value error, ")
        raise ValueError(f"{place}{inner}: {reason} (got {fault['input']!r})") from None
    except (PydanticUserError, PydanticUndefinedAnnotation):
        return


def _holds_code(schema: Any) -> bool:
    """Returns whether a function or a class fits somewhere, which a config can only name by a text."""
    if isinstance(schema, Mapping):
        return schema.get("type") in ("callable", "is-subclass") or any(map(_holds_code, schema.values()))
    return isinstance(schema, (list, tuple)) and any(map(_holds_code, schema))


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    """Returns the annotations of parameters; none where they name what only a type checker imports."""
    try:
        return get_type_hints(make.__init__ if isinstance(make, type) else make, include_extras=True)  # type: ignore[misc]
    except Exception:  # noqa: BLE001 - an annotation as text is any expression
        return {}


def _imported(module_name: str, path: str, at: str) -> Any:
    try:
        return import_module(module_name)
    except ImportError as error:
        is_missing = f"{module_name}.".startswith(f"{error.name}.")  # itself, or the package that it is in
        where = is_missing and (
            _without_extension(module_name, error.name)
            or _found_below(module_name)
            or _like(module_name, [file.stem for file in Path().glob("*.py")])
        )
        raise ValueError(f"{at}cannot import {module_name!r} ({error}): {where or 'is it on PYTHONPATH?'}") from error
    except OSError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(path, at, error) from error


def how_to_get(package: str) -> str:
    """Returns what to do about one of Troupe's own extensions, `pipelines.extensions.NAME`, that is not there."""
    folder = package.replace(".", "/")
    return (
        f"the extension {package.rpartition('.')[2]!r} is not installed; it comes with troupe-rl: install that again, or put {folder}/ "
        "back"
    )


def check_extension(package: str, *, place: str) -> None:
    """Raises ValueError, which says how to get it, where one of Troupe's own extensions is not there."""
    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # nor is the folder of all extensions
        found = None
    if found is None:
        raise ValueError(f"{place}: {how_to_get(package)}")


def _without_extension(module_name: str, missing: str | None) -> str:
    """Says how to get the extension that a module is of; empty where it is of none, or the extension is there."""
    package = _OF_EXTENSION.match(module_name)
    return how_to_get(package[0]) if package is not None and f"{package[0]}.".startswith(f"{missing}.") else ""


def _failed(path: str, at: str, error: BaseException) -> ValueError:
    """Returns the refusal of a user's code that raised: to whoever reads a config that is a fault of the config."""
    return ValueError(
        f"{at}{path!r} does not load ({type(error).__name__}: {error}{line_of(error)}): variables, files and packages "
        "that a module needs when it is imported must be where it is used"
    )


def line_of(error: BaseException) -> str:
    """Returns ", FILE line N": where the user's own code was when this was raised; empty where it ran none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    return f", {Path(own[-1].filename).name} line {own[-1].lineno}" if own else ""


def _is_own(filename: str) -> bool:
    folder = Path(filename).parent
    of_troupe = any(folder.is_relative_to(Path(__file__).parents[1] / package) for package in TROUPE)
    return not (filename.startswith("<") or of_troupe or is_installed(folder))


def _about(module: Any, module_name: str, name: str) -> str:
    """Says which file or folder was imported, and what it has in place of `name`."""
    if getattr(module, "__file__", None) is None and (folders := list(getattr(module, "__path__", ()))):
        where = _found_below(module_name) or "name a module in it, or put the code into its __init__.py"
        return f"{module_name!r} is the folder {folders[0]}, which is no module and has no {name!r}: {where}"
    public = [n for n in vars(module) if not n.startswith("_")]
    found = f" ({file})" if (file := getattr(module, "__file__", None)) else ""
    meant = _like(name, public) or f"it has {', '.join(public[:20]) or 'no public name'}"
    return f"{module_name!r}{found} has no {name!r}; {meant}"


def _found_below(module_name: str) -> str:
    """Says in which folder below this one the module lies, and so where to start troupe; empty where it is in none."""
    stem = module_name.replace(".", "/")
    files = [file for form in (f"{stem}.py", f"{stem}/__init__.py") for file in sorted(Path().glob(f"*/{form}"))]
    return f"{files[0]} has that name, so start troupe in its folder (cd {files[0].parts[0]})" if files else ""


def _kind(found: Any) -> str:
    return f"the class {found.__qualname__}" if isinstance(found, type) else f"of type {type(found).__name__}"


def _like(name: str, known: list[str]) -> str:
    nearest = get_close_matches(name, known, n=1)
    return f"did you mean {nearest[0]!r}?" if nearest else ""


def _meant(key: str, known: list[str], name: str) -> str:
    return _like(key, known) or f"{name} takes {', '.join(known) or 'none'}"

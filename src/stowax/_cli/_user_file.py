"""Finds the step that `FILE.py:FUNCTION` names, or says what to type instead.

Everything that can be wrong with it is the user's to mend, so every error names the
file, the line and the next thing to write; none shows stowax's own frames.
"""

import difflib
import importlib.util
import inspect
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .._errors import StowaxError
from .._where import OWN_FOLDER

_INSTEAD = "Write FILE.py:FUNCTION, such as train.py:make."
_CONTRACT = (
    "It has to take no argument and return (step, args): the training step, and a "
    "tuple of its arguments."
)
_OF_BATCH = (
    "It has to take the batch size and return (step, args): the training step, and a "
    "tuple of its arguments for a batch of that size."
)
_MOST_LINES = 12  # of an exception's own message


class UserFileError(StowaxError, ValueError):
    """The user's file or function cannot be used; the message says what to do."""


def load_step(where: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step and its arguments that the function named by `where` returns.

    **Arguments:** `where` reads `FILE.py:FUNCTION`. The file's folder and the current
    one are put on `sys.path`, as `python FILE.py` would.

    **Raises:** `UserFileError` for whatever stands in the way.
    """
    path, function_name = _split(where)
    module = _load(path)
    function = _function(module, function_name, path)
    try:
        result = function()
    except (Exception, SystemExit) as error:
        said = where_it_failed(error, path)
        raise UserFileError(f"{function_name} in {path} failed.\n{said}") from error
    return _step_and_args(result, f"{function_name} in {path}")


def load_step_of_batch(
    where: str,
) -> Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The function named by `where`, which takes a batch size: for `stowax.fit`.

    **Arguments:** as for `load_step`.

    **Raises:** `UserFileError` for whatever stands in the way, also when it is called.
    """
    path, function_name = _split(where)
    module = _load(path)
    function = _function(module, function_name, path, _OF_BATCH, wants=1)

    def step_of_batch(batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        try:
            result = function(batch)
        except (Exception, SystemExit) as error:
            said = where_it_failed(error, path)
            raise UserFileError(
                f"{function_name} in {path} failed for a batch of {batch}.\n{said}"
            ) from error
        return _step_and_args(result, f"{function_name} in {path}", _OF_BATCH)

    return step_of_batch


def where_it_failed(
    error: BaseException, path: str | os.PathLike[str] | None = None
) -> str:
    """`file:line: Type: message` of an exception, the line in the user's code.

    **Arguments:** `path` is the user's file, if there is a preferred one; else the
    innermost frame outside installed packages and stowax is taken.
    """
    message = str(error).strip()
    # JAX's messages go on with advice after the first paragraph; the first says it.
    lines = message.partition("\n\n")[0].splitlines()[:_MOST_LINES]
    said = f"{type(error).__name__}: " + "\n".join(lines) if lines else repr(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if path is not None and _same(f.filename, path)]
    own = own or [frame for frame in frames if _is_users(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}: {said}" if own else said


def _same(one: str, other: str | os.PathLike[str]) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _is_users(filename: str) -> bool:
    library = os.path.dirname(os.__file__)
    return not (
        filename.startswith(("<", OWN_FOLDER, library))
        or "site-packages" in pathlib.Path(filename).parts
    )


def _split(where: str) -> tuple[pathlib.Path, str]:
    file, colon, function = where.rpartition(":")
    if not colon or not file or not function:
        file = file or function
        if function and pathlib.Path(function).is_file():
            path = pathlib.Path(function)
            names = _names_in_source(path)
            near = f" The file has {_listed(names)}." if names else ""
            raise UserFileError(f"{where!r} names no function. {_INSTEAD}{near}")
        raise UserFileError(f"{where!r} is not FILE.py:FUNCTION. {_INSTEAD}")
    path = pathlib.Path(file)
    if path.is_dir():
        raise UserFileError(f"{file} is a folder. {_INSTEAD}")
    if not path.is_file():
        raise UserFileError(_no_file(path))
    return path, function


def _no_file(path: pathlib.Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"{path} does not exist: there is no folder {folder}."
    names = sorted(file.name for file in folder.glob("*.py"))
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    hint = (
        f" Nearest: {', '.join(str(folder / name) for name in near)}." if near else ""
    )
    return f"{path} does not exist.{hint}"


def _load(path: pathlib.Path) -> ModuleType:
    for folder in (os.getcwd(), str(path.absolute().parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    # Its own name, so that its classes can be found again; but never another module's.
    name = path.stem if path.stem not in sys.modules else f"stowax_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise UserFileError(f"{path} is no Python file. {_INSTEAD}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        said = where_it_failed(error, path)
        raise UserFileError(f"{path} cannot be imported.\n{said}") from error
    return module


def _function(
    module: ModuleType,
    name: str,
    path: pathlib.Path,
    contract: str = _CONTRACT,
    wants: int = 0,
) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if found is None:
        names = _own_functions(module)
        if not names:
            raise UserFileError(f"{path} has no function {name}, nor any other.")
        near = difflib.get_close_matches(name, names, n=len(names), cutoff=0.0)
        ordered = [*near, *(other for other in names if other not in near)]
        raise UserFileError(
            f"{path} has no function {name}. It has {_listed(ordered)}."
        )
    if not callable(found):
        raise UserFileError(
            f"{name} in {path} is no function but {type(found).__name__}. {contract}"
        )
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return found
    wanted = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(wanted) > wants:
        raise UserFileError(
            f"{name} in {path} wants arguments ({', '.join(wanted)}). {contract}"
        )
    if wants and not any(p.kind is not p.KEYWORD_ONLY for p in parameters):
        raise UserFileError(f"{name} in {path} takes no argument. {contract}")
    return found


def _own_functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]


def _names_in_source(path: pathlib.Path) -> list[str]:
    import ast

    try:
        tree = ast.parse(path.read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _step_and_args(
    result: Any, who: str, contract: str = _CONTRACT
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    got = type(result).__name__
    if isinstance(result, tuple) and len(result) != 2:
        got = f"a tuple of {len(result)}"
    elif isinstance(result, tuple):
        step, args = result
        if callable(step) and isinstance(args, tuple | list):
            return step, tuple(args)
        if not callable(step):
            got = f"({type(step).__name__}, ...), and {type(step).__name__} is no step"
        else:
            got = f"(step, {type(args).__name__})"
    raise UserFileError(f"{who} returned {got}. {contract}")

"""The house plan, held: which module may import which, what may touch JAX's internals.

The plan is data (`LAYERS` and the sets below it); `violations` reads a package's
imports from its source and says what breaks the plan. A new module needs a place in it.
The second half of the file plants violations and sees each of them caught.
"""

import ast
import dataclasses
import pathlib
import textwrap

import pytest

import stowax
from house_plan import LAYERS, SHIMS, WITHOUT_JAX

JAX = {"jax", "jaxlib", "flax", "optax", "equinox"}

INTERNALS = ("jax._src", "jax.extend", "jax.experimental", "jaxlib")

MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 70  # without its docstring

SOURCE = pathlib.Path(stowax.__file__).parent
REPOSITORY = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Import:
    """`target` is dotted, with a dot in front if it is ours: "._planner._model"."""

    source: str
    line: int
    target: str

    @property
    def unit(self):
        """The module or package directly below the package that is imported."""
        return self.target.split(".")[1] or "__init__"


def module_name(path, package):
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def unit_of(name):
    return name.split(".")[0]


def imports_of(path, package):
    """Every import in the file, also inside functions and under TYPE_CHECKING."""
    name = module_name(path, package)
    here = path.parent.relative_to(package).parts
    for node in ast.walk(ast.parse(path.read_text())):
        for target in targets_of(node, here, package):
            yield Import(name, node.lineno, target)


def targets_of(node, here, package):
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield localized(alias.name, package)
    elif isinstance(node, ast.ImportFrom):
        if node.level:
            above = here[: len(here) - (node.level - 1)]
            base = ["", *above, *(node.module or "").split(".")]
            base = [base[0], *filter(None, base[1:])]
        else:
            base = localized(node.module, package).split(".")
        for alias in node.names:
            yield local_target([*base, alias.name], package)
    elif isinstance(node, ast.Attribute):
        # `import jax; jax.experimental.multihost_utils` needs no import statement.
        if isinstance(node.value, ast.Name) and node.value.id == "jax":
            yield f"jax.{node.attr}"
    elif isinstance(node, ast.Call):
        callee = node.func
        called = getattr(callee, "attr", getattr(callee, "id", None))
        if called in ("import_module", "__import__") and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield localized(target.value, package)


def localized(dotted, package):
    """`stowax._plan._plan` as `._plan`; other names as they are."""
    first, *rest = dotted.split(".")
    return local_target(["", *rest], package) if first == package.name else dotted


def local_target(parts, package):
    """Of `.a.b.c` as much as is a module; of what is not ours all."""
    if parts[0]:
        return ".".join(parts)
    found = [""]
    for part in parts[1:]:
        below = package.joinpath(*found[1:], part)
        if not (below.is_dir() or below.with_suffix(".py").exists()):
            break
        found.append(part)
    if len(found) == 1 and len(parts) > 2:
        return ".".join(parts[:2])  # `from ._module import name`, and no such module
    return ".".join(found) if len(found) > 1 else "."


def is_within(target, names):
    return any(target == name or target.startswith(f"{name}.") for name in names)


def violations(package, layers=LAYERS, without_jax=frozenset(WITHOUT_JAX)):
    """What breaks the plan in `package`, one line of text each."""
    rank = {unit: i for i, layer in enumerate(layers) for unit in layer}
    found, graph = [], {}
    for path in sorted(package.rglob("*.py")):
        name = module_name(path, package)
        unit = unit_of(name)
        knows_none = is_within(name, without_jax)
        if unit not in rank:
            found.append(f"{name}: has no place in LAYERS (tests/test_house.py)")
            continue
        for item in imports_of(path, package):
            where = f"{name}:{item.line}: imports {item.target}"
            if not item.target.startswith("."):
                internal = is_within(item.target, INTERNALS)
                if internal and unit not in SHIMS:
                    found.append(f"{where}; only _jax may")
                elif knows_none and is_within(item.target, JAX):
                    found.append(f"{where}, and is to know no JAX")
                continue
            target = item.target[1:] or "__init__"
            graph.setdefault(name, set()).add(target)
            if item.unit not in rank:
                found.append(f"{where}, which has no place in LAYERS")
            elif rank[item.unit] > rank[unit]:
                found.append(f"{where}, which is above it")
            elif knows_none and not is_within(target, without_jax):
                found.append(f"{where}, which may know JAX")
    found += [f"circle: {' > '.join(circle)}" for circle in circles(graph)]
    return list(dict.fromkeys(found))


def circles(graph):
    """One circle per strongly connected group, found by walking in depth."""
    done, found = set(), []

    def walk(name, path):
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            # A package importing its own modules is how a package is made.
            for target in sorted(graph.get(name, ())):
                if not name.startswith(f"{target}."):
                    walk(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        walk(name, [])
    return found


def too_long(path):
    """Files and functions over the house's limits, one line of text each."""
    text = path.read_text()
    lines = len(text.splitlines())
    if lines > MOST_LINES_OF_A_FILE:
        yield f"{path.name}: {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                lines -= docstring.end_lineno - docstring.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION:
                yield f"{path.name}:{node.lineno}: {node.name} has {lines} lines"


def without_docstring(path):
    """The module and its public functions and classes that say nothing."""
    tree = ast.parse(path.read_text())
    if ast.get_docstring(tree) is None:
        yield f"{path.name}: the module"
    for node in tree.body:
        if (
            isinstance(node, ast.FunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and ast.get_docstring(node) is None
        ):
            yield f"{path.name}: {node.name}"


def test_imports_follow_the_plan():
    assert violations(SOURCE) == []


def test_front_page_only_reexports():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    allowed = ast.Import | ast.ImportFrom | ast.Assign | ast.Expr
    others = [node for node in tree.body if not isinstance(node, allowed)]
    later, *loaders = others
    assert [node.name for node in loaders] == ["__getattr__", "__dir__"]
    assert isinstance(later, ast.If)
    assert ast.unparse(later.test) == "TYPE_CHECKING"
    named = {alias.asname for node in later.body for alias in node.names}
    assert named == set(stowax._LATER)
    for name in named:  # what type checkers see is what there is
        assert getattr(stowax, name).__module__ == f"stowax.{stowax._LATER[name]}"


def test_files_and_functions_are_short():
    folders = [SOURCE, REPOSITORY / "tests", REPOSITORY / "benchmarks"]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    assert [line for path in paths for line in too_long(path)] == []


def test_everything_public_has_a_docstring():
    paths = sorted(SOURCE.rglob("*.py"))
    assert [line for path in paths for line in without_docstring(path)] == []


# From here on the checks themselves are checked.


@pytest.fixture
def house(tmp_path):
    """Writes a package `planted` from {name: source}; returns what breaks the plan."""

    def build(**files):
        package = tmp_path / "planted"
        for name, source in {"__init__": "", **files}.items():
            path = package / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source))
        return violations(package)

    return build


def test_a_good_house_is_accepted(house):
    good = {
        "_errors": "import math",
        "_units": "from ._errors import ArgumentError",
        "_jax": "from jax._src import core\nimport jaxlib.xla_client",
        "_planner__in____init__": "from ._model import solve",
        "_planner__in___model": "from .. import _units\nfrom . import _rows",
        "_planner__in___rows": "import numpy\nfrom .._records._stages import Problem",
        "_records__in___stages": "",
        "_audit__in___find": "from .._records._stages import Problem",
        "_audit__in___watch": "import jax\nfrom . import _find",
        "_plan": "import jax\nfrom planted._planner import solve\njax.numpy.ones(1)",
        "__init__": "from ._plan import plan",
        "_cli": "from . import plan",
        "__main__": "from ._cli import main",
    }
    assert house(**good) == []


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("_units", "from ._plan import plan", "_units:1: imports ._plan"),
        ("_units", "from . import _plan", "._plan, which is above it"),
        ("_units", "from planted._plan import plan", "._plan, which is above it"),
        ("_units", "import planted._plan", "._plan, which is above it"),
        ("_units", "def f():\n    from ._plan import plan", "_units:2: imports ._plan"),
        ("_step", "from . import plan", "imports ., which is above it"),
        ("_planner__in___x", "from .._plan import plan", "_planner._x:1: "),
        ("_records", "import jax.numpy as jnp", "jax.numpy, and is to know no JAX"),
        ("_audit__in___find", "import jax", "jax, and is to know no JAX"),
        ("_audit__in___find", "from ._watch import w", "_watch, which may know JAX"),
        ("report__in___text", "from flax import nnx", "and is to know no JAX"),
        ("_planner", "from . import _step", "imports ._step, which may know JAX"),
        ("_plan", "from jax._src import core", "imports jax._src.core; only _jax may"),
        ("_plan", "from jax import experimental", "jax.experimental; only _jax may"),
        ("_plan", "import jax\njax.extend.core", "imports jax.extend; only _jax may"),
        ("_plan", "import jaxlib", "imports jaxlib; only _jax may"),
        ("_plan", "import_module('jax._src.core')", "jax._src.core; only _jax may"),
        ("_plan", "from ._gone import gone", "._gone, which has no place in LAYERS"),
        ("_extra", "", "_extra: has no place in LAYERS"),
    ],
)
def test_planted_violations_are_caught(house, name, source, said):
    files = {"_plan": "", "_step": "", "_audit__in___watch": "", name: source}
    found = house(**files)
    assert len(found) == 1
    assert said in found[0]


def test_planted_circle_is_caught(house):
    found = house(
        _cost="from . import _target", _target="if 1:\n    import planted._cost"
    )
    assert found == ["circle: _cost > _target > _cost"]


def test_planted_length_is_caught(tmp_path):
    body = '    """Two\n    lines."""\n' + "    pass\n" * MOST_LINES_OF_A_FUNCTION
    path = tmp_path / "long.py"
    path.write_text(f"def short():\n{body.removesuffix('    pass' + chr(10))}")
    assert list(too_long(path)) == []
    path.write_text(f"def long():\n{body}")
    assert list(too_long(path)) == ["long.py:1: long has 71 lines"]
    path.write_text("x = 1\n" * 401)
    assert list(too_long(path)) == ["long.py: 401 lines"]


def test_planted_silence_is_caught(tmp_path):
    path = tmp_path / "silent.py"
    path.write_text("def public(): ...\ndef _private(): ...\nclass Record: ...\n")
    assert list(without_docstring(path)) == [
        "silent.py: the module",
        "silent.py: public",
        "silent.py: Record",
    ]

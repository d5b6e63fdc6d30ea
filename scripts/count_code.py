#!/usr/bin/env python3
"""Counts the code: lines, files, functions, import circles, modules with one importer, words of the pages.

    python scripts/count_code.py            the counts of this checkout
    python scripts/count_code.py --check    and which of the limits hold; exit status 1 if one does not

tests/unit/test_layout.py uses the same functions.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "platform/plait",
    "platform/plait_bench",
    "platform/hydra_plugins",
    "kernels/plait_kernels",
    "dashboards/plait_dashboards",
)
SEAM = "seam"  # what the docstring of a module with one importer says

LONGEST_FUNCTION = 60  # lines; about 40 is the aim
LONGEST_MODULE = 600  # lines; about 300 is the aim
MEDIAN_FUNCTION = 8
LINES = {"plait": 26_000, "plait.search": 4_500, "plait.tracking": 3_200}
WORDS = {"ARCHITECTURE.md": 1_500}


@dataclass(frozen=True)
class Module:
    """One Python file of a package, under its dotted name; a package's ``__init__`` has the package's."""

    name: str
    path: Path
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.source)

    @property
    def lines(self) -> int:
        """Number of lines, as counted by `wc -l`."""
        return self.source.count("\n")

    @property
    def is_package(self) -> bool:
        """Whether it is an ``__init__``."""
        return self.path.name == "__init__.py"

    @property
    def says_seam(self) -> bool:
        """Whether its docstring says why it is a separate module."""
        return SEAM in (ast.get_docstring(self.tree) or "").lower()

    def functions(self) -> Iterator[tuple[str, int, bool]]:
        """Name, lines and whether it is a GPU kernel, of each function and method."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                yield node.name, node.end_lineno - node.lineno + 1, _is_kernel(node)


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a Triton kernel, which cannot be divided without a loss of clarity."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def read_modules(root: Path = ROOT) -> dict[str, Module]:
    """All modules of the packages, by dotted name."""
    found = {}
    for package in PACKAGES:
        top = (root / package).parent
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(top).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path, path.read_text(encoding="utf-8"))
    return found


def imports(tree: ast.AST) -> set[str]:
    """Every dotted name that is imported, inside functions too; ``from a import b`` counts as ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def texts(tree: ast.AST) -> set[str]:
    """Every text in the code that could name a module, as "module" or "module:attribute"."""
    return {
        node.value.partition(":")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100
    }


def import_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """The modules that each module imports; names that a package's ``__init__`` only re-exports are
    followed."""
    handed_on = {
        f"{name}.{alias.asname or alias.name}": f"{node.module}.{alias.name}"
        for name, module in modules.items()
        if module.is_package
        for node in module.tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        graph[name] = set()
        for imported in imports(module.tree):
            target = _module_of(imported, modules, handed_on)
            if target is not None and target != name:
                graph[name].add(target)
    return graph


def _module_of(name: str, modules: Mapping[str, Module], handed_on: Mapping[str, str]) -> str | None:
    """The module that a dotted name denotes or is defined in."""
    while name in handed_on and name not in modules:
        name = handed_on[name]
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def circles(graph: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
    """The sets of modules that import each other, directly or through others (Tarjan's components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[-len(component) :]
            if len(component) > 1:
                found.append(tuple(sorted(component)))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return sorted(found)


def single_importers(modules: Mapping[str, Module], graph: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Modules of plait with only one importer whose docstring gives no reason: module, importer.

    A package's ``__init__`` does not count as an importer of the package's own modules. Modules named as text
    in code, as in registries and the table of verbs, are seams already.
    """
    by_name = {text for module in modules.values() for text in texts(module.tree)}
    importers: dict[str, list[str]] = {name: [] for name in modules}
    for name, imported in graph.items():
        for other in imported:
            if not (modules[name].is_package and other.startswith(f"{name}.")):
                importers[other].append(name)
    return {
        name: by[0]
        for name, by in sorted(importers.items())
        if len(by) == 1
        and name.startswith("plait.")
        and not modules[name].is_package
        and not modules[name].says_seam
        and name not in by_name
    }


def long_functions(modules: Iterable[Module]) -> list[str]:
    """Functions above the limit, except GPU kernels."""
    return [
        f"{module.name}.{name}: {lines} lines"
        for module in modules
        for name, lines, kernel in module.functions()
        if lines > LONGEST_FUNCTION and not kernel
    ]


def long_modules(modules: Iterable[Module]) -> list[str]:
    """Modules above the limit."""
    return [f"{module.name}: {module.lines} lines" for module in modules if module.lines > LONGEST_MODULE]


def inside(package: str, modules: Mapping[str, Module]) -> list[Module]:
    """The modules of a package and of those below it."""
    return [module for name, module in modules.items() if name == package or name.startswith(f"{package}.")]


def words(page: str) -> int:
    """Words of a page, as counted by `wc -w`."""
    return len((ROOT / page).read_text(encoding="utf-8").split())


@dataclass(frozen=True)
class Limit:
    """One limit and what was counted; ``details`` say where."""

    name: str
    counted: float
    most: float
    details: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the limit holds."""
        return self.counted <= self.most


def limits(modules: Mapping[str, Module]) -> list[Limit]:
    """Every limit, counted."""
    graph = import_graph(modules)
    plait = inside("plait", modules)
    lengths = [lines for module in plait for _, lines, _ in module.functions()]
    functions, long = long_functions(modules.values()), long_modules(modules.values())
    rings = circles(graph)
    single = single_importers(modules, graph)
    found = [
        Limit(f"lines of {package}", sum(module.lines for module in inside(package, modules)), most)
        for package, most in LINES.items()
    ]
    return [
        *found,
        Limit("median function of plait, lines", median(lengths), MEDIAN_FUNCTION),
        Limit(f"functions above {LONGEST_FUNCTION} lines", len(functions), 0, tuple(functions)),
        Limit(f"modules above {LONGEST_MODULE} lines", len(long), 0, tuple(long)),
        Limit("import circles", len(rings), 0, tuple(" ".join(ring) for ring in rings)),
        Limit(
            "modules with one importer and no reason",
            len(single),
            0,
            tuple(f"{module}, by {importer}" for module, importer in single.items()),
        ),
        *(Limit(f"words of {page}", words(page), most) for page, most in WORDS.items()),
    ]


def table(modules: Mapping[str, Module]) -> Iterator[str]:
    """Lines, files and functions of each package, as text."""
    packages = ["plait", *(f"plait.{name}" for name in sorted(_parts("plait", modules)))]
    packages += [Path(path).name for path in PACKAGES if not path.endswith("/plait")]
    yield f"{'':28}{'lines':>8}{'files':>7}{'functions':>11}{'median':>8}{'longest':>9}"
    for package in packages:
        own = inside(package, modules)
        lengths = [lines for module in own for _, lines, _ in module.functions()] or [0]
        yield (
            f"{package:28}{sum(module.lines for module in own):8}{len(own):7}{len(lengths):11}"
            f"{median(lengths):8g}{max(lengths):9}"
        )


def _parts(package: str, modules: Mapping[str, Module]) -> set[str]:
    """The packages directly below a package."""
    return {
        name.split(".")[1]
        for name, module in modules.items()
        if name.startswith(f"{package}.") and (module.is_package or name.count(".") > 1)
    }


def main() -> int:
    """Print the counts, and return the exit status."""
    parser = argparse.ArgumentParser(description="Counts the code of this checkout.")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a limit does not hold")
    arguments = parser.parse_args()
    modules = read_modules()
    print("\n".join(table(modules)))
    print()
    found = limits(modules)
    for limit in found:
        mark = "holds" if limit.holds else "does not hold"
        print(f"{limit.name}: {limit.counted:g} (at most {limit.most:g}): {mark}")
        if not limit.holds:
            print("".join(f"    {detail}\n" for detail in limit.details), end="")
    return 1 if arguments.check and not all(limit.holds for limit in found) else 0


if __name__ == "__main__":
    sys.exit(main())

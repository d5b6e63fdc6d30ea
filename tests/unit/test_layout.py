"""The rules that keep the tree readable: where packages are, who imports whom, how long things get."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions

import pytest
from count_code import (
    ROOT,
    Module,
    circles,
    import_graph,
    long_functions,
    long_modules,
    read_modules,
    single_importers,
)

# Inside plait: a package may import those of lower floors, and no other of its own.
FLOORS = (
    {"core"},
    {"utils"},
    {"config"},
    {"data", "models"},
    {"adapters", "cost"},
    {"planner", "serve"},
    {"simulate", "engine"},
    {"distributed"},
    {"tracking"},
    {"search"},
    {"planning"},
    {"terminal"},
    {"cli"},
    {"api", "__main__"},
)
# Where each outside tool may be imported (path prefixes); everything else goes through these.
HOMES = {
    "optuna": ("platform/plait/search/", "dashboards/plait_dashboards/importance"),
    "fastapi": ("platform/plait/serve/server",),
    "uvicorn": ("platform/plait/serve/server",),
    "mlflow": ("platform/plait/tracking/", "dashboards/"),
    "pyscipopt": ("platform/plait/planner/solver",),
    "hydra": (
        "platform/plait/cli/",
        "platform/plait/config",
        "platform/plait/search/",
        "platform/hydra_plugins/",
    ),
    "deepspeed": ("platform/plait/distributed/",),
    "triton": ("kernels/plait_kernels/",),
    "pandas": ("platform/plait/api",),
    "peft": ("platform/plait_bench/", "platform/plait/api"),
    "datasets": ("platform/plait/data/datasets_library",),
    "pyarrow": ("platform/plait/data/formats",),
    "lm_eval": ("platform/plait/serve/harness",),
}
NO_TORCH = (
    "platform/plait/planner/",
    "platform/plait/simulate/",
    "platform/plait/cost/",
    "platform/plait/engine/coordinator",
)
TORCH_ALLOWED = (
    "platform/plait/cost/fake_",
    "platform/plait/cost/probes",
    "platform/plait/cost/peaks",
)


@cache
def code() -> dict[str, Module]:
    return read_modules()


@cache
def modules() -> dict[str, ast.Module]:
    return {module.path.relative_to(ROOT).as_posix(): module.tree for module in code().values()}


@cache
def imports(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def floor_of(part: str) -> int | None:
    return next((floor for floor, parts in enumerate(FLOORS) if part in parts), None)


@pytest.mark.parametrize("folder", ["platform", "kernels", "dashboards", "conf", "sweeps", "tests"])
def test_no_root_folder_is_a_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/__init__.py would shadow another package"


def test_the_plugin_namespace_stays_a_namespace() -> None:
    assert not (ROOT / "platform/hydra_plugins/__init__.py").exists()


def test_conf_and_sweeps_are_plain_yaml() -> None:
    strays = [
        path.relative_to(ROOT).as_posix()
        for folder in ("conf", "sweeps")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".yaml"
    ]
    assert strays == []


def test_imports_point_one_way_between_the_roots() -> None:
    wrong = []
    for path, tree in modules().items():
        tops = {name.split(".")[0] for name in imports(tree)}
        if path.startswith("kernels/") and tops & {"plait", "plait_bench", "plait_dashboards"}:
            wrong.append(path)
        above = tops & {"plait_bench", "plait_dashboards"}
        if path.startswith("platform/plait/") and above:
            wrong.append(path)
    assert wrong == []


def test_imports_point_down_inside_plait() -> None:
    wrong = []
    for path, tree in modules().items():
        if not path.startswith("platform/plait/"):
            continue
        package = path.split("/")[2].removesuffix(".py")
        own = floor_of(package)
        for name in imports(tree):
            parts = name.split(".")
            other = floor_of(parts[1]) if parts[0] == "plait" and len(parts) > 1 else None
            if own is None or other is None or parts[1] == package:
                continue
            if other >= own:
                wrong.append(f"{path} imports {name}")
    assert wrong == []


def test_benchmarks_import_nothing_of_the_command_line() -> None:
    above = {"plait.cli", "plait.terminal"}
    shown_by = {f"platform/plait_bench/{name}.py" for name in ("run", "table")}
    strays = [
        path
        for path, tree in modules().items()
        if path.startswith("platform/plait_bench/")
        and path not in shown_by
        and above & {".".join(name.split(".")[:2]) for name in imports(tree)}
    ]
    assert strays == []


def test_every_module_of_plait_has_a_floor() -> None:
    unknown = {
        path
        for path in modules()
        if path.startswith("platform/plait/")
        and path != "platform/plait/__init__.py"
        and floor_of(path.split("/")[2].removesuffix(".py")) is None
    }
    assert unknown == set()


@pytest.mark.parametrize("tool", sorted(HOMES))
def test_each_tool_is_met_in_one_place(tool: str) -> None:
    strays = [
        path
        for path, tree in modules().items()
        if tool in {name.split(".")[0] for name in imports(tree)} and not path.startswith(HOMES[tool])
    ]
    assert strays == []


def test_planner_and_simulator_import_no_torch() -> None:
    strays = [
        path
        for path, tree in modules().items()
        if path.startswith(NO_TORCH)
        and not path.startswith(TORCH_ALLOWED)
        and {"torch", "transformers", "plait_kernels"} & {name.split(".")[0] for name in imports(tree)}
    ]
    assert strays == []


def test_functions_and_modules_stay_short() -> None:
    assert long_functions(code().values()) == []
    assert long_modules(code().values()) == []


def test_no_modules_import_each_other() -> None:
    assert circles(import_graph(code())) == []


def test_a_module_with_one_importer_says_why_it_is_a_seam() -> None:
    assert single_importers(code(), import_graph(code())) == {}


def test_what_is_imported_is_declared() -> None:
    """Another package may stop bringing it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for some in project["optional-dependencies"].values() for each in some),
    ]
    declared = {re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in wanted}
    tops = {name.split(".")[0] for tree in modules().values() for name in imports(tree)}
    found = packages_distributions()
    others = tops & found.keys() - {*sys.stdlib_module_names, "plait", "plait_bench", "plait_dashboards"}
    others -= {"plait_kernels", "hydra_plugins", "count_code"}
    named = {top: {each.lower().replace("_", "-") for each in found[top]} for top in others}
    assert {top for top, names in named.items() if not names & declared} == set()

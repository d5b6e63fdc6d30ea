"""The script that counts the code finds what the layout forbids, in a package made for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from count_code import (
    Module,
    circles,
    import_graph,
    long_functions,
    long_modules,
    read_modules,
    single_importers,
)

FILES = {
    "__init__.py": "",
    "one/__init__.py": "from plait.one.shown import thing\n",
    "one/shown.py": "thing = 1\n",
    "one/hidden.py": '"""Helps."""\nhelp = 1\n',
    "one/held.py": '"""A seam: tests replace it."""\nheld = 1\n',
    "one/named.py": "def main(): ...\n",
    "two.py": (
        "from plait.one import thing\n"
        "from plait.one.held import held\n"
        "from plait.one.hidden import help\n"
        "import plait.one.named\n"
        'TABLE = {"main": "plait.one.named:main"}\n'
    ),
    "three.py": "from plait.one.shown import thing\ndef late():\n    from plait.four import more\n",
    "four.py": "from plait import five\nmore = 1\n",
    "five.py": "import plait.three\n",
    "long.py": "def f():\n" + "    x = 1\n" * 60 + "@jit\ndef kernel():\n" + "    x = 1\n" * 600,
}


@pytest.fixture
def modules(tmp_path: Path) -> dict[str, Module]:
    for name, text in FILES.items():
        path = tmp_path / "platform/plait" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_modules(tmp_path)


def test_imports_are_followed_to_the_module_that_defines_a_name(modules: dict[str, Module]) -> None:
    graph = import_graph(modules)
    assert graph["plait.two"] == {
        "plait.one.shown",
        "plait.one.held",
        "plait.one.hidden",
        "plait.one.named",
    }
    assert graph["plait.three"] == {"plait.one.shown", "plait.four"}


def test_a_circle_through_a_function_is_a_circle(modules: dict[str, Module]) -> None:
    assert circles(import_graph(modules)) == [("plait.five", "plait.four", "plait.three")]


def test_modules_with_one_importer_need_a_reason_or_a_registration(modules: dict[str, Module]) -> None:
    alone = single_importers(modules, import_graph(modules))
    assert alone == {
        "plait.one.hidden": "plait.two",
        "plait.three": "plait.five",
        "plait.four": "plait.three",
        "plait.five": "plait.four",
    }


def test_functions_that_are_too_long_are_named_but_kernels_are_not(modules: dict[str, Module]) -> None:
    assert long_functions(modules.values()) == ["plait.long.f: 61 lines"]
    assert long_modules(modules.values()) == ["plait.long: 663 lines"]

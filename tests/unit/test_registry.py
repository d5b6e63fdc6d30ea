"""Named choices: registered where they are, found by name, listed where a name is unknown."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from plait.core.errors import ConfigError
from plait.utils import registry
from plait.utils.registry import Registry


@pytest.fixture
def shapes() -> Registry[int]:
    made: Registry[int] = Registry("shape", key="draw.shape")
    made.add("triangle", 3)
    made.register("square")(4)
    return made


def test_an_entry_is_found_by_its_name_until_it_is_removed(shapes: Registry[int]) -> None:
    assert shapes.get("square") == 4
    assert "square" in shapes
    assert shapes.names() == tuple(shapes) == ("square", "triangle")
    shapes.remove("square")
    shapes.remove("square")
    assert "square" not in shapes
    with pytest.raises(ConfigError):
        shapes.get("square")


def test_the_last_entry_of_a_name_counts(shapes: Registry[int]) -> None:
    assert shapes.add("square", 5) == 5
    assert shapes.get("square") == 5
    assert len(shapes.names()) == 2


def test_an_unknown_name_is_answered_with_the_key_and_all_names(shapes: Registry[int]) -> None:
    with pytest.raises(ConfigError) as caught:
        shapes.get("sqare")
    assert caught.value.value == "draw.shape=sqare"
    assert caught.value.rule == "Unknown shape 'sqare'."
    assert caught.value.remedy == "Did you mean square? Available: square, triangle."


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules that a registry can import."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name, module in sys.modules.items() if name.startswith("shapes_of_")]:
        del sys.modules[name]


def test_modules_and_entry_points_are_imported_once_when_first_needed(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Registry[int] = Registry("shape", key="shape", modules=("shapes_of_ours",), group="shapes")
    for name, edges in (("ours", 5), ("theirs", 6)):
        (modules / f"shapes_of_{name}.py").write_text(
            f"import builtins\nbuiltins.shapes_under_test.add({name!r}, {edges})\n"
        )
    monkeypatch.setattr("builtins.shapes_under_test", made, raising=False)
    asked: list[str] = []

    def entry_points(group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint("theirs", "shapes_of_theirs", group)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    made.add("mine", 7)
    assert not asked
    assert "shapes_of_ours" not in sys.modules
    assert made.names() == ("mine", "ours", "theirs")
    assert [made.get(name) for name in made] == [7, 5, 6]
    assert asked == ["shapes"]


def test_a_module_that_cannot_be_imported_is_not_silently_left_out(modules: Path) -> None:
    (modules / "shapes_of_nobody.py").write_text("raise ValueError('broken')\n")
    made: Registry[int] = Registry("shape", key="shape", modules=("shapes_of_nobody",))
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            made.names()


def test_what_a_package_adds_and_cannot_be_imported_is_named(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (modules / "shapes_of_theirs.py").write_text("import nothing_of_this_name\n")
    point = EntryPoint("theirs", "shapes_of_theirs", "shapes")
    monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
    with pytest.raises(ConfigError, match=r"shapes_of_theirs: ModuleNotFoundError: .*nothing_of_this_name"):
        Registry[int]("shape", key="shape", group="shapes").names()


def test_a_name_of_another_module_is_refused() -> None:
    """Also where the entry does not say whose it is, as one that is no function or class."""
    made: Registry[int] = Registry("shape", key="shape")
    made.add_later("later", "shapes_of_later")
    made.add("mine", 1)
    theirs, here = "shapes_of_theirs", __name__
    module = {"__name__": theirs, "made": made}
    for adds, again, has in (
        (here, 'made.add("later", 2)', "shapes_of_later"),
        (theirs, 'made.add("mine", 2)', here),
        (theirs, 'made.register("mine")(2)', here),
        (theirs, f'made.add_later("mine", "{theirs}")', here),
        (theirs, f'made.add_later("later", "{theirs}")', "shapes_of_later"),
    ):
        with pytest.raises(ConfigError, match=f"shape '(later|mine)' of {adds}") as caught:
            exec(again, module | {"__name__": adds})
        assert f"{has} has a shape with this name" in str(caught.value)
    made.add_later("mine", here)
    assert (made.add("mine", 3), made.get("mine")) == (3, 3)
    made.remove("mine")
    exec('made.add("mine", 4)', module)
    assert made.get("mine") == 4
    exec('made.add("of no module", 5)', {"made": made})
    assert made.get("of no module") == 5


def test_what_is_added_later_is_known_before_its_module_is_imported(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Registry[int] = Registry("shape", key="shape")
    (modules / "shapes_of_later.py").write_text(
        "import builtins\nbuiltins.shapes_under_test.add('later', 8)\n"
    )
    monkeypatch.setattr("builtins.shapes_under_test", made, raising=False)
    made.add_later("later", "shapes_of_later")
    assert "later" in made
    assert made.names() == ("later",)
    with pytest.raises(ConfigError, match=r"Did you mean later\? Available: later\."):
        made.get("latter")
    assert "shapes_of_later" not in sys.modules
    assert made.get("later") == 8
    made.remove("later")
    assert "later" not in made

"""The field's standard words (DESIGN §2): the private ones that they replaced do not come back."""

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("platform", "dashboards", "kernels")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs")

# What must not be read by a user: pattern, and what to say instead.
TEXT = {
    r"\b(un)?park(s|ed|ing|ings)?\b": "paused, preempted",
    r"\banew\b": "again, restarted",
    r"\b(desk|clerk|mailbox)(e?s)?\b": "control server",
    r"\bladders?\b": "rungs, rung table",
    r"\bverdicts?\b": "result, decision",
    r"\bjudg(e|es|ed|ing|e?ments?)\b": "decide, compare, score",
    r"\b(go|goes|going|gone|went) on( with)?\b": "resume, continue",
    r"\b(take|takes|taken|taking|took) over\b": "adopt",
    r"\b(take|takes|taken|taking|took) away\b": "export, delete",
    r"\bcut short\b": "orphaned, truncated",
    r"\bsit(s|ting)? out\b|\brests\b": "skips",
    r"\bsat out\b": "skipped",
    r"\b(is|are|be|been|was|were|what) told\b|\btold (of|to|in)\b": "reported",
    r"\bhopeless\b": "failure limit exceeded",
    r"\bimpatient\b": "patience",
    r"\bdisplac(e|es|ed|ing)\b": "preempted",
    r"\b(trials?|jobs?|it|they|all|others) (is|are) over\b|\bwhat is over\b": "ended",
    r"\b(workers?|process(es)?) (is|are|was|were|that is|that are) gone\b": "dead",
    r"\b(trials?|points?|others) (is|are) drawn\b|\bdrawn (by|once|in)\b": "suggested",
    r"\bdraws? (a trial|another|more)\b": "suggest",
    r"\b(nobody|somebody|whoever)\b": "no process, someone, the process that",
    r"\bno such choice\b|\bgive null to\b": "unknown …; set … to null",
    r"\bbegun with\b|\bto be had\b": "started with, available",
}
ANY = re.compile(rf"\b(?:{'|'.join(TEXT)})", re.IGNORECASE)  # looked for first: hardly a text has one
# Words of which no name may be made: of a module, class, function, argument or attribute.
NAMES = {
    *("park", "parks", "parked", "parking", "anew", "desk", "clerk", "mailbox", "ladder", "ladders"),
    *("verdict", "verdicts", "judge", "judges", "judged", "judgement", "hopeless", "impatient", "told"),
    *("untold", "displace", "displaced", "gone", "takeover", "resting", "rests"),
}
# A docstring begins with what the thing is or does; these leave out the noun.
OPENINGS = r"(Of|That of|Those of|Those that|As of|The same as of)\b"
# Others' words, not ours.
FOREIGN = {
    "word_ladder": "a task of reasoning-gym",
}


@cache
def modules() -> dict[str, ast.Module]:
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for folder in SOURCES
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    return [*ast.walk(tree)]


def literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """String literals that are not docstrings, with their lines."""
    documentation = {
        id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr) and is_text(node.value)
    }
    for node in nodes(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
            yield node.lineno, " … ".join(map(str, parts))
        elif is_text(node) and id(node) not in documentation:
            assert isinstance(node, ast.Constant)
            yield node.lineno, str(node.value)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names that the module gives, with their lines."""
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


@cache
def words_of(name: str) -> frozenset[str]:
    """The words of a snake_case or CamelCase name."""
    return frozenset(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def found_in(text: str) -> list[str]:
    for foreign in FOREIGN:
        text = text.replace(foreign, "")
    if not ANY.search(text):
        return []
    return [
        f"{match[0]!r}: say {instead}"
        for pattern, instead in TEXT.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in nodes(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def comments(path: str) -> Iterator[tuple[int, str]]:
    with (ROOT / path).open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def yaml_files() -> list[Path]:
    return [path for folder in ("conf", "sweeps") for path in sorted((ROOT / folder).rglob("*.yaml"))]


def pages() -> list[Path]:
    return [
        path
        for page in PAGES
        for path in sorted((ROOT / page).rglob("*.md") if (ROOT / page).is_dir() else [ROOT / page])
        if path.exists()
    ]


def test_texts_in_code() -> None:
    assert [
        f"{path}:{line} {said}"
        for path, tree in modules().items()
        for line, text in literals(tree)
        for said in found_in(text)
    ] == []


def test_docstrings_and_comments() -> None:
    assert [
        f"{path}:{line} {said}"
        for path, tree in modules().items()
        for line, text in (*docstrings(tree), *comments(path))
        for said in found_in(text)
    ] == []


def test_configuration_and_pages() -> None:
    assert [
        f"{path.relative_to(ROOT)}:{line} {said}"
        for path in (*yaml_files(), *pages())
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for said in found_in(text)
    ] == []


def test_names() -> None:
    given = [
        (path, line, name)
        for path, tree in modules().items()
        for line, name in (*names(tree), (1, Path(path).stem), (1, Path(path).parent.name))
    ]
    assert [f"{path}:{line} {name}" for path, line, name in given if words_of(name) & NAMES] == []


def test_a_docstring_begins_with_what_the_thing_is_or_does() -> None:
    assert [
        f"{path}:{line} {text.splitlines()[0]}"
        for path, tree in modules().items()
        for line, text in docstrings(tree)
        if re.match(OPENINGS, text)
    ] == []


def test_the_patterns_find_the_old_words_and_nothing_else() -> None:
    old = "It was parked and goes on anew; the clerk's verdict: 3 of 4 trials are over, others took over"
    assert len(found_in(old)) == 7
    assert found_in("sparks, a new desktop, the going rate, one takeover, prestigious") == []
    assert found_in("word_ladder, prejudge, restful, an unanswered job, trials over the limit") == []
    assert words_of("DeskClerk") == {"desk", "clerk"}
    assert words_of("_was_told") & NAMES == {"told"}

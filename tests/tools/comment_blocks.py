"""The comments of the tree's source files, for tests/draw-comments and tests/retired-words.

A comment is a block of whole lines: lines of Rust, CUDA or C that begin with the same marker (`//`, `///`, `//!`) and
follow each other, lines of Python or shell that begin with `#`, or a docstring. Comments after code on the same line
are left out.
"""

import ast
import re
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SLASHES = re.compile(r"\s*(///|//!|//)(?!/)")
HASH = re.compile(r"\s*(#)(?!!)")
MARKERS = {".rs": SLASHES, ".cu": SLASHES, ".py": HASH, ".sh": HASH}
# Files that programs write, or that are inputs of tests. Their comments do not count.
GENERATED = re.compile(r"/src/generated/|^tests/fuzzing/corpus|/vectors?/")


@dataclass
class Comment:
    path: str
    """Lines of the file, counted from 1: the first and the last one of the comment."""
    first: int
    last: int
    lines: list[str]
    """The file's lines behind the comment."""
    code: list[str]


def sources():
    """Yields the name, the suffix and the lines of each source file that people write."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        path = ROOT / name
        if GENERATED.search(name) or path.is_symlink() or not path.is_file():
            continue
        suffix = path.suffix
        if suffix == "":
            with path.open("rb") as file:
                start = file.readline()
            suffix = "" if not start.startswith(b"#!") else ".py" if b"python" in start else ".sh"
        if suffix in MARKERS:
            yield name, suffix, path.read_text(encoding="utf-8").splitlines()


def docstrings(lines):
    """Yields the first and last lines, counted from 1, of each docstring in a Python file."""
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            text = node.body[0]
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                yield text.lineno, text.end_lineno


def comments_of(name, suffix, lines):
    """Yields all comments of a file, from its first line to its last."""
    found = list(docstrings(lines)) if suffix == ".py" else []
    first, marker = 0, None
    for number, line in enumerate([*lines, ""], 1):
        match = MARKERS[suffix].match(line)
        now = match.group(1) if match else None
        if now != marker:
            if marker:
                found.append((first, number - 1))
            first, marker = number, now
    for first, last in sorted(found):
        yield Comment(name, first, last, lines[first - 1 : last], lines[last : last + 4])


def comments():
    """Yields all comments of the tree, in the order of files and lines."""
    for name, suffix, lines in sources():
        yield from comments_of(name, suffix, lines)


def paragraphs(texts):
    """Divides the lines of a comment, without indents and markers, into pieces that wrapping must not join. A piece
    ends at empty lines, items of lists, tables, headings and indented or fenced text. Yields each piece with True if it
    may be wrapped."""
    piece, fenced = [], False
    for text in texts:
        fence = text.lstrip().startswith("```")
        item = re.match(r"([-*]|\d+\.) ", text)
        in_item = piece and re.match(r"([-*]|\d+\.) ", piece[0])
        fixed = fenced or fence or not text or re.match(r'#|\||:|>|    |"""$', text) or text.startswith("  ") and not in_item
        if piece and (fixed or item):
            yield piece, True
            piece = []
        if fixed:
            yield [text], False
        else:
            piece.append(text)
        fenced ^= fence
    if piece:
        yield piece, True


def wrapped(comment, width):
    """Returns the lines of a comment. Paragraphs with a line that is too long are wrapped."""
    marker = SLASHES.match(comment.lines[0]) or HASH.match(comment.lines[0])
    # A docstring's lines have no marker, only an indent.
    head = marker.group() if marker else comment.lines[0][: -len(comment.lines[0].lstrip())]
    space = " " if marker else ""
    texts = [line[len(head) :].removeprefix(space) for line in comment.lines]
    lines = []
    for piece, may_wrap in paragraphs(texts):
        as_they_are = [f"{head}{space}{text}".rstrip() for text in piece]
        if may_wrap and max(map(len, as_they_are)) > width:
            item = re.match(r"([-*]|\d+\.) ", piece[0])
            indent = " " * (item.end() if item else len(piece[0]) - len(piece[0].lstrip()))
            as_they_are = textwrap.wrap(
                " ".join(text.strip() for text in piece),
                width,
                initial_indent=head + space + ("" if item else indent),
                subsequent_indent=head + space + indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        lines += as_they_are
    return lines


def wrap(width):
    """Wraps each comment of the tree that has a line of more than `width` columns."""
    for name, suffix, lines in sources():
        if max(map(len, lines), default=0) <= width:
            continue
        for comment in reversed(list(comments_of(name, suffix, lines))):
            if max(map(len, comment.lines)) > width:
                lines[comment.first - 1 : comment.last] = wrapped(comment, width)
        (ROOT / name).write_text("\n".join(lines) + "\n", encoding="utf-8")

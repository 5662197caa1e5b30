"""YAML to a tree with places: encodings, hostile input, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flowdflash.config.document import MAX_BYTES, parse, read
from flowdflash.config.tree import Place, Scalar, Table, from_python, locate, plain, shown
from flowdflash.errors import PipelineInvalid, Problem


def tree(text: str, problems: list[Problem] | None = None) -> Table:
    node = parse(text, Place("a.yaml"), [] if problems is None else problems)
    assert isinstance(node, Table)
    return node


def refusal(text: str) -> Problem:
    with pytest.raises(PipelineInvalid) as caught:
        parse(text, Place("a.yaml"), [])
    return caught.value.problems[-1]


def test_every_key_and_value_knows_its_place() -> None:
    root = tree("a: 1\nb:\n  - x\n  - {c: 'd'}\n")
    assert plain(root) == {"a": "1", "b": ["x", {"c": "d"}]}
    assert locate(root, ("a",))[1] == Place("a.yaml", 1, 4)
    assert locate(root, ("b", 1, "c"))[1] == Place("a.yaml", 4, 9)
    assert locate(root, ("b", "1", "c"), key=True)[1] == Place("a.yaml", 4, 6)
    assert locate(root, ("b", "tuple[int, ...]", 0, "nowhere")) == (("b", "0"), Place("a.yaml", 3, 5))


@pytest.mark.parametrize("text", ["1e-4", "1_000", "no", "1.10", "0o17", "2024-01-01", ".inf", "yes", "0x1F"])
def test_scalar_stays_the_text_that_was_written(text: str) -> None:
    assert plain(tree(f"a: {text}")) == {"a": text}


@pytest.mark.parametrize("text", ["null", "~", "Null", "NULL", ""])
def test_null_is_null_only_without_quotes(text: str) -> None:
    assert plain(tree(f"a: {text}\nb: '{text}'")) == {"a": None, "b": text}


def test_empty_value_is_placed_at_its_key() -> None:
    assert locate(tree("x: 1\na:\nb: 2"), ("a",))[1] == Place("a.yaml", 2, 1)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_byte_order_mark_and_line_ends_change_nothing(mark: bytes, ends: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(mark + "version: 1\nname: größe\n".replace("\n", ends).encode())
    root = read(path, [])
    assert plain(root) == {"version": "1", "name": "größe"}
    assert (root.keys["name"].line, root.keys["name"].column) == (2, 1)


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_other_encodings_are_refused_with_a_way_out(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes("version: 1\nname: größe\n".encode(encoding))
    with pytest.raises(PipelineInvalid) as caught:
        read(path, [])
    assert "not UTF-8" in str(caught.value) and "save it as UTF-8" in str(caught.value)


@pytest.mark.parametrize("name", ["absent.yaml", ".", "x" * 5000])
def test_unreadable_file_is_a_problem(name: str, tmp_path: Path) -> None:
    with pytest.raises(PipelineInvalid, match="cannot read the file"):
        read(tmp_path / name, [])


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "more than 5000 values"),
        ("a: " + "[" * 10_000, "nested deeper than 24 levels"),
        ("a: " + "{x: " * 10_000, "nested deeper than 24 levels"),
        ("\n".join("  " * i + "k:" for i in range(400)), "nested deeper than 24 levels"),
        ("a: [" + "1, " * 60_000 + "1]", "more than 5000 values"),
        ("a: &a [*a]", "alias *a has no anchor before it"),
        ("a: 1\n--- \nb: 2", "a second document"),
        ("", "the file is empty"),
        ("# only a remark", "the file is empty"),
        ("a: 'x", "not valid YAML"),
        ("a: \x01", "character U+0001 is not allowed"),
        ('a: "\\UFFFFFFFF"', "not valid YAML"),
        ("%YAML 9.9\n---\na: 1", "not valid YAML"),
    ],
)
def test_hostile_text_is_refused_quickly(text: str, message: str) -> None:
    started = time.thread_time()
    assert message in refusal(text).message
    assert time.thread_time() - started < 1.5


def test_file_of_any_size_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 33)
    started = time.thread_time()
    with pytest.raises(PipelineInvalid, match=f"larger than {MAX_BYTES // 1024} KiB"):
        read(path, [])
    assert time.thread_time() - started < 1.5


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("a: 1\na: 2", "key 'a' is written twice, first in line 1", 1),
        ("a: 1\n<<: {b: 2}", "merge keys (<<) are not used in pipelines", 1),
        ("a: 1\n? [x]\n: 1", "a key has to be a text", 3),
        ("a: 1\n~: 1", "a key has to be a text", 1),
        ("a: 1\nb: !!python/name:os.system x", "tags such as !!python/name:os.system are not used", 4),
        ("a: 1\nb: !x {c: 1}", "tags such as !x are not used", 4),
        ('a: 1\nb: "\\0"', "the text holds a NUL character", 4),
        ('a: 1\nb: "\\ud83d"', "the text holds half of a surrogate pair", 4),
    ],
)
def test_what_leaves_a_tree_standing_is_collected(text: str, message: str, column: int) -> None:
    problems: list[Problem] = []
    assert tree(text, problems).entries["a"] == Scalar("1", Place("a.yaml", 1, 4))
    (problem,) = problems
    assert problem.message.startswith(message) and (problem.line, problem.column) == (2, column)


def test_quoted_merge_sign_is_a_key_like_any_other() -> None:
    assert plain(tree("'<<': 1")) == {"<<": "1"}


def test_alias_stands_for_the_value_of_its_anchor() -> None:
    root = tree("a: &x {b: 1}\nc: *x\nd: *x")
    assert plain(root) == {"a": {"b": "1"}, "c": {"b": "1"}, "d": {"b": "1"}}
    assert locate(root, ("d", "b"))[1].line == 1


def test_unquoted_reference_in_braces_gets_the_right_hint() -> None:
    assert 'put a reference in quotes: "${vars.x}"' in refusal("a: {b: ${vars.x}}").hint


def test_python_values_become_the_texts_that_yaml_would_have() -> None:
    value = {"a": True, "b": None, "c": 1e-4, "d": (1, "x"), "e": Path("p"), 3: "three"}
    assert plain(from_python(value, Place(), [])) == {
        "a": "true",
        "b": None,
        "c": "0.0001",
        "d": ["1", "x"],
        "e": "p",
        "3": "three",
    }


def test_python_values_that_cannot_be_written_are_problems() -> None:
    problems: list[Problem] = []
    from_python({"a": {"b": object(), "c": "x\0"}}, Place(), problems)
    assert [(p.path, p.message) for p in problems] == [
        ("a.b", "a value of type object cannot stand in a pipeline"),
        ("a.c", "the text holds a NUL character"),
    ]
    endless: dict[str, object] = {}
    endless["again"] = endless
    with pytest.raises(PipelineInvalid, match="nested deeper"):
        from_python(endless, Place(), [])


def test_long_text_is_cut_in_messages() -> None:
    assert len(shown("x" * 10_000)) < 70

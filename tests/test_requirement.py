"""The tests that `requirement.MATRIX` names are there, and nothing skips them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from requirement import MATRIX, Cell

TESTS = Path(__file__).parent


@cache
def functions(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("cell", MATRIX, ids=lambda cell: f"{cell.section}: {cell.what}")
def test_every_cell_has_tests_that_run(cell: Cell):
    named = [TESTS / "torch" / name for name in cell.torch] + [TESTS / "mindspore" / name for name in cell.mindspore]
    assert named
    for path in named:
        file, _, test = str(path).partition("::")
        function = functions(Path(file))[test]
        assert not any("skip" in ast.dump(decorator) for decorator in function.decorator_list), test


def test_each_backend_has_its_unit_tests_and_level0():
    unit = [cell for cell in MATRIX if cell.section in ("9.1 UT", "9.2 boundary")]
    level0 = [cell for cell in MATRIX if cell.section == "9.1 Level0"]
    assert len({name for cell in unit for name in cell.torch}) >= 8
    assert len(functions(TESTS / "mindspore" / "test_ms_buffers.py").keys() & _unit_tests()) >= 8
    assert all(cell.torch and cell.mindspore for cell in level0)


def _unit_tests() -> set[str]:
    names = functions(TESTS / "mindspore" / "test_ms_buffers.py")
    return {name for name in names if name.startswith("test_")}

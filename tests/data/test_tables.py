"""Tables are encoded as declared, decoded again, and meet one ledger however they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

from understudy.data import decode_table, read, read_heldout
from understudy.data.tables import CLIPPED, MISSING
from understudy.errors import BadConfiguration, DataError, UnknownName
from understudy.privacy.public import Column

TEXT = """age,sex,work,hours,income
17,Male,Private,40,low
90,Female, Private,20.5,high
53.5,Male,State,,low
120,Other,?,?,high
-3,,Private,99,low
"""
COLUMNS: dict[str, Any] = {
    "age": [17, 90],
    "sex": ["Female", "Male"],
    "work": ["Private", "State"],
    "hours": [0.0, 80.0],
}
ENCODED: list[list[float]] = [
    [-1, 0, 1, 1, 0, 0.0],
    [1, 1, 0, 1, 0, -0.4875],
    [0, 0, 1, 0, 1, 0],
    [1, 0, 0, 0, 0, 0],
    [-1, 0, 0, 1, 0, 1],
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "people.csv"
    path.write_text(TEXT)
    return path


def features(source: Any, **options: Any) -> npt.NDArray[Any]:
    return np.asarray(read(source, **options)._records._images)


def digests(source: Any, **options: Any) -> npt.NDArray[Any]:
    return read(source, **options)._records._digests


def test_cells_are_encoded_as_declared(table: Path) -> None:
    data = read(table, label="income", columns=COLUMNS)
    np.testing.assert_allclose(features(table, label="income", columns=COLUMNS), ENCODED)
    assert data.public.shape == (6,)
    assert data.public.classes == ("high", "low")
    assert data._records._labels.tolist() == [1, 0, 1, 0, 1]
    assert data.public.columns[0] == Column(name="age", kind="numeric", low=17, high=90)
    assert data.public.columns[1].categories == ("Female", "Male")
    assert data.public.preparation == (CLIPPED, MISSING)


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".feather"])
def test_arrow_reads_from_files_of_its_own(
    table: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads still read when an error ends the process, and a file of Python's aborts it."""
    path = table.with_suffix(ending)
    cells = pa.csv.read_csv(table)
    if ending == ".parquet":
        pa.parquet.write_table(cells, path)
    elif ending == ".feather":
        pa.feather.write_feather(cells, path)
    given = []
    for module, name in (
        (pa.csv, "open_csv"), (pa.csv, "read_csv"), (pa.parquet, "read_schema"),
        (pa.parquet, "ParquetFile"), (pa.ipc, "open_file"),
    ):  # fmt: skip
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda file, *a, real=real, **k: given.append(file) or real(file, *a, **k)
        )
    read(path, label="income", columns=COLUMNS)
    assert given and all(isinstance(file, pa.NativeFile) for file in given)
    assert not any(isinstance(file, pa.PythonFile) for file in given)


def test_columns_from_json_a_file_or_objects(table: Path) -> None:
    file = table.parent / "columns.json"
    file.write_text(json.dumps(COLUMNS))
    objects = read(table, label="income", columns=COLUMNS).public.columns
    long = {
        **COLUMNS,
        "age": {"low": 17, "high": 90},
        "sex": {"categories": ["Female", "Male"]},
    }
    for columns in (file, str(file), json.dumps(COLUMNS), objects, long):
        np.testing.assert_allclose(features(table, label="income", columns=columns), ENCODED)


def test_one_ledger_for_every_label_format_and_order(table: Path) -> None:
    expected = digests(table, label="income", columns=COLUMNS)
    cells = pa.csv.read_csv(table)
    folder = table.parent
    pa.parquet.write_table(cells, folder / "a.parquet")
    pa.feather.write_feather(cells, folder / "a.feather")
    shuffled = cells.select(["income", "hours", "work", "age", "sex"])
    pa.csv.write_csv(shuffled, folder / "b.csv")
    (folder / "c.tsv").write_text(TEXT.replace(",", "\t"))
    for name in ("a.parquet", "a.feather", "b.csv", "c.tsv"):
        again = digests(folder / name, label="income", columns=COLUMNS)
        np.testing.assert_array_equal(again, expected, name)
    other = {"age": None, "work": None, "hours": None, "income": ["low", "high"]}
    pa.parquet.write_table(cells.slice(0, 3), folder / "d.parquet")
    relabelled = digests(folder / "d.parquet", label="sex", columns=other)
    np.testing.assert_array_equal(relabelled, expected[:3])
    assert len({bytes(row) for row in expected}) == 5


def test_pandas_and_dictionaries(table: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(table).iloc[[1, 0, 2, 3, 4]]
    frame["sex"] = frame["sex"].astype("category")
    frame.to_parquet(table.parent / "p.parquet")
    source = table.parent / "p.parquet"
    got = features(source, label="income", columns=COLUMNS)
    np.testing.assert_allclose(got, np.array(ENCODED)[[1, 0, 2, 3, 4]])
    ours = digests(table, label="income", columns=COLUMNS)
    np.testing.assert_array_equal(digests(source, label="income", columns=COLUMNS)[0], ours[1])


def test_what_is_not_declared_is_refused(table: Path) -> None:
    with pytest.raises(DataError, match=r'"age": \[LOW, HIGH\].*null leaves a column out'):
        read(table, label="income")
    part = {name: COLUMNS[name] for name in ("sex", "work")}
    with pytest.raises(DataError, match="'age' is numeric and has no declared range"):
        read(table, label="income", columns=part)
    with pytest.raises(DataError, match="'sex' is text and has no declared list of categories"):
        read(table, label="income", columns={"age": [0, 1], "hours": [0, 1], "work": ["a"]})
    with pytest.raises(UnknownName, match="Did you mean 'age'"):
        read(table, label="income", columns={**COLUMNS, "aged": [0, 1]})
    with pytest.raises(UnknownName, match="Did you mean 'income'"):
        read(table, label="incone", columns=COLUMNS)
    with pytest.raises(DataError, match="Which is the label"):
        read(table, columns=COLUMNS)


def test_columns_can_be_left_out(table: Path) -> None:
    data = read(table, label="income", columns={**COLUMNS, "hours": None})
    assert data.public.shape == (5,)
    assert data.public.preparation[-1] == "columns left out: hours"
    with pytest.raises(DataError, match="no column besides the label"):
        read(table, label="income", columns=dict.fromkeys(COLUMNS))


@pytest.mark.parametrize(
    "wrong",
    [
        {"age": [90, 17]},
        {"age": [0, float("inf")]},
        {"age": "0-90"},
        {"age": []},
        {"sex": ["Male", "Male"]},
        {"sex": [1, 1.0, "x"]},
    ],
)
def test_declarations_that_make_no_sense(table: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadConfiguration):
        read(table, label="income", columns={**COLUMNS, **wrong})


def test_declarations_that_cannot_be_read(table: Path) -> None:
    with pytest.raises(DataError, match="not valid JSON"):
        read(table, label="income", columns='{"age": ')
    with pytest.raises(DataError, match="cannot be read"):
        read(table, label="income", columns="nowhere.json")
    with pytest.raises(UnknownName, match="'lo'"):
        read(table, label="income", columns={**COLUMNS, "age": {"lo": 1, "high": 2}})
    with pytest.raises(BadConfiguration, match="resize, grayscale and value_range"):
        read(table, label="income", columns=COLUMNS, resize=3)


def test_labels(table: Path, tmp_path: Path) -> None:
    def labelled(cells: str) -> Any:
        path = tmp_path / "l.csv"
        rows = (f"{i},{cell}\n" for i, cell in enumerate(cells.split()))
        path.write_text("x,label\n" + "".join(rows))
        return read(path, columns={"x": [0, 9]})

    assert labelled("10 2 10 2 9").public.classes == ("2", "9", "10")
    assert labelled("10 2 10 2 9")._records._labels.tolist() == [2, 0, 2, 0, 1]
    assert labelled("true false true").public.classes == ("false", "true")
    assert labelled("1.0 2.0 1.0").public.classes == ("1", "2")
    with pytest.raises(DataError, match="look like measurements"):
        labelled("0.5 1.5 1")
    with pytest.raises(DataError, match="found -1"):
        labelled("0 -1 1")
    (tmp_path / "e.csv").write_text("x,label\n1,0\n2,\n3,1\n")
    with pytest.raises(DataError, match="1 cells of label column 'label' are empty"):
        read(tmp_path / "e.csv", columns={"x": [0, 9]})


def test_encoding_and_decoding_agree(table: Path) -> None:
    public = read(table, label="income", columns=COLUMNS).public
    cells = decode_table(np.array(ENCODED), public.columns).to_pydict()
    assert cells["age"] == [17, 90, 54, 90, 17]
    assert cells["sex"] == ["Male", "Female", "Male", None, None]
    assert cells["work"] == ["Private", "Private", "State", None, "Private"]
    np.testing.assert_allclose(cells["hours"], [40, 20.5, 40, 40, 80])
    soft = decode_table(np.array([[3.0, 0.2, 0.3, -1, 0.1, -9]]), public.columns)
    assert soft.to_pylist() == [{"age": 90, "sex": "Male", "work": "State", "hours": 0.0}]
    with pytest.raises(DataError, match=r"need \(rows, 6\)"):
        decode_table(np.zeros((2, 5)), public.columns)


def test_held_out_tables_take_the_declared_columns(table: Path) -> None:
    public = read(table, label="income", columns=COLUMNS).public
    test = table.parent / "test.csv"
    test.write_text("income,hours,work,sex,age\nhigh,80,State,Male,17\n")
    held_out = read_heldout(test, like=public, label="income")
    assert held_out.images.tolist() == [[-1, 0, 1, 0, 1, 1]]
    assert held_out.labels.tolist() == [0]
    test.write_text("income,hours,work,sex\nhigh,80,State,Male\n")
    with pytest.raises(UnknownName, match="no column 'age'"):
        read_heldout(test, like=public, label="income")


def test_held_out_tables_may_lack_columns_left_out(table: Path) -> None:
    public = read(table, label="income", columns={**COLUMNS, "hours": None}).public
    held_out = read_heldout(table, like=public, label="income")
    np.testing.assert_allclose(held_out.images, np.array(ENCODED)[:, :5])


def test_several_files_are_one_table(table: Path) -> None:
    rows = TEXT.splitlines()
    folder = table.parent / "parts"
    folder.mkdir()
    (folder / "1.csv").write_text("\n".join(rows[:3]) + "\n")
    (folder / "2.csv").write_text("\n".join([rows[0], *rows[3:]]) + "\n")
    np.testing.assert_allclose(features(folder, label="income", columns=COLUMNS), ENCODED)
    (folder / "3.csv").write_text("age,sex\n1,Male\n")
    with pytest.raises(DataError, match="other columns"):
        read(folder, label="income", columns=COLUMNS)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"x,label\n1,a\n2\n", "not a readable table"),
        (b"", "not a readable table"),
        (b"x,label\n1,\xff\xfe\n2,b\n", "column 'label' is not UTF-8 text"),
        (b"x,x,label\n1,2,a\n1,2,b\n", "names a column twice"),
        (b"x,label\n1,a\n2,a\n", "one class, 'a'"),
        (b"x,label\n", "there are no records"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, text: bytes, match: str) -> None:
    (tmp_path / "t.csv").write_bytes(text)
    with pytest.raises(DataError, match=match):
        read(tmp_path / "t.csv", columns={"x": [0, 1]})


def test_damaged_parquet_and_arrow(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"x": [1, 2], "label": ["a", "b"]}), tmp_path / "t.parquet")
    whole = (tmp_path / "t.parquet").read_bytes()
    for name in ("u.parquet", "u.arrow"):
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match="not a readable table"):
            read(tmp_path / name, columns={"x": [0, 1]})

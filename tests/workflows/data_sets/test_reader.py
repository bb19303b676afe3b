import json
from importlib.util import find_spec

import numpy as np
import pytest
from pydantic import ValidationError

from astraflow.config.recipe import DataSet
from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.data_sets import open_data_set

ROWS = [{"id": f"r{i}", "prompt": "x" * (i + 1)} for i in range(6)]


@pytest.fixture
def jsonl(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def opened(jsonl):
    def make(rows=ROWS, *, seed=0, **settings):
        path = jsonl(rows)
        return open_data_set("train", DataSet(path=path, **settings), path.parent, seed=seed)

    return make


def ids(prompts):
    return [prompt.prompt_id for prompt in prompts]


def test_rows_become_prompts(opened):
    prompt = opened(id_field="id").prompt(2)
    assert (prompt.prompt_id, prompt.data_set) == ("train/r2", "train")
    assert prompt.fields == {"id": "r2", "prompt": "xxx"}


def test_a_relative_path_starts_at_the_root(jsonl):
    path = jsonl(ROWS)
    assert len(open_data_set("train", DataSet(path=path.name), path.parent)) == 6


def test_seeds_are_rows_without_a_file(tmp_path):
    reader = open_data_set("train", DataSet(seeds=(5, 9), limit=3), tmp_path)
    assert [prompt.fields for prompt in map(reader.prompt, range(3))] == [
        {"seed": 5},
        {"seed": 6},
        {"seed": 7},
    ]
    assert ids(map(reader.prompt, range(3))) == ["train/5", "train/6", "train/7"]
    assert sorted(ids(reader.epoch(1))) == ids(map(reader.prompt, range(3)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "exactly one of"),
        ({"path": "x.jsonl", "seeds": (0, 2)}, "exactly one of"),
        ({"seeds": (4, 4)}, "has no seed"),
        ({"seeds": (-1, 4)}, "greater than or equal to 0"),
    ],
)
def test_rows_come_from_a_file_or_from_seeds(settings, said):
    with pytest.raises(ValidationError, match=said):
        DataSet(**settings)


def test_every_pass_has_every_row_once_in_an_order_of_its_own(opened):
    reader = opened(id_field="id")
    passes = [ids(reader.epoch(number)) for number in range(3)]
    assert all(sorted(one) == ids(map(reader.prompt, range(6))) for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    assert [prompt.epoch for prompt in reader.epoch(2)] == [2] * 6


def test_the_order_follows_from_the_seed(opened):
    assert ids(opened(seed=5).epoch(1)) == ids(opened(seed=5).epoch(1))
    assert ids(opened(seed=5).epoch(1)) != ids(opened(seed=6).epoch(1))


def test_without_shuffle_the_order_is_that_of_the_file(opened):
    reader = opened(id_field="id", shuffle=False)
    assert ids(reader.epoch(3)) == [f"train/r{i}" for i in range(6)]


def test_ids_are_digests_of_the_row_where_no_field_is_named(opened):
    reader = opened([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}])
    first, other, again = ids(map(reader.prompt, range(3)))
    assert first != other
    assert again == f"{first}-2"
    assert ids(map(opened([{"prompt": "b"}]).prompt, [0])) == [other]


def test_half_of_a_surrogate_pair_is_as_good_as_any_character(opened):
    half, rest = opened([{"prompt": "a\ud83d"}, {"prompt": "a"}])
    assert half.fields == {"prompt": "a\ud83d"}
    (named,) = opened([{"id": "a\ud83d"}], id_field="id")
    assert named.prompt_id == "train/a\ufffd"
    assert half.prompt_id != rest.prompt_id


def test_long_rows_are_left_out_and_counted(opened):
    reader = opened(max_prompt_chars=4, id_field="id")
    assert (len(reader), reader.row_count, reader.left_out_count) == (4, 6, 2)
    assert reader.prompt(3).prompt_id == "train/r3"


def test_a_limit_takes_the_first_rows(opened):
    assert len(opened(limit=2)) == 2
    assert len(opened(limit=100)) == 6


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        ([{"id": 1}, {"id": 1}], {"id_field": "id"}, "row 2 has the id '1' of an earlier row"),
        ([{"prompt": "a"}], {"id_field": "id"}, "row 1 has no 'id' (id_field), only prompt"),
        ([{"text": "a"}], {"max_prompt_chars": 3}, "has no 'prompt' (length_field), only text"),
        (["a"], {}, "row 1 is not a JSON object"),
    ],
)
def test_bad_rows_are_named(opened, rows, settings, said):
    with pytest.raises(AstraflowError) as caught:
        opened(rows, **settings)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert said in caught.value.message


@pytest.mark.parametrize("broken", ['{"a": ', '{"a": ' + "[" * 100_000])
def test_broken_json_names_the_row(tmp_path, broken):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n\n{broken}\n')
    with pytest.raises(AstraflowError, match="row 2 is not JSON"):
        open_data_set("train", DataSet(path=path), tmp_path)


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.parquet"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(AstraflowError, match=f"{name} cannot be read: No such file"):
        open_data_set("train", DataSet(path=tmp_path / name), tmp_path)


def test_an_unknown_ending_asks_for_the_format(tmp_path):
    with pytest.raises(AstraflowError, match="Set format to jsonl, parquet, datasets"):
        open_data_set("train", DataSet(path=tmp_path / "rows.txt"), tmp_path)


@pytest.fixture
def parquet_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(
        pyarrow.Table.from_pylist([{**row, "image": b"\x00"} for row in ROWS]), path
    )
    return path


def test_bytes_within_a_field_are_told_before_a_run(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": "a", "image": {"bytes": b"\x00", "path": "a.png"}}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(AstraflowError, match="row 1 has a field that JSON cannot say"):
        open_data_set("train", DataSet(path=tmp_path / "rows.parquet"), tmp_path)


def test_parquet_gives_the_same_rows_and_bytes_as_blobs(parquet_file, opened, tmp_path):
    reader = open_data_set("train", DataSet(path=parquet_file, id_field="id"), tmp_path)
    other = opened(id_field="id")
    assert ids(reader.epoch(1)) == ids(other.epoch(1))
    assert reader.prompt(1).fields == other.prompt(1).fields
    assert reader.prompt(1).blobs == {"image": b"\x00"}


def test_a_broken_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"not parquet")
    with pytest.raises(AstraflowError, match=r"rows\.parquet cannot be read"):
        open_data_set("train", DataSet(path=path), tmp_path)


@pytest.mark.skipif(find_spec("datasets") is not None, reason="datasets is installed")
def test_a_folder_needs_the_datasets_library(tmp_path):
    with pytest.raises(AstraflowError, match=r"pip install 'datasets"):
        open_data_set("train", DataSet(path=tmp_path), tmp_path)


def test_a_saved_data_set_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    reader = open_data_set("train", DataSet(path=tmp_path / "saved", id_field="id"), tmp_path)
    assert reader.prompt(5).fields == ROWS[5]


def test_a_thousand_rows_all_come(opened):
    reader = opened([{"id": i, "prompt": "x"} for i in range(1000)], id_field="id")
    order = [int(prompt.fields["id"]) for prompt in reader.epoch(0)]
    assert np.array_equal(np.sort(order), np.arange(1000))


def test_all_prompts_come_in_the_order_of_the_file(opened):
    reader = opened(id_field="id", max_prompt_chars=4, limit=5)
    assert list(reader) == [reader.prompt(index) for index in range(len(reader))]
    assert ids(reader) == ["train/r0", "train/r1", "train/r2", "train/r3"]

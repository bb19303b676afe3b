import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.buckets import Bucket

pytest.importorskip("fsspec")


@pytest.mark.parametrize("url", ["bucket/run", "file://", "python://x", "file:///a::file:///b"])
def test_an_address_that_is_no_store_is_refused(url):
    with pytest.raises(AstraflowError) as caught:
        Bucket(url)
    assert caught.value.reason is Reason.INVALID_FIELD


def test_a_store_whose_package_is_missing_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(AstraflowError, match=r"pip install 'fsspec") as caught:
        Bucket("s3://bucket/run")
    assert caught.value.reason is Reason.CAPABILITY_MISSING


def test_a_bucket_in_memory_reads_what_it_wrote():
    bucket = Bucket("memory://test_a_bucket/run")
    assert bucket.names() == []
    bucket.write("a/b", b"0123456789")
    bucket.write_parts("a/c", [b"01", b"23"])
    assert bucket.read("a/b", 2, 4) == b"23"
    assert bucket.names("a") == ["b", "c"]
    bucket.remove("a")
    bucket.remove("a")
    with pytest.raises(FileNotFoundError):
        bucket.read("a/b")


def test_a_pipe_is_no_object(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert Bucket(f"file://{tmp_path}").read("pipe", 0, 10) == b""


def test_a_store_that_refuses_an_object_is_a_typed_error_for_who_writes():
    bucket = Bucket("memory://test_no_bucket/run")
    bucket.write("file", b"no folder")
    with pytest.raises(AstraflowError) as caught:
        bucket.write("file/a", b"1")
    assert caught.value.reason is Reason.SOURCE_UNREACHABLE


def test_one_object_can_be_written_by_many_at_once(tmp_path):
    bucket = Bucket(f"file://{tmp_path}")
    content = bytes(1 << 20)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: bucket.write("folder/layout", content), range(40)))

    assert bucket.read("folder/layout") == content
    assert bucket.names("folder") == ["layout"]


@pytest.fixture(params=["file", "memory"])
def bucket(request, tmp_path):
    folder = tmp_path if request.param == "file" else "test_buckets"
    return Bucket(f"{request.param}://{folder}/run")


def test_many_objects_are_removed_whether_or_not_they_are_there(bucket):
    for name in ("a", "b", "c"):
        bucket.write(name, name.encode(), is_synced=True)
    bucket.remove_all(["a", "never", "b"])
    assert bucket.names() == ["c"]
    bucket.remove_all(["c"])
    bucket.remove_all(["c"])
    bucket.remove_all([])
    assert bucket.names() == []

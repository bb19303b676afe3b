"""What the doctor says of a machine."""

from astraflow.launch.doctor import examine


def test_a_cache_that_cannot_be_made_is_a_finding_with_a_cure(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    found = {check.name: check for check in examine()}
    assert found["cache"].works is False
    assert "XDG_CACHE_HOME" in found["cache"].advice
    assert found["loopback"].works

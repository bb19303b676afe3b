import pytest


@pytest.mark.slow
def test_the_trainer_that_is_shown_publishes_versions_that_go_live(run_example):
    assert "1 passed" in run_example("trainers.md")


def test_a_trainer_takes_forty_lines(blocks):
    [code] = [code for _, title, code in blocks("trainers.md") if title == "my_trainer.py"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 43

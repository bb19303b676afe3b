import subprocess
import sys

import pytest
from blake3 import blake3

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows import registry, single_turn
from astraflow.workflows.registry import Kind, code_digest, find, scorer


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    source = "class Mine:\n    pass\n"
    (tmp_path / "user_code_of_this_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield source
    sys.modules.pop("user_code_of_this_test", None)


def test_every_built_in_name_can_be_found():
    for kind, names in registry._BUILT_IN.items():
        for name in names:
            assert isinstance(find(kind, name), type)


def test_a_class_is_found_by_its_module(user_module):
    assert find(Kind.WORKFLOW, "user_code_of_this_test:Mine").__name__ == "Mine"


def test_the_digest_is_that_of_the_source(user_module):
    digest = code_digest(Kind.WORKFLOW, "user_code_of_this_test:Mine")
    assert digest == blake3(user_module.encode()).digest()
    assert "user_code_of_this_test" not in sys.modules


def test_a_decorated_function_is_found_by_its_name():
    @scorer("always_one_of_this_test")
    def always_one(prompt, text):
        return 1.0

    assert find(Kind.SCORER, "always_one_of_this_test") is always_one


def test_a_taken_name_is_refused():
    with pytest.raises(AstraflowError) as caught:
        registry.workflow("single_turn")(single_turn.SingleTurn)
    assert caught.value.reason is Reason.NAME_TAKEN


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("singel_turn", "did you mean single_turn?"),
        ("no_such_module:Thing", "no_such_module"),
        ("json:NoSuchThing", "NoSuchThing"),
    ],
)
def test_what_is_not_here_is_unknown(name, said):
    with pytest.raises(AstraflowError, match="workflows") as caught:
        find(Kind.WORKFLOW, name)
    assert caught.value.reason is Reason.CODE_UNKNOWN
    assert said in caught.value.message


def test_nothing_heavy_is_imported():
    code = (
        "import sys, astraflow.workflows.building, astraflow.workflows.data_sets,"
        "astraflow.workflows.solver_verifier, astraflow.workflows.multi_turn_retry;"
        "heavy = {'torch', 'transformers', 'tokenizers', 'pyarrow', 'grpc'} & set(sys.modules);"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""What the templates of languages without peers generate can be compiled."""

import subprocess

import pytest

pytestmark = [pytest.mark.peers, pytest.mark.long]


def compile_with(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["raas_service", "trainer_service"])
def test_a_service_in_cpp_compiles(cpp, name):
    source = cpp / "astraflow" / "dataflow" / "v1" / f"{name}.grpc.pb.cc"
    compile_with("g++", "-std=c++17", "-fsyntax-only", "-I", cpp, source)


def test_a_service_in_java_compiles(java, tmp_path):
    package = java / "io" / "github" / "astraflow" / "dataflow" / "v1"
    # With Debian's jars.
    places = ["-classpath", "/usr/share/java/*", "-sourcepath", java, "-d", tmp_path]
    compile_with("javac", "-proc:none", "-nowarn", *places, package / "TrainerServiceGrpc.java")
